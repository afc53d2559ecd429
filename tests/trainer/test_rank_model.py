"""What one rank does of the commands that all get: its part of fingerprints and of states, an engine's memory."""

import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.test_distributed_learner import Alone

from slipstream.errors import TrainingError
from slipstream.records import SamplingParams
from slipstream.trainer.distributed import worker as module
from slipstream.trainer.distributed.learner import ShardedModel
from slipstream.trainer.distributed.worker import (
    Answer,
    AnyCommand,
    Backward,
    Commit,
    Describe,
    Gather,
    Load,
    Negate,
    Objectives,
    Prepare,
    RankModel,
    Save,
    Score,
    decode,
    encode,
    rank_batch_of,
)
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.fingerprint import describe
from slipstream.weights.shards import Shard, part_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs ranks on a CPU")
NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def sharded(group, model_folder):
    model = PolicyModel.load(model_folder, "bfloat16", checked=False)
    group.shard(model, checked=False)
    return model


class State:
    """An optimizer that has this to save."""

    loss_scale = SimpleNamespace(value=1.0)

    def __init__(self, tensors, heard=None):
        self.step, self.tensors, self.heard, self.loaded = 5, tensors, heard, {}

    def state(self):
        return self.tensors

    def load_state(self, tensors):
        self.loaded = tensors

    def commit(self):
        self.heard.append("committed")


def test_on_a_gpu_a_rank_waits_for_weights_that_change(monkeypatch):
    network = torch.nn.Linear(3, 2)
    network.weight.requires_grad_(False)
    network.bias.data = torch.tensor([5.0, 7.0])
    gpu, cpu = (
        RankModel(SimpleNamespace(device=torch.device(kind)), SimpleNamespace(network=network))
        for kind in ("cuda", "cpu")
    )
    before, heard = network.weight.clone(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: heard.append(network.bias.tolist()))
    assert gpu.do(Negate("policy", 1, 2)) == Answer()
    assert heard == [[5.0, -7.0]]
    assert cpu.do(Negate("policy", 0, 2)) == Answer()
    assert len(heard) == 1
    assert torch.equal(network.weight, before), "it is frozen"


def test_the_engines_worker_gets_what_it_has_elsewhere_after_every_change(sharded, group, tmp_path):
    heard = []
    memory = SimpleNamespace(copied={NORM}, write=lambda shards: heard.append([shard.name for shard in shards]) or 96)
    local = RankModel(group, sharded, State({}, heard), memory=memory)
    assert local.do(Commit("policy")) == Answer()
    assert heard == ["committed", [NORM]]
    assert local.do(Negate("policy", 0, 1)) == Answer(num_bytes=96)
    local.do(Negate("policy", 0, 1))
    local.do(Save("policy", str(tmp_path)))
    assert heard[2:] == [[NORM]] * 2
    assert local.do(Load("policy", str(tmp_path))) == Answer()
    assert heard[4:] == [[NORM]]


class Both:
    """All ranks, in this process."""

    def __init__(self, ranks):
        self.ranks = ranks

    def run_on_all(self, commands, do):
        assert do == self.ranks[0].do
        return [rank.do(command) for rank, command in zip(self.ranks, commands, strict=True)]


def test_fingerprints_of_shards_add_up_over_ranks_and_what_all_have_counts_once():
    whole = {
        "rows": torch.rand(5, 3),
        "all": torch.rand(4, 2),
        "columns": torch.rand(2, 6).bfloat16(),
        "fewer": torch.rand(1, 2),
        "number": torch.tensor(3.0),
    }
    dims = {"rows": 0, "all": None, "columns": 1, "fewer": 0, "number": None}

    def rank_of(number, copy=0):
        local = RankModel(SimpleNamespace(copy=copy, place=number, num_shards=3), None)
        parts = {name: part_of(tensor, dims[name], number, 3) for name, tensor in whole.items()}
        local.shards = lambda what: [Shard(n, part, tuple(whole[n].shape), dims[n]) for n, part in parts.items()]
        return local

    ranks = [rank_of(number, copy) for copy in range(2) for number in range(3)]
    ranks[0].group.size = 6
    assert ShardedModel("policy", ranks[0], Both(ranks)).weights("adapter").describe() == describe(whole.items())


def views(name, tensor):
    return [(f"{name}.0", tensor[:2]), (f"{name}.1", tensor[2:])]


