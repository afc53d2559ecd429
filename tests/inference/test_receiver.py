"""A worker's methods for weight updates, with a small model of torch in the place of vLLM's."""

import json
import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch
from torch import nn

from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.plugin.weights import receiver
from slipstream.inference.plugin.weights.receiver import WorkerExtension
from slipstream.inference.plugin.weights.tensor_map import TensorMap, judge
from slipstream.records import Delta, ParameterSpec, Patch, Ticket, Version
from slipstream.weights.bridges.single_copy import SharedTensor, SharedWeights, open_weights
from slipstream.weights.fingerprint import describe

SHAPES = {"q.weight": (2, 3), "k.weight": (2, 3), "o.weight": (3, 3), "t.weight": (2, 2), "gone.weight": (1,)}


class LogitsProcessor(nn.Module):
    def __init__(self, **fields):
        super().__init__()
        vars(self).update(fields)


class Model(nn.Module):
    """Fuses q and k, transforms t, and keeps nothing of the last."""

    def __init__(self):
        super().__init__()
        self.qk, self.o, self.t = (nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (3, 3), (2, 2)))
        self.loads = []

    @torch.no_grad()
    def load_weights(self, weights):
        names = []
        for name, tensor in weights:
            names.append(name)
            match name.split(".")[0]:
                case "q":
                    self.qk[:2].copy_(tensor)
                case "k":
                    self.qk[2:].copy_(tensor)
                case "o":
                    self.o.copy_(tensor)
                case "t":
                    self.t.copy_(tensor * 2)
        self.loads.append(names)


@pytest.fixture
def worker(monkeypatch):
    made = WorkerExtension()
    made.rank, made.repacked = 1, []
    made.model_runner = SimpleNamespace(model=Model())
    monkeypatch.setattr(patch_table, "_applied", ["live_cpu_weights"])
    monkeypatch.setattr(receiver.cpu, "repack", lambda model: made.repacked.append(model.qk.sum().item()))
    monkeypatch.setattr(receiver.cpu, "stale_packed_layers", lambda model: ["mlp"])
    return made


def model_of(worker):
    return worker.model_runner.model


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def ticket_of(new, bridge="disk", **fields):
    return Ticket(Version(0, 1), bridge, "/weights", describe(new.items()), **fields)


def text(record):
    return msgspec.json.encode(record).decode()


def load(worker, ticket, *rank):
    return json.loads(worker.slipstream_load(text(ticket), *rank))


def fingerprint(worker, specs):
    return json.loads(worker.slipstream_fingerprint(text(specs)))


def test_a_whole_version_is_loaded_from_files_packed_and_fingerprinted(worker, monkeypatch):
    new, read = weights(), []
    monkeypatch.setattr(receiver, "read_model_folder", lambda path: read.append(path) or iter(new.items()))
    ticket = ticket_of(new)
    report = load(worker, ticket)
    assert (read, report["num_bytes"]) == ([Path("/weights")], 4 * (6 + 6 + 9 + 4 + 1))
    assert 0 < report["seconds"] < 60
    model = model_of(worker)
    assert torch.equal(model.qk, torch.cat([new["q.weight"], new["k.weight"]]))
    assert worker.repacked == [model.qk.sum().item()], "after the last write"
    answer = fingerprint(worker, ticket.parameters)
    assert (answer["stale"], answer["memory_bytes"]) == (["mlp"], receiver._memory_bytes())
    assert answer["shares"]["t.weight"] == ["0", 0, ""]
    assert answer["shares"]["gone.weight"][:2] == ["0", 0]
    assert judge(ticket.parameters, [answer["shares"]]) == ([], ["t.weight", "gone.weight"])
    model.qk.data[3, 2] += 1
    assert judge(ticket.parameters, [fingerprint(worker, ticket.parameters)["shares"]])[0] == ["k.weight"]


def test_the_map_is_made_once_for_each_layout_and_a_runner_may_name_its_model(worker):
    model = model_of(worker)
    specs = describe(weights().items())
    first = worker._slipstream_locate(specs)
    assert worker._slipstream_locate(describe(weights(1).items())) is first
    assert worker._slipstream_locate(specs[:2]) is not first
    assert len(model.loads) == 2
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model=None)
    assert worker._slipstream_locate(specs[:1]).pieces.keys() == {"q.weight"}


def test_a_delta_is_written_into_what_is_there(worker, monkeypatch):
    new = weights()
    model_of(worker).load_weights(new.items())
    changed = torch.full((2, 3), 5.0)
    monkeypatch.setattr(receiver, "read_model_folder", lambda path: iter([("0", changed.flatten().view(torch.uint8))]))
    patch = Patch("k.weight", 0, 6, "whole", 6)
    ticket = ticket_of(new, delta=Delta(Version(0, 0), (patch,)))
    assert load(worker, ticket)["num_bytes"] == 24
    assert torch.equal(model_of(worker).qk, torch.cat([new["q.weight"], changed]))
    assert len(worker.repacked) == 1
    assert load(worker, ticket_of(new, bridge="single_copy"))["num_bytes"] == 0
    assert len(model_of(worker).loads) == 2, "once to be loaded and once to be seen"


