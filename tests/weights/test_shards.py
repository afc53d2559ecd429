"""Parts of a tensor, by rows or by columns: where they lie in the whole, and that their fingerprints add up."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weights.fingerprint import fingerprint
from slipstream.weights.shards import Shard, part_of, place_of


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    size=st.integers(1, 5),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    data=st.data(),
)
def test_parts_add_up_to_the_whole(shape, size, dtype, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    total, parts = 0, []
    for rank in range(size):
        part = part_of(whole, dim, rank, size)
        shard = Shard("w", part.contiguous(), tuple(shape), dim)
        total += fingerprint(shard.part, *place_of(shard, rank, size), tuple(part.shape))
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim), whole)
    assert [len(part.unbind(dim)) for part in parts] == [len(part.unbind(dim)) for part in chunks(whole, size, dim)]
    assert total % 2**64 == fingerprint(whole)


def chunks(whole, size, dim):
    """What torch deals, and nothing for the last ones."""
    found = list(whole.chunk(size, dim))
    return found + [whole.narrow(dim, 0, 0)] * (size - len(found))


def test_what_every_process_has_is_the_whole():
    whole = torch.randn(3, 4)
    shard = Shard("w", part_of(whole, None, 1, 2), (3, 4), None)
    assert fingerprint(shard.part, *place_of(shard, 1, 2), (3, 4)) == fingerprint(whole)
