"""Parts of a tensor, by rows or by columns: where they lie in the whole, and that their fingerprints add up."""

import concurrent.futures
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weights.fingerprint import fingerprint
from slipstream.weights.shards import Shard, gathered_everywhere, part_of, place_of


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


@pytest.mark.parametrize("bunch_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("size", [1, 3])
def test_many_tensors_come_together_everywhere(size, bunch_bytes, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    wholes = {
        "rows": (torch.randn(7, 5, generator=generator), 0),
        "columns": (torch.randn(2, 5, 3, generator=generator), 1),
        "other": (torch.randn(9, generator=generator).bfloat16(), 0),
        "one": (torch.randn(1, 4, generator=generator), 0),
    }

    sent, barrier = {}, threading.Barrier(size)

    def all_gather(came, own, group):
        sent[group] = own
        barrier.wait(20)
        for rank, place in enumerate(came):
            place.copy_(sent[rank])
        barrier.wait(20)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)

    def gather(rank):
        shards = (Shard(n, part_of(w, dim, rank, size), tuple(w.shape), dim) for n, (w, dim) in wholes.items())
        found = gathered_everywhere(shards, size, rank, bunch_bytes=bunch_bytes)
        return {name: whole.clone() for name, whole in found}

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        for found in pool.map(gather, range(size)):
            assert found.keys() == wholes.keys()
            assert all(torch.equal(found[name], whole) for name, (whole, _) in wholes.items())