@pytest.mark.parametrize(
    ("stored", "names", "asked"),
    [
        (lambda name, tensor: [(f"{name}.own", tensor)], ["a.own"], [Describe]),
        (lambda name, tensor: [(name, tensor.clone())], ["a"], []),
        (views, ["a.0", "a.1"], []),
    ],
)
def test_fingerprints_are_of_what_is_stored(stored, names, asked, group):
    """Without gathering where that is the shards under other names."""
    weight, probed = torch.rand(4, 2).bfloat16(), []
    local = RankModel(group, None)
    local.shards = lambda what: [Shard("a", weight, (4, 2))]
    local.stored = lambda what, name, tensor: probed.append(tensor.dtype) or stored(name, tensor)
    others = Alone()
    weights = ShardedModel("policy", local, others).weights("model")
    assert weights.describe() == describe(
        (name, tensor) for name, (_, tensor) in zip(names, stored("a", weight), strict=True)
    )
    assert [spec.name for spec in weights.describe()] == names
    assert [kind for kind in others.heard if kind is Describe] == asked * 2
    assert set(probed) == {torch.bfloat16}


def test_layers_stay_whole_through_a_step_only_if_asked(sharded, group, make_batch):
    kept = []
    other = copy.copy(group)
    other.rows_unsharded = lambda modules, rows, count: kept.append((modules, count)) or iter(())
    share, _ = rank_batch_of(make_batch(num=3), [[[0], [1]], [], [[2]]])
    for options in ({}, {"keeps_whole": True}):
        local = RankModel(other, sharded, State({}), Objectives(SFTObjective()), **options)
        assert local.do(Backward("policy", share, {})) == Answer()
    roots, layers = [*sharded.roots], [*sharded.network.model.layers]
    assert kept == [(roots, 3), (roots + layers, 3)]


def test_commands_come_out_as_they_were_sent(make_batch):
    share, _ = rank_batch_of(make_batch(num=2), [[[1]], [[0]]])
    sampling = SamplingParams(max_tokens=3)
    for command in (
        Score("policy", share, sampling), Score("critic", share, None), Backward("policy", share, {"tokens": 3.0}),
        Prepare("policy", 0.5), Commit("policy"),
        Gather("policy", "base"), Describe("policy", "base"), Save("policy", "folder"), Load("policy", "folder"),
        Negate("policy", 1, 2),
    ):  # fmt: skip
        assert decode(encode(command), AnyCommand) == command


def test_a_rank_saves_its_shards_and_the_first_all_else(sharded, group, tmp_path):
    other = copy.copy(group)
    other.rank = other.place = 1
    shards = {f"master.{NORM}": torch.rand(48), f"exp_avg.{GATE}": torch.rand(96, 48)}
    rest = {f"num.{NORM}": torch.tensor(3.0), "loss_scale": torch.tensor([2.0, 5.0]), "step": torch.tensor(5)}
    first = State({f"master.{NORM}": shards[f"master.{NORM}"], **rest, f"exp_avg.{GATE}": torch.zeros(0, 48)})
    RankModel(other, sharded, State({f"exp_avg.{GATE}": shards[f"exp_avg.{GATE}"], **rest})).do(
        Save("policy", str(tmp_path))
    )
    (file,) = tmp_path.iterdir()
    assert load_file(file).keys() == {f"optimizer.exp_avg.{GATE}"}
    local = RankModel(group, sharded, first)
    local.do(Save("policy", str(tmp_path)))
    assert len([*tmp_path.glob("shard-*")]) == 2, "none of the other's is overwritten"
    assert load_file(tmp_path / "learner.safetensors").keys() == {"rng.cpu", *(f"optimizer.{name}" for name in rest)}
    local.do(Load("policy", str(tmp_path)))
    assert first.loaded.keys() == (shards | rest).keys()
    assert all(torch.equal(first.loaded[name], tensor) for name, tensor in (shards | rest).items())


def test_a_rank_reads_shards_of_what_is_sharded(sharded, group, tmp_path, monkeypatch):
    asked = {
        f"optimizer.master.{NORM}": ((48,), torch.float32),
        f"optimizer.codes.{GATE}": ((96, 48), torch.int8),
        f"optimizer.num.{NORM}": ((), torch.float32),
        "optimizer.loss_scale": ((2,), torch.float32),
        f"other.master.{NORM}": ((48,), torch.float32),
    }
    places = {}

    def read(folder, place):
        assert folder == tmp_path
        places.update({name: place(name, torch.Size(shape), dtype) for name, (shape, dtype) in asked.items()})
        return {"rng.cpu": torch.get_rng_state()}

    monkeypatch.setattr(module, "read_state", read)
    RankModel(group, sharded, State({})).do(Load("policy", str(tmp_path)))
    found = {name: (tuple(each.shape), each.dtype) for name, each in places.items() if each is not None}
    assert found == dict(list(asked.items())[:2])
    assert all(each.placements[0].dim == 0 for each in places.values() if each is not None)
    asked[f"optimizer.exp_avg.{NORM}"] = ((64,), torch.float32)
    with pytest.raises(TrainingError, match=rf"for another model: {NORM} has shape \[64\] there and \[48\] here"):
        RankModel(group, sharded, State({})).do(Load("policy", str(tmp_path)))
