"""Shards in the memory of an engine's workers: which are shared, where they lie, and what is copied after a change."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.errors import WeightsError
from slipstream.trainer.distributed import engine_memory
from slipstream.trainer.distributed.engine_memory import WorkerMemory
from slipstream.weights.bridges.single_copy import CannotShare, Exporter
from slipstream.weights.shards import Shard, part_of

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or torch.cuda.is_available(), reason="needs Linux and ranks on a CPU"
)
SHAPES = {"rows": (8, 6), "columns": (4, 6), "uneven": (5, 4), "norm": (6,), "swapped": (8, 2)}


class Network(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.config = None
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def model_of(network, **renamed):
    def stored(name, tensor):
        return renamed[name](tensor) if name in renamed else [(name, tensor)]

    return SimpleNamespace(network=network, folder="the-folder", stored=stored)


def workers_of(network, size=2, refused=None, without=()):
    """Each has half of the rows or columns; the norm as a whole; and of one matrix the other's half."""
    found = []
    for rank in range(size):
        views, places = {}, {}
        for name, parameter in network.named_parameters():
            whole, dim = parameter.detach(), int(name == "columns")
            number = size - 1 - rank if name == "swapped" else rank
            part = whole if name == "norm" else part_of(whole, dim, number, size)
            start = 0 if name == "norm" else number * -(-whole.shape[dim] // size)
            views[name], places[name] = nn.Parameter(part.contiguous(), requires_grad=False), (dim, start)
        exporter = Exporter(views.values())
        kept = {name: view.data for name, view in views.items() if name not in {*without, *(refused or ())}}
        found.append((exporter.describe(kept, refused or {}, places), kept, exporter))
    return found


def test_what_both_divide_alike_is_shared_and_the_rest_is_copied():
    network = Network()
    network.norm.requires_grad_(False)
    memory = WorkerMemory(model_of(network), [worker for worker, *_ in workers_of(network)], 1)
    assert memory.dims == {"rows": 0, "columns": 1}
    assert memory.copied == {"uneven", "swapped"}, "what is not trained never changes"


def test_a_worker_alone_has_all():
    network = Network()
    memory = WorkerMemory(model_of(network), [worker for worker, *_ in workers_of(network, size=1)], 0)
    assert memory.dims == {"rows": 0, "columns": 1, "uneven": 0, "norm": 0, "swapped": 0}
    assert memory.copied == set()


def test_the_workers_memory_is_compared_with_the_models_files():
    network = Network()
    memory = WorkerMemory(model_of(network), [worker for worker, *_ in workers_of(network)], 1)
    for name, parameter in network.named_parameters():
        memory.check(name, parameter.detach())
        other = parameter.detach().clone()
        other[-1] += 1 if name != "swapped" else 0
        other[0] += name == "swapped"
        with pytest.raises(WeightsError, match=f"the engine holds another {name} than the files in the-folder"):
            memory.check(name, other)


def test_after_a_change_the_worker_has_its_slices(monkeypatch):
    network = Network()
    made = workers_of(network)
    memory = WorkerMemory(model_of(network), [worker for worker, *_ in made], 1)
    changed = {name: parameter.detach() + 1 for name, parameter in network.named_parameters()}
    asked = []

    def gathered(shards, size):
        asked.append((list(shards), size))
        return ((name, changed[name]) for name in ("uneven", "swapped"))

    monkeypatch.setattr(engine_memory, "gathered_everywhere", gathered)
    shards = [Shard("uneven", torch.zeros(2, 4), (5, 4))]
    assert memory.write(iter(shards)) == 4 * (2 * 4 + 4 * 2)
    assert asked == [(shards, 2)]
    _, views, _ = made[1]
    assert torch.equal(views["uneven"], changed["uneven"][3:])
    assert torch.equal(views["swapped"], changed["swapped"][:4])
    assert torch.equal(views["rows"], network.rows[4:]), "what is shared is not copied"


def test_why_there_cannot_be_one_copy_is_said():
    network = Network()
    two = [("norm", torch.zeros(2)), ("norm", torch.zeros(4))]
    cases = [
        (workers_of(network, refused={"norm": "it is quantized"}), {}, "norm (it is quantized)"),
        (workers_of(network, without=["norm"]), {}, "norm (the engine has none)"),
        (workers_of(network), {"norm": lambda probe: two}, "norm (transformers converts it, and the engine stores"),
        (workers_of(network), {"norm": lambda probe: []}, "norm (transformers converts it, and the engine stores"),
        (workers_of(network), {"norm": lambda probe: [("norm", probe.clone())]}, "norm (transformers converts it"),
        (workers_of(network, size=1) + workers_of(network, size=1, without=["rows"]), {}, "rows (the engine has none)"),
    ]
    for made, renamed, text in cases:
        with pytest.raises(CannotShare) as caught:
            WorkerMemory(model_of(network, **renamed), [worker for worker, *_ in made], 0)
        assert f"trainer and engine cannot have one copy of {text}" in str(caught.value)
    made = workers_of(Network(torch.bfloat16))
    with pytest.raises(CannotShare, match=r"the engine has it in torch\.bfloat16, the trainer in torch\.float32"):
        WorkerMemory(model_of(network), [worker for worker, *_ in made], 0)


def test_parameters_are_found_by_the_names_that_are_stored():
    network = Network()
    made = workers_of(network)
    renamed = {"rows": lambda probe: [("columns", probe)], "columns": lambda probe: [("rows", probe)]}
    memory = WorkerMemory(model_of(network, **renamed), [worker for worker, *_ in made], 0)
    assert memory._places["rows"] == (1, 0)
