"""Parts of a tensor, by rows or by columns: where they lie in the whole, and that their fingerprints add up."""

import concurrent.futures
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.records import ParameterSpec
from slipstream.weights.fingerprint_torch import fingerprint
from slipstream.weights.shards import (
    Shard,
    ShardedWeights,
    gathered,
    gathered_everywhere,
    held,
    part_of,
    place_of,
)


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


def make_wholes():
    """Of several kinds, and along which dimension each is dealt out; one is everybody's."""
    generator = torch.Generator().manual_seed(0)
    return {
        "everybody's": (torch.randn(3, generator=generator), None),
        "rows": (torch.randn(7, 5, generator=generator), 0),
        "columns": (torch.randn(2, 5, 3, generator=generator), 1),
        "also everybody's": (torch.arange(4), None),
        "other": (torch.randn(9, generator=generator).bfloat16(), 0),
        "one": (torch.randn(1, 4, generator=generator), 0),
    }


def shards_of(wholes, rank, size):
    return [Shard(name, part_of(w, dim, rank, size), tuple(w.shape), dim) for name, (w, dim) in wholes.items()]


class Together:
    """Collectives of several threads, each of which calls itself by its rank."""

    def __init__(self, size, monkeypatch):
        self.size, self.sent, self.barrier, self.num_messages = size, {}, threading.Barrier(size), 0
        monkeypatch.setattr(torch.distributed, "all_gather", self.all_gather)
        monkeypatch.setattr(torch.distributed, "gather", self.gather)

    def all_gather(self, came, own, group):
        self.sent[group] = own
        self.barrier.wait(20)
        for rank, place in enumerate(came):
            place.copy_(self.sent[rank])
        self.barrier.wait(20)

    def gather(self, own, came, dst, group, async_op):
        """Only once somebody waits for it is it there."""
        assert (dst, async_op, came is None) == (0, True, group != 0)
        self.num_messages += group == 0
        return SimpleNamespace(wait=lambda: self.all_gather(came or [], own, group))

    def all_do(self, work):
        with concurrent.futures.ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))


@pytest.mark.parametrize("bunch_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("size", [1, 3])
def test_many_tensors_come_together_everywhere(size, bunch_bytes, monkeypatch):
    wholes = {name: (whole, dim) for name, (whole, dim) in make_wholes().items() if dim is not None}
    together = Together(size, monkeypatch)

    def gather(rank):
        found = gathered_everywhere(shards_of(wholes, rank, size), size, rank, bunch_bytes=bunch_bytes)
        return {name: whole.clone() for name, whole in found}

    for found in together.all_do(gather):
        assert found.keys() == wholes.keys()
        assert all(torch.equal(found[name], whole) for name, (whole, _) in wholes.items())


@pytest.mark.parametrize(("bunch_bytes", "num_messages"), [(1, 4), (400, 3), (1 << 20, 3)])
@pytest.mark.parametrize("size", [1, 3])
def test_tensors_come_to_rank_0_in_their_order(size, bunch_bytes, num_messages, monkeypatch):
    wholes, together = make_wholes(), Together(size, monkeypatch)

    def gather(rank):
        return list(gathered(shards_of(wholes, rank, size), rank, size, rank, bunch_bytes=bunch_bytes))

    first, *others = together.all_do(gather)
    assert [name for name, _ in first] == list(wholes)
    assert all(torch.equal(tensor, wholes[name][0]) and tensor.is_contiguous() for name, tensor in first)
    assert together.num_messages == num_messages, "types are apart, and what is too large for one"
    assert not any(others)


@pytest.mark.parametrize("wanted", range(7))
def test_whoever_has_enough_of_the_tensors_leaves_nobody_waiting(wanted, monkeypatch):
    wholes, together = make_wholes(), Together(2, monkeypatch)

    def gather(rank):
        coming = gathered(shards_of(wholes, rank, 2), rank, 2, rank, bunch_bytes=1)
        found = list(itertools.islice(coming, wanted if rank == 0 else None))
        if wanted:  # one that was not begun has nobody waiting for it
            coming.close()
        else:
            list(coming)
        return [name for name, _ in found]

    assert together.all_do(gather) == [list(wholes)[:wanted], []]
    assert together.num_messages == 4


@pytest.mark.parametrize(("size", "num_messages"), [(1, 3), (2, 3), (4, 3)])
def test_a_message_of_all_processes_together_is_full_but_not_more(size, num_messages, monkeypatch):
    """Six tensors of 32 bytes, two in each message, however many processes share them."""
    wholes = {str(number): (torch.full((8,), float(number)), 0) for number in range(6)}
    together = Together(size, monkeypatch)

    def gather(rank):
        return [name for name, _ in gathered(shards_of(wholes, rank, size), rank, size, rank, bunch_bytes=64)]

    assert together.all_do(gather)[0] == list(wholes)
    assert together.num_messages == num_messages


def test_a_shard_describes_the_whole():
    spec = Shard("w", torch.ones(2, 3, dtype=torch.bfloat16), (4, 3)).spec("f00")
    assert spec == ParameterSpec("w", (4, 3), "bfloat16", "f00")


def test_weights_that_are_held_can_be_read_again():
    weights = [("a", torch.ones(2)), ("b", torch.zeros(1))]
    specs = (ParameterSpec("a", (2,), "float32", ""),)
    sharded = ShardedWeights(lambda: iter(weights), lambda: specs)
    assert held(sharded) is sharded
    assert list(sharded) == list(sharded) == weights
    assert sharded.describe() == specs
    once = held(iter(weights))
    assert list(once) == list(once) == weights
