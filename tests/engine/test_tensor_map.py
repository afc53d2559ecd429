"""Which engine memory holds which parameter, seen by watching a loader; no engine needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.inference.plugin.weights.receiver import WorkerExtension
from slipstream.inference.plugin.weights.tensor_map import Piece, Share, TensorMap, compare, record
from slipstream.weights.fingerprint import describe

NAMES = ("experts.0.up_proj.weight", "experts.1.up_proj.weight", "gate.weight")


class Layer(nn.Module):
    """Experts under a kernel of vLLM's called `backend`."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(2, 8, 4))
        self.experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
        self.gate = nn.Linear(4, 2, bias=False)

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "gate.weight":
                self.gate.weight.copy_(tensor)
            else:
                self.experts.w13_weight[int(name.split(".")[1]), 4:].copy_(tensor)


@pytest.mark.parametrize("backend", ["TRITON", "CPU", "FLASHINFER_TRTLLM", "AITER"])
def test_experts_are_verified_only_where_the_kernel_reads_them_as_they_are_loaded(backend):
    layer = Layer(backend)
    weights = {name: torch.randn(2, 4) if name == "gate.weight" else torch.randn(4, 4) for name in NAMES}
    specs = describe(weights.items())
    layer.load_weights(weights.items())
    located = record(layer, specs)
    assert [spec.name for spec in specs if compare(spec, _shares(located, spec.name)) == "match"] == list(NAMES)
    kept = backend in ("TRITON", "CPU")
    assert located.opaque == (set() if kept else set(NAMES[:2]))
    if kept:
        assert torch.equal(located.part(specs[1]).tensor, weights[NAMES[1]])
    else:
        with pytest.raises(ValueError, match="transforms it"):
            located.part(specs[1])


def test_values_go_straight_into_memory_of_their_own_dtype_alone():
    """Bytes of float32 in a parameter that the engine holds in bfloat16 would be other numbers."""
    specs = describe([("a", torch.zeros(2, 4)), ("b", torch.zeros(2, 4))])
    held = {"a": torch.zeros(2, 4), "b": torch.zeros(2, 4, dtype=torch.bfloat16)}
    pieces = {name: [Piece(0, (2, 4), (4, 1), tensor)] for name, tensor in held.items()}
    located = TensorMap(pieces)
    same, other = (located.memory(spec) for spec in specs)
    assert same is not None
    assert same.data_ptr() == held["a"].data_ptr()
    assert other is None


class Picky(nn.Module):
    """Its loader makes tensors of its own, of a dtype that it names, to find the rows that it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4))

    @torch.no_grad()
    def load_weights(self, weights):
        for _, tensor in weights:
            rows = torch.zeros(2, dtype=torch.long) + torch.ones(2, dtype=torch.long)
            assert rows.dtype == torch.long
            self.weight.copy_(tensor[int(rows[0]) : int(rows[0]) + 2])


def test_what_a_loader_computes_for_itself_is_computed_as_it_says():
    weights = {"weight": torch.randn(4, 4)}
    located = record(layer := Picky(), describe(weights.items()))
    assert not located.opaque
    (piece,) = located.pieces["weight"]
    assert piece.offset == 4, "its second row is the first that is kept"
    assert not layer.weight.any(), "and nothing was written"


class Wrapped(nn.Module):
    """A layer with adapters as vLLM 0.26 makes it: a loader does not see through it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Wrapped(nn.Linear(4, 2, bias=False))

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


class AdapterManager:
    """As vLLM's, its length is the number of adapters."""

    def __init__(self, model: nn.Module, num_adapters: int) -> None:
        self.modules = {"gate": model.gate}
        self.num_adapters = num_adapters

    def __len__(self) -> int:
        return self.num_adapters


@pytest.mark.parametrize("num_adapters", [0, 1])
def test_layers_that_can_have_adapters_are_found_whether_there_are_any_or_not(num_adapters):
    model = Adapted()
    wrapped, live = model.gate, model.gate.base_layer.weight
    manager = SimpleNamespace(_adapter_manager=AdapterManager(model, num_adapters))
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(model=model, lora_manager=manager)
    (spec,) = describe([("gate.weight", live.detach().clone())])
    assert worker._slipstream_locate((spec,)).part(spec).tensor.data_ptr() == live.data_ptr()
    assert model.gate is wrapped


HALVES = {0: slice(0, 4), 1: slice(4, 8)}


@pytest.mark.parametrize("held", [[None], [None, None], [0, 1], [0, 0, 1, 1], [0, 1, 0, 1]])
def test_shares_of_workers_add_up_and_those_of_the_same_elements_must_be_equal(held):
    """None: the whole."""
    whole = torch.randn(8, 4)
    (spec,) = describe([("k", whole)])
    copies = [(whole if half is None else whole[HALVES[half]]).clone() for half in held]
    shares = [_share(copy, half) for copy, half in zip(copies, held, strict=True)]
    assert compare(spec, shares) == "match"
    for number, half in enumerate(held):
        damaged = copies[number].clone()
        damaged[1, 2] += 1
        assert compare(spec, [*shares[:number], _share(damaged, half), *shares[number + 1 :]]) == "differs"
    if 1 in held:
        missing = [share for share, half in zip(shares, held, strict=True) if half == 0]
        assert compare(spec, missing) == "unverified"


def _share(target: torch.Tensor, half: int | None) -> Share:
    offset = 0 if half is None else 16 * half
    located = TensorMap({"k": [Piece(offset, tuple(target.shape), target.stride(), target)]})
    return _shares(located, "k")[0]


def _shares(located: TensorMap, name: str) -> list[Share]:
    ((value, count),) = located.shares([name])
    return [Share(value, count, located.place(name))]
