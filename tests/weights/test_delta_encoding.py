"""Patches of a delta byte by byte, what is said of them, and what the publisher of deltas hands on."""

import pytest
import torch

from slipstream.records import Delta, ParameterSpec, Patch, Ticket, Version
from slipstream.weights.bridges.delta import Changes, DeltaPublisher, compare, decode, encode, travelling
from slipstream.weights.fingerprint_torch import bits_of

BASE = Version(0, 4, "abc")


def changed_at(places, length, dtype=torch.int16):
    old = torch.zeros(length, dtype=dtype)
    new = old.clone()
    new[places] = torch.arange(1, len(places) + 1, dtype=dtype)
    return new, old


@pytest.mark.parametrize(
    ("places", "codes", "values"),
    [
        ([0], [0], [1]),
        ([255], [255], [1]),
        ([0, 256], [0, 255], [1, 2]),
        ([0, 1, 2, 3, 260], [0, 0, 0, 0, 255, 0], [1, 2, 3, 4, 0, 5]),
        ([*range(19), 18 + 2 * 256 + 1], [*[0] * 19, 255, 255, 0], [*range(1, 20), 0, 0, 20]),
        (list(range(17)), [0] * 17, list(range(1, 18))),
    ],
)
def test_gaps_in_a_byte_each(places, codes, values):
    check_gaps("gaps8", places, 2000, torch.int32, torch.tensor(codes, dtype=torch.uint8), values)


@pytest.mark.parametrize(
    ("places", "codes", "values"),
    [
        ([60_000], [60_000], [1]),
        ([65_535], [65_535], [1]),
        ([65_536, 70_000], [65_535, 0, 4463], [0, 1, 2]),
    ],
)
def test_gaps_in_two_bytes_each_are_shifted_to_what_has_a_sign(places, codes, values):
    shifted = torch.tensor([code - 32_768 for code in codes], dtype=torch.int16)
    check_gaps("gaps16", places, 80_000, torch.int16, shifted, values)


def check_gaps(kind, places, length, dtype, codes, values):
    encoding, count, payload, num_changed = encode(*changed_at(places, length, dtype))
    assert (encoding, count, num_changed) == (kind, len(codes), len(places))
    head = codes.view(torch.uint8).tolist()
    of_values = torch.tensor(values, dtype=dtype).view(torch.uint8).tolist()
    assert payload.tolist() == head + [0] * (-len(head) % 16) + of_values
    found, new = decode(Patch("w", 100, length, encoding, count), dtype, payload)
    assert set(places) <= {place - 100 for place in found.tolist()}
    assert new.tolist() == values


def test_a_delta_of_half_the_size_is_worth_it():
    """Two values of two bytes, with a step of one byte each: six, and twelve are the whole."""
    assert encode(*changed_at([0, 1], 6))[0] == "gaps8"
    assert encode(*changed_at([0, 1], 5))[0] == "whole"
    new, old = changed_at([0, 1], 5)
    _, count, payload, num_changed = encode(new, old)
    assert (count, num_changed, payload.tolist()) == (5, 2, new.view(torch.uint8).tolist())
    found, values = decode(Patch("w", 3, 5, "whole", 5), torch.int16, payload)
    assert (found.tolist(), values.tolist()) == ([3, 4, 5, 6, 7], new.tolist())


def test_what_travels_has_a_number_and_its_bytes():
    parameters = (ParameterSpec("w", (9, 9), "bfloat16", "f"), ParameterSpec("v", (9,), "float32", "e"))
    patches = (Patch("w", 0, 81, "gaps8", 17), Patch("v", 0, 9, "whole", 9), Patch("v", 0, 9, "gaps16", 8))
    ticket = Ticket(Version(0, 5), "disk", "", parameters)
    assert travelling(ticket) == parameters
    ticket = Ticket(Version(0, 5), "disk", "", parameters, delta=Delta(BASE, patches))
    wanted = [("0", 32 + 34), ("1", 36), ("2", 16 + 32)]
    assert travelling(ticket) == [ParameterSpec(name, (size,), "uint8", "") for name, size in wanted]


@pytest.mark.parametrize(("num_changed", "num_elements", "fraction"), [(0, 0, 0.0), (1, 1, 1.0), (1, 2, 0.5)])
def test_the_fraction_of_what_changed(num_changed, num_elements, fraction):
    assert Changes(Delta(BASE, ()), {}, num_changed, num_elements, 4).fraction == fraction


def test_changes_are_counted_over_all_parameters():
    old = {"a": torch.zeros(6, 5), "b": torch.zeros(20, dtype=torch.bfloat16)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][0, 2] = new["a"][5, 4] = new["b"][1] = 1
    found = compare(list(new.items()), {name: bits_of(tensor) for name, tensor in old.items()}, BASE)
    assert found.delta == Delta(BASE, (Patch("a", 0, 30, "gaps8", 2), Patch("b", 0, 20, "gaps8", 1)))
    assert (found.num_changed, found.num_elements, found.whole_bytes) == (3, 50, 160)
    assert found.num_bytes == sum(len(payload) for payload in found.payloads.values()) == 16 + 8 + 16 + 2
    assert found.pays


class Carrier:
    """Notes what it is given."""

    def __init__(self):
        self.done, self.changes = [], []

    def publish(self, weights, step, lineage, announce, changes=None):
        self.changes.append(changes)
        return Ticket(Version(lineage, step, f"{step}"), "disk", "", ())

    def hold(self, step):
        self.done.append(step)

    def close(self):
        self.done.append("closed")


def test_holding_and_closing_are_the_carriers():
    carrier = Carrier()
    publisher = DeltaPublisher(carrier, lambda: None)
    publisher.hold(3)
    publisher.hold(None)
    publisher.close()
    assert carrier.done == [3, None, "closed"]


def test_other_parameters_than_before_are_sent_whole():
    carrier = Carrier()
    publisher = DeltaPublisher(carrier, lambda: carrier_holds[-1])
    carrier_holds = [None]
    versions = [
        {"a": torch.zeros(50)},
        {"a": torch.ones(50)},
        {"a": torch.ones(50), "b": torch.ones(2)},
        {"a": torch.ones(60), "b": torch.ones(2)},
        {"c": torch.ones(60), "b": torch.ones(2)},
        {"c": torch.zeros(60), "b": torch.ones(2)},
    ]
    for step, weights in enumerate(versions):
        carrier_holds.append(publisher.publish(weights.items(), step, 0, lambda ticket: None).version)
    assert [changes and changes.num_changed for changes in carrier.changes] == [None, 50, None, None, None, 60]
    weights["b"] += 1  # the trainer's own tensors are no copies of themselves
    publisher.publish(weights.items(), 6, 0, lambda ticket: None)
    assert carrier.changes[-1].num_changed == 2
    assert carrier.changes[-1].delta.base == Version(0, 5, "5")