class Group:
    """In the place of the process group."""

    made: ClassVar[list] = []
    device = torch.device("cpu")

    def __init__(self, rendezvous, rank):
        self.rendezvous, self.rank, self.calls, self.sent = rendezvous, rank, [], {}
        Group.made.append(self)

    def receive(self, ticket, memory=None):
        self.calls.append("receive")
        self.memory = {spec.name: memory(spec) for spec in ticket.parameters} if memory else None
        for spec in reversed(ticket.parameters):
            yield [(spec.name, Group.sent[spec.name])]

    def finish(self):
        self.calls.append("finish")

    def leave(self):
        self.calls.append("leave")


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.setattr(receiver.broadcast, "Group", Group)
    monkeypatch.setattr(receiver.broadcast, "rendezvous_of", lambda ticket: ticket.location)
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setattr(Group, "device", Group.device)
    return Group.made


def test_what_the_group_brings_goes_into_memory_and_the_rest_to_the_loader(worker, groups):
    Group.sent = new = weights()
    ticket = ticket_of(new, "broadcast", num_bytes=123)
    assert load(worker, ticket, "3")["num_bytes"] == 123
    (group,) = groups
    assert (group.rendezvous, group.rank, group.calls) == ("/weights", 4, ["receive", "finish"])
    model = model_of(worker)
    assert torch.equal(model.qk, torch.cat([new["q.weight"], new["k.weight"]]))
    assert torch.equal(model.t, new["t.weight"] * 2)
    assert model.loads[1:] == [["t.weight", "gone.weight"]], "in the ticket's order"
    assert [name for name, place in group.memory.items() if place is not None] == ["q.weight", "k.weight", "o.weight"]
    load(worker, ticket_of({"o.weight": new["o.weight"]}, "broadcast"), "3")
    assert len(groups) == 1
    assert len(model.loads) == 3, "which is that of the map"
    load(worker, ticket_of(new, "single_copy"))
    assert group.calls == ["receive", "finish"] * 2, "it has no part in other bridges"
    load(worker, msgspec.structs.replace(ticket, location="/after a restart"))
    assert [(each.rank, each.calls[-1]) for each in groups] == [(4, "leave"), (2, "finish")]
    for _ in range(2):
        assert worker.slipstream_leave() == "null"
    assert groups[1].calls == ["receive", "finish", "leave"]


def test_a_group_of_another_device_gets_no_memory_of_the_model(worker, groups, monkeypatch):
    Group.sent = weights()
    monkeypatch.setattr(Group, "device", torch.device("cuda"))
    load(worker, ticket_of(Group.sent, "broadcast"))
    assert set(groups[0].memory.values()) == {None}


