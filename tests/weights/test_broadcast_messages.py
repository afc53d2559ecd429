"""The parts of the bridge `broadcast`, and its publisher before an engine of no workers; a group of one is real."""

from pathlib import Path

import pytest
import torch

from slipstream.records import Delta, ParameterSpec, Patch, Ticket, Version
from slipstream.weights.bridges.broadcast import (
    BroadcastPublisher,
    Group,
    Rendezvous,
    flat_bytes,
    layout,
    messages,
    num_bytes,
    pack,
    rendezvous_of,
    whole,
)
from slipstream.weights.bridges.delta import Changes
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.shards import ShardedWeights

CPU = torch.device("cpu")


class Small(Rendezvous):
    bucket_bytes, direct_bytes = 64, 100


def spec(name, *shape, dtype="float32"):
    return ParameterSpec(name, shape, dtype, "")


@pytest.fixture
def group(tmp_path):
    return Group(Rendezvous(str(tmp_path / "store"), 0, 20.0), rank=0)


def test_offsets_in_a_bucket_are_multiples_of_16():
    assert num_bytes(spec("a", 3, 5)) == 60
    assert num_bytes(spec("a", dtype="bfloat16")) == 2
    assert layout([spec("a", 4), spec("b", 5), spec("c", 1, dtype="bfloat16")]) == ([0, 16, 48], 64)
    assert layout([]) == ([], 0)


def test_a_message_comes_when_its_last_parameter_is_there():
    sizes = {"a": 6, "big": 25, "b": 10, "c": 7, "d": 9, "e": 1, "huge": 60}
    found = messages([spec(name, size) for name, size in sizes.items()], Small("", 1, 1.0))
    names = [[each.name for each in message] for message in found]
    assert names == [["big"], ["a", "b"], ["c", "d"], ["e"], ["huge"]], "b comes after big; 64 bytes fill a bucket"


def test_only_one_whole_contiguous_tensor_needs_no_copy():
    even, odd = torch.arange(4.0), torch.arange(5.0)
    tensors = {"a": even, "b": odd, "turned": torch.ones(2, 4).t()}
    found = whole([spec("a", 4)], tensors, CPU)
    assert found.dtype == torch.uint8
    assert (len(found), found.data_ptr()) == (16, even.data_ptr())
    assert whole([spec("a", 4)], tensors, torch.device("meta")) is None
    assert whole([spec("b", 5)], tensors, CPU) is None
    assert whole([spec("a", 4), spec("a", 4)], tensors, CPU) is None
    assert whole([spec("turned", 4, 2)], tensors, CPU) is None
    assert flat_bytes(torch.empty(0)) is None


def test_what_is_packed_lies_at_its_offsets():
    tensors = {"a": torch.arange(5.0), "b": torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16).t()}
    specs = [spec("a", 5), spec("b", 2, 2, dtype="bfloat16")]
    buffer = torch.zeros(48, dtype=torch.uint8)
    pack(specs, tensors, buffer)
    assert buffer[:20].view(torch.float32).tolist() == [0, 1, 2, 3, 4]
    assert buffer[32:40].view(torch.bfloat16).tolist() == [1, 3, 2, 4]
    assert not buffer[20:32].any()


def test_two_buckets_take_turns_and_are_made_anew_only_for_more(group):
    first, second = group.slot(0, 100), group.slot(1, 100)
    assert (first.dtype, len(first), first.device) == (torch.uint8, 100, CPU)
    assert first.data_ptr() != second.data_ptr()
    assert group.slot(2, 200).data_ptr() == first.data_ptr(), "there is room for twice as much"
    assert group.slot(3, 40).data_ptr() == second.data_ptr()
    assert len(group.slot(4, 201)) == 201
    assert len(group.slot(5, 65 << 20)) == 65 << 20


def test_a_group_of_one_sends_to_nobody(group):
    drained = []

    def tensors():
        yield torch.ones(3)
        yield torch.ones(2)
        drained.append(True)

    group.send([spec("a", 3), spec("b", 2)], tensors())
    assert drained == [True]
    group.broadcast(torch.ones(4, dtype=torch.uint8))
    group.finish()
    group.leave()


def test_the_ticket_says_what_is_sent_and_where_to_join():
    weights, announced = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)}, []
    publisher = BroadcastPublisher(num_workers=0, timeout_s=20.0)
    try:
        first = publisher.publish(weights.items(), 3, 1, announced.append)
        parameters = tuple(describe(weights.items()))
        assert (first.version, first.bridge) == (Version(1, 3, digest(parameters)), "broadcast")
        assert (first.parameters, first.num_bytes, first.changed_fraction, first.delta) == (parameters, 30, None, None)
        rendezvous = rendezvous_of(first)
        assert (rendezvous.num_workers, rendezvous.timeout_s, rendezvous.backend) == (0, 20.0, "gloo")
        assert Path(rendezvous.store).parent.stat().st_mode & 0o777 == 0o700
        patches = (Patch("a", 0, 6, "gaps8", 1),)
        small = {"0": torch.zeros(20, dtype=torch.uint8)}
        large = {"0": torch.zeros(21, dtype=torch.uint8)}
        delta = Delta(first.version, patches)
        less = publisher.publish(weights.items(), 4, 1, announced.append, Changes(delta, small, 1, 9, 40))
        assert (less.num_bytes, less.changed_fraction, less.delta) == (16 + 4, 1 / 9, delta)
        more = publisher.publish(weights.items(), 5, 1, announced.append, Changes(delta, large, 3, 9, 40))
        assert (more.num_bytes, more.changed_fraction, more.delta) == (30, 1 / 3, None)
        assert announced == [first, less, more]
        assert {each.location for each in announced} == {first.location}
    finally:
        publisher.close()


def test_replaced_workers_have_a_new_group():
    numbers, left, weights = iter([0, 0, 1, 1, 3]), [], {"a": torch.ones(3)}
    publisher = BroadcastPublisher(
        num_workers=0, timeout_s=20.0, joined=lambda: next(numbers), leave=lambda: left.append(True)
    )
    try:
        stores = [
            rendezvous_of(publisher.publish(weights.items(), step, 0, lambda ticket: None)).store for step in range(5)
        ]
    finally:
        publisher.close()
    assert [stores.index(store) for store in stores] == [0, 0, 2, 2, 4]
    assert left == [True]


def test_where_tensors_are_gathered_they_are_so_to_the_end():
    read = []

    def gather():
        for name in "ab":
            read.append(name)
            yield name, torch.ones(2)
        read.append("end")

    specs = describe([("a", torch.ones(2)), ("b", torch.ones(2))])
    publisher = BroadcastPublisher(num_workers=0, timeout_s=20.0)
    try:
        ticket = publisher.publish(ShardedWeights(gather, lambda: specs), 0, 0, lambda ticket: None)
    finally:
        publisher.close()
    assert ticket.parameters == specs
    assert read == ["a", "b", "end"]


def test_a_ticket_without_parameters_brings_nothing(group):
    assert list(group.receive(Ticket(Version(0, 0), "broadcast", "", ()))) == []
