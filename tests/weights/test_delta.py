"""Deltas: exact for any bits, wherever the parts of a parameter lie; and against nothing but what the engine holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.errors import WeightsError
from slipstream.inference.plugin.weights import tensor_map
from slipstream.inference.plugin.weights.tensor_map import Piece, TensorMap
from slipstream.records import ParameterSpec, Patch, Ticket, Version
from slipstream.weights.bridges import delta, disk
from slipstream.weights.bridges.broadcast import Rendezvous, layout, messages, pack
from slipstream.weights.bridges.delta import DeltaPublisher, check_base, compare, decode, encode, patched, travelling
from slipstream.weights.bridges.disk import FolderPublisher
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.fingerprint_torch import bits_of
from slipstream.weights.model_files import read_model_folder

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.uint8]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BASE = Version(0, 4, "abc")


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any bits at all: NaNs of every kind, infinities, zeros of both signs."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def changed(old: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """`old` with other bits in about that part of its elements."""
    integers = INTEGERS[old.element_size()]
    new = old.clone()
    mask = torch.rand(old.shape, generator=generator) < density
    new.view(integers)[mask] ^= 1
    return new


def ticket_of(weights: dict[str, Tensor], changes: delta.Changes) -> Ticket:
    parameters = describe(weights.items())
    return Ticket(Version(0, 5, digest(parameters)), "disk", "", parameters, delta=changes.delta)


class Fused(nn.Module):
    """A worker of an engine: q and k in one matrix, rows, columns and a transposed part of others in shards."""

    def __init__(self, shapes: dict[str, tuple[int, int]], dtype: torch.dtype, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.rank, self.num_ranks = rank, num_ranks
        (rows, width), (more, _), (height, columns), (out, inner) = (shapes[n] for n in ("q", "k", "down", "turned"))
        self.qk = empty((rows + more) // num_ranks, width, dtype)
        self.down = empty(height, columns // num_ranks, dtype)
        self.turned = empty(inner, out // num_ranks, dtype)
        self.norm = empty(1, shapes["norm"][1], dtype)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            dim = 1 if name == "down" else 0
            size = tensor.shape[dim] // self.num_ranks
            part = tensor.narrow(dim, self.rank * size, size)
            if name == "turned":
                self.turned.data.copy_(part.t())
            elif name == "down":
                self.down.data.copy_(part)
            else:
                first = 0 if name == "q" else self.qk.shape[0] - size
                self.qk.data.narrow(0, first, size).copy_(part)


def empty(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, columns, dtype=dtype), requires_grad=False)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    long=st.sampled_from([1, 1, 90]),
    density=st.sampled_from([0.0, 0.0004, 0.01, 0.1, 0.3, 0.5, 1.0]),
    num_ranks=st.sampled_from([1, 2, 3]),
    stretch=st.sampled_from([7, 300, 1 << 26]),
    seed=st.integers(0, 2**31),
)
def test_applied_where_it_lies_it_is_the_new_version_bit_for_bit(dtype, sizes, long, density, num_ranks, stretch, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, c, d, e, f = sizes
    shapes = {
        "q": (a * num_ranks, b * long),
        "k": (c * num_ranks, b * long),
        "down": (d, e * num_ranks * long),
        "turned": (f * num_ranks, a),
        "norm": (1, b),
    }
    old = {name: random_bits(dtype, shape, generator) for name, shape in shapes.items()}
    new = {name: changed(tensor, density, generator) for name, tensor in old.items()}
    workers = [Fused(shapes, dtype, rank, num_ranks) for rank in range(num_ranks)]
    wanted = [Fused(shapes, dtype, rank, num_ranks) for rank in range(num_ranks)]
    for worker, other in zip(workers, wanted, strict=True):
        worker.load_weights(old.items())
        other.load_weights(new.items())

    before, delta.STRETCH = delta.STRETCH, stretch
    try:
        changes = compare(list(new.items()), {name: bits_of(tensor) for name, tensor in old.items()}, BASE)
    finally:
        delta.STRETCH = before
    assert changes.num_changed == sum(int((bits_of(new[n]) != bits_of(old[n])).sum()) for n in old)
    ticket = ticket_of(new, changes)
    specs = travelling(ticket)
    assert [(s.name, s.shape[0]) for s in specs] == [(n, p.numel()) for n, p in changes.payloads.items()]
    for worker, other in zip(workers, wanted, strict=True):
        located = tensor_map.record(worker, ticket.parameters)
        for patch in patched(ticket, received(specs, changes.payloads), torch.device("cpu")):
            located.write(*patch)
        for (name, ours), theirs in zip(worker.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(bits_of(ours), bits_of(theirs)), name


def received(specs, payloads):
    """Through packed buckets, as over a group."""
    for bucket in messages(specs, Rendezvous("", 1, 1.0)):
        places, total = layout(bucket)
        buffer = torch.empty(total, dtype=torch.uint8)
        pack(bucket, payloads, buffer)
        for spec, start in zip(bucket, places, strict=True):
            yield spec.name, buffer[start : start + spec.shape[0]]


@settings(max_examples=100, deadline=None)
@given(
    places=st.lists(st.integers(0, 200_000), min_size=1, max_size=40, unique=True).map(sorted),
    length=st.integers(200_001, 210_000),
    start=st.integers(0, 10_000),
)
def test_steps_of_any_length(places, length, start):
    old = torch.zeros(length, dtype=torch.int16)
    new = old.clone()
    new[places] = torch.arange(1, len(places) + 1, dtype=torch.int16)
    encoding, num_values, payload, num_changed = encode(new, old)
    assert num_changed == len(places)
    assert payload.numel() <= 4 * (len(places) + length // 65_536) + 16
    found, values = decode(Patch("w", start, length, encoding, num_values), torch.int16, payload)
    assert torch.equal(found, torch.unique(found))
    assert set(places) <= {place - start for place in found.tolist()}
    again = old.clone()
    again[found - start] = values
    assert torch.equal(again, new)


def test_what_travels_is_the_smallest_of_its_forms():
    old = torch.zeros(1 << 20, dtype=torch.int16)
    sizes = {}
    for every in (2, 10, 100, 1000, 100_000):
        new = old.clone()
        new[::every] = 1
        encoding, _, payload, num_changed = encode(new, old)
        sizes[every] = (encoding, round(payload.numel() / num_changed, 1))
    # A byte for the step and two for the value, or two for each; half of all is not worth it.
    assert sizes == {
        2: ("whole", 4.0),
        10: ("gaps8", 3.0),
        100: ("gaps8", 3.0),
        1000: ("gaps16", 4.0),
        100_000: ("gaps16", 8.2),
    }
    assert encode(old, old) is None


def test_a_parameter_that_the_loader_transforms_is_refused_by_name():
    located = TensorMap({"w": [Piece(0, (4,), (1,), torch.zeros(4))]}, {"w"})
    with pytest.raises(ValueError, match=r"loader transforms w.*publish it whole"):
        located.write(ParameterSpec("w", (4,), "float32", ""), torch.tensor([0]), torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("held", "why", "found"),
    [
        (None, "applying version 0.4 failed: disk full", r"no verified version \(applying version 0\.4 failed"),
        (None, "", r"no verified version \(none came yet\)"),
        (Version(0, 3, "abc"), "", r"the engine holds version 0\.3 \(abc\)"),
        (Version(0, 4, "other"), "", r"the engine holds version 0\.4 \(other\)"),
        (Version(1, 4, "abc"), "", r"the engine holds version 1\.4 \(abc\)"),
    ],
)
def test_a_delta_against_anything_else_is_refused(held, why, found):
    changes = compare([("w", torch.ones(9))], {"w": bits_of(torch.zeros(9))}, BASE)
    ticket = ticket_of({"w": torch.ones(9)}, changes)
    with pytest.raises(WeightsError, match=rf"0\.5 came as a delta against 0\.4 \(abc\), and {'.*'}{found}"):
        check_base(ticket, held, why)
    check_base(ticket, BASE, "")
    check_base(Ticket(Version(0, 5), "disk", "", ()), held, why)


class Run:
    """A publisher of folders, and an engine that holds what it was told to."""

    def __init__(self, folder: Path, num_elements: int = 4000) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.folder = folder / "weights"
        self.held: Version | None = None
        self.publisher = DeltaPublisher(FolderPublisher("disk", self.folder, folder / "model"), lambda: self.held)
        self.weights = {"a": torch.zeros(num_elements, dtype=torch.bfloat16), "b": torch.ones(7, dtype=torch.bfloat16)}
        self.tickets: list[Ticket] = []

    def publish(self, num_changed: int = 1, holds: bool = True) -> Ticket:
        """A version that differs from the last in so many elements; whether the engine then has it."""
        self.weights["a"][:num_changed] += 1
        announced: list[Ticket] = []
        ticket = self.publisher.publish(self.weights.items(), len(self.tickets), 0, announced.append)
        assert announced == [ticket]
        self.tickets.append(ticket)
        if holds:
            self.held = ticket.version
        return ticket

    def restarted(self) -> dict[str, Tensor]:
        """What a new engine makes of the folders that are left: the newest whole version and the deltas after it."""
        chain: list[Ticket] = []
        for ticket in self.tickets:
            chain = [*chain, ticket] if ticket.delta else [ticket]
        weights = dict(read_model_folder(Path(chain[0].location)))
        for ticket in chain[1:]:
            for spec, places, values in patched(ticket, read_model_folder(Path(ticket.location)), torch.device("cpu")):
                weights[spec.name][places] = values
        return weights

    def names(self) -> list[str]:
        return sorted((path.name for path in self.folder.iterdir()), key=lambda name: int(name.split(".")[1]))


def test_whole_first_then_deltas_and_whole_again_after_anything_that_went_wrong(tmp_path):
    run = Run(tmp_path)
    first = run.publish()
    assert (first.delta, first.changed_fraction) == (None, None)
    assert first.num_bytes == 2 * 4007
    second = run.publish(3)
    assert second.delta.base == first.version
    assert second.changed_fraction == 3 / 4007
    assert second.num_bytes == 16 + 6
    assert run.publish(3, holds=False).delta.base == second.version
    assert run.publish(3).delta is None, "the engine does not hold the one before"
    run.held = Version(0, 3, "other")
    assert run.publish(3).delta is None, "of that name, but not that"
    with pytest.raises(RuntimeError):
        run.publisher.publish(run.weights.items(), 9, 0, broken)
    assert run.publish(3).delta is None, "nobody knows what became of the one before"
    assert run.publish(3).delta is not None
    run.weights["a"][0] += 1
    run.publisher.publish(run.weights.items(), 6, 0, lambda ticket: None)
    folder = run.folder / run.tickets[-1].version.name
    assert (folder / "model.safetensors").is_file(), "a version published again is never a delta against itself"


def broken(ticket):
    raise RuntimeError("announced to nobody")


def test_a_delta_that_saves_too_little_travels_whole_and_says_what_changed(tmp_path):
    run = Run(tmp_path)
    run.publish()
    ticket = run.publish(2000)
    assert ticket.delta is None
    assert ticket.changed_fraction == 2000 / 4007
    assert ticket.num_bytes == run.tickets[0].num_bytes
    nothing = run.publish(0)
    assert (nothing.delta.patches, nothing.num_bytes, nothing.changed_fraction) == ((), 0, 0.0)
    assert [torch.equal(run.restarted()[name], tensor) for name, tensor in run.weights.items()] == [True, True]


def test_the_folders_that_are_left_always_lead_to_the_newest_version(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LONGEST_CHAIN", 5)
    run = Run(tmp_path)
    for step in range(30):
        run.publish(1 if step < 20 else 700)
        for name, tensor in run.weights.items():
            assert torch.equal(run.restarted()[name], tensor), step
    wholes = [int(ticket.version.step) for ticket in run.tickets if ticket.delta is None]
    # So many deltas, then as many as are together not larger than a whole version (here 3 of 2,112 bytes).
    assert wholes == [0, 6, 12, 18, 23, 27]
    assert run.names() == [f"0.{step}" for step in range(27, 30)]


def test_a_whole_version_is_kept_until_the_one_after_the_next_whole_one(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LONGEST_CHAIN", 2)
    run = Run(tmp_path)
    seen = []
    for _ in range(6):
        run.publish()
        seen.append(run.names())
    assert seen == [
        ["0.0"],
        ["0.0", "0.1"],
        ["0.0", "0.1", "0.2"],
        ["0.0", "0.1", "0.2", "0.3"],
        ["0.3", "0.4"],
        ["0.3", "0.4", "0.5"],
    ]