def test_a_delta_may_come_by_the_group(worker, groups):
    Group.sent = {"0": torch.ones(6).view(torch.uint8)}
    specs = describe(weights().items())
    ticket = Ticket(
        Version(0, 1), "broadcast", "/w", specs, delta=Delta(Version(0, 0), (Patch("q.weight", 0, 6, "whole", 6),))
    )
    arriving = Group.receive
    Group.receive = lambda self, ticket: iter([[("0", Group.sent["0"])]])
    try:
        assert load(worker, ticket)["num_bytes"] == 24
    finally:
        Group.receive = arriving
    assert model_of(worker).qk.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    assert groups[0].calls == ["finish"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shared memory of CPUs")
def test_weights_that_are_shared_are_those_that_the_model_computes_with(worker):
    new, model = weights(), model_of(worker)
    model.load_weights(new.items())
    specs = describe(new.items())
    worker._slipstream_locate(specs)
    shared = msgspec.json.decode(worker.slipstream_share(text(specs)), type=SharedWeights)
    assert len(worker.repacked) == 1
    assert torch.equal(model.qk, torch.cat([new["q.weight"], new["k.weight"]]))
    assert shared.refused == {"t.weight": "vLLM's loader transforms it", "gone.weight": "vLLM keeps no copy of it"}
    again = msgspec.json.decode(worker.slipstream_share(text(specs)), type=SharedWeights)
    assert (again, len(worker.repacked)) == (shared, 1)
    opened = open_weights(shared)
    opened["k.weight"].fill_(3.0)
    assert (model.qk[2:] == 3).all()
    assert judge(specs, [fingerprint(worker, specs)["shares"]])[0] == ["k.weight"], "the map is of what is shared"
    worker.slipstream_written()
    assert worker.repacked[1:] == [model.qk.sum().item()]
    assert worker.slipstream_settle() == worker.slipstream_written() == "null"


def test_on_a_gpu_an_update_ends_once_all_work_is_done_and_nothing_is_packed_again(worker, monkeypatch):
    done = []
    gpu = {"is_available": lambda: True, "memory_allocated": lambda: 77, "synchronize": lambda: done.append("waited")}
    for name, function in gpu.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(receiver, "read_model_folder", lambda path: iter(new.items()))
    new, model = {"o.weight": torch.ones(3, 3)}, model_of(worker)
    loads = model.load_weights
    model.load_weights = lambda given: done.append("loads") or loads(given)
    ticket = ticket_of(new)
    load(worker, ticket)
    assert done[-2:] == ["loads", "waited"]
    packed = len(worker.repacked)
    assert (worker.slipstream_settle(), done[-2:]) == ("null", ["waited"] * 2)
    assert (worker.slipstream_written(), len(worker.repacked)) == ("null", packed)
    assert fingerprint(worker, ticket.parameters)["memory_bytes"] == 77
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fingerprint(worker, ticket.parameters)["memory_bytes"] == 0


def test_a_shard_is_shared_with_its_place(worker):
    model = model_of(worker)
    model.load_weights = lambda given: [model.o.copy_(tensor[:, 4:7]) for _, tensor in given]
    spec = ParameterSpec("o.weight", (3, 9), "float32", "")
    shared = msgspec.json.decode(worker.slipstream_share(text((spec,))), type=SharedWeights)
    assert shared.tensors["o.weight"] == SharedTensor(
        0, shared.tensors["o.weight"].offset, (3, 3), (3, 1), "float32", 1, 4
    )


def test_updates_in_place_need_the_patch(worker, monkeypatch):
    monkeypatch.setattr(patch_table, "_applied", [])
    for call in (lambda: load(worker, ticket_of(weights())), lambda: worker.slipstream_share("[]")):
        with pytest.raises(RuntimeError, match="cannot be updated in a running engine on a CPU"):
            call()


def test_an_adapter_is_mapped_once_for_each_slot_and_compared_with_what_its_buffers_hold(worker, monkeypatch):
    spec = ParameterSpec("q.lora_A.weight", (2, 3), "float32", "")
    model, seen = model_of(worker), []
    manager = SimpleNamespace(_adapter_manager="manager")
    worker.model_runner.lora_manager = manager

    def record(found, slot, parameters):
        seen.append((found, slot, [each.name for each in parameters]))
        return TensorMap({"q.lora_A.weight": []}, {"q.lora_A.weight"})

    monkeypatch.setattr(receiver.adapter_map, "slot_of", lambda found, ids: {"manager": ids[0] % 2}[found])
    monkeypatch.setattr(receiver.adapter_map, "record", record)
    monkeypatch.setattr(receiver.adapter_map, "stray_layers", lambda found, slot, located: [f"o of {slot}"])
    for ids in ([3, 2], [5], [4, 1]):
        answer = json.loads(worker.slipstream_fingerprint_adapter(text((spec,)), json.dumps(ids)))
        assert answer == {
            "shares": {"q.lora_A.weight": ["0", 0, ""]},
            "stale": [f"o of {ids[0] % 2}"],
            "memory_bytes": receiver._memory_bytes(),
        }
    assert seen == [("manager", 1, ["q.lora_A.weight"]), ("manager", 0, ["q.lora_A.weight"])]
    assert not model.loads
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        worker.slipstream_fingerprint_adapter("[]", '["3"]')


def test_a_worker_says_what_it_is(worker, monkeypatch):
    applied, name = [], f"slipstream-test-{uuid.uuid4().hex}"
    monkeypatch.setattr(patch_table, "apply_to", applied.append)
    monkeypatch.setattr(patch_table, "_left_out", {"plain_steps": "why"})
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    described = json.loads(worker.slipstream_describe())
    assert described == {
        "patches": ["live_cpu_weights"],
        "patches_left_out": {"plain_steps": "why"},
        "device": "cpu",
        "head_dtypes": [],
        "files": [],
    }
    assert applied == [worker.model_runner]
    model = model_of(worker)
    model.heads = nn.ModuleList([LogitsProcessor(head_dtype=torch.float32), LogitsProcessor()])
    monkeypatch.setenv("VLLM_DIST_IDENT", name)
    path = Path("/dev/shm") / f"{name}-1"
    path.touch()
    try:
        described = json.loads(worker.slipstream_describe())
    finally:
        os.unlink(path)
    assert (described["head_dtypes"], described["files"]) == (["?", "float32"], [str(path)])
