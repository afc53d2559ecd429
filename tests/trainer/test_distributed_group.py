"""What ranks say to one another, and how a model is sharded; most of it with one rank, in this process."""

import copy
import logging
import os

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.steps import advance
from tests.trainer.test_distributed_learner import Alone
from tests.trainer.test_vision_towers import save_with_tower

from slipstream.errors import ConfigError
from slipstream.trainer.distributed.engine_memory import WorkerMemory
from slipstream.trainer.distributed.fsdp import replicated, saved_tensors, shard_dim, shard_of
from slipstream.trainer.distributed.learner import ShardedLearner
from slipstream.trainer.distributed.worker import RankModel
from slipstream.trainer.learner import add_gradients
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import micro_batches, micro_batches_of
from slipstream.weights.bridges.single_copy import Exporter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs ranks on a CPU")


@pytest.fixture
def as_one_of(group, monkeypatch):
    """That group as rank `rank` of `size`; what the others give is added to what this one gives."""

    def seen(rank, size, given=None):
        other = copy.copy(group)
        other.rank, other.size = rank, size
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda own: own.add_(given(own)))
        return other

    return seen


def test_sums_over_ranks(as_one_of):
    found = as_one_of(0, 2, lambda own: torch.tensor([1.0, 0.0], dtype=own.dtype)).sums([1e-12, 0.1])
    assert found == [1.0 + 1e-12, 0.1], "in float64"


def messages(size, **texts):
    """What the others give for their error messages."""

    def given(own):
        found = torch.zeros_like(own)
        for rank, text in texts.items():
            data = list(text.encode())
            found[int(rank[1:]), : len(data)] = torch.tensor(data, dtype=torch.uint8)
        assert own.shape[0] == size
        return found

    return given


def test_all_ranks_hear_of_the_first_problem(as_one_of):
    assert as_one_of(1, 3, messages(3)).first_problem("") == ""
    assert as_one_of(1, 3, messages(3)).first_problem("no memory") == "trainer process 1: no memory"
    assert as_one_of(1, 3, messages(3, r2="late")).first_problem("") == "trainer process 2: late"
    assert as_one_of(1, 3, messages(3, r2="late", r0="früh")).first_problem("x") == "trainer process 0: früh"


def test_a_long_problem_is_cut_even_within_a_letter(as_one_of):
    said = as_one_of(0, 2, messages(2)).first_problem("x" + 600 * "ü").removeprefix("trainer process 0: ")
    assert said.rstrip("\N{REPLACEMENT CHARACTER}") == "x" + 255 * "ü"


class Recording:
    """A sharded module, of which is kept what is asked of it."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *values, **options: self.asked.append((name, *values, *options.values()))

    def take(self):
        taken, self.asked = self.asked, []
        return taken


def test_weights_stay_through_the_rows_of_a_step_and_gradients_are_scattered_after_the_last(group):
    module, steps = Recording(), []
    for row in group.rows_unsharded([module], iter("abc"), 3):
        steps.append((row, module.take()))
    whole = [("set_requires_gradient_sync", False, False), ("set_reshard_after_backward", False, False)]
    last = [("set_requires_gradient_sync", True, False), ("set_reshard_after_backward", True, False)]
    first = [("set_reshard_after_forward", False, False)]
    assert steps == [("a", first + whole), ("b", whole), ("c", last)]
    assert module.take() == [("set_reshard_after_forward", True, False)], "only of the module itself"


def test_weights_stay_through_the_rows_that_are_scored(group):
    module, steps = Recording(), []
    for row in group.rows_gathered([module], iter("ab")):
        steps.append((row, module.take()))
    assert steps == [("a", [("set_reshard_after_forward", False, False)]), ("b", [])]
    assert module.take() == [("reshard",), ("set_reshard_after_forward", True, False)]


@pytest.fixture
def make(group, model_folder):
    def made(*, keeps_whole=False, fp32_head=False, dtype="float32"):
        model = PolicyModel.load(model_folder, dtype)
        group.shard(model)
        if fp32_head:
            model.use_fp32_head()
        local = RankModel(group, model, MasterAdamW(model.network.named_parameters()), keeps_whole=keeps_whole)
        return ShardedLearner("policy", local, Alone(), micro_batch_tokens=100)

    return made


def are_shards(model):
    return {hasattr(parameter, "placements") for parameter in model.network.parameters()} == {True}


@pytest.mark.parametrize("keeps_whole", [False, True])
@pytest.mark.parametrize("fp32_head", [False, True])
def test_after_a_step_every_weight_is_a_shard_again(keeps_whole, fp32_head, make, make_batch):
    learner = make(keeps_whole=keeps_whole, fp32_head=fp32_head)
    batch = make_batch(advantages=False)
    learner.forward(batch.sequences)
    assert are_shards(learner.model)
    learner.forward_backward(batch, SFTObjective())
    assert are_shards(learner.model)
    (row, *_) = micro_batches(batch, 60)
    with torch.no_grad():
        learner.model.logits(row)
    assert are_shards(learner.model), "also after a pass without a backward pass"


def test_gradients_in_bfloat16_are_added_up_in_float32(make, make_batch, model_folder):
    batch, objective = make_batch(num=40, advantages=False), SFTObjective()
    learner, model = make(keeps_whole=True, dtype="bfloat16"), PolicyModel.load(model_folder, "bfloat16")
    optimizer = MasterAdamW(model.network.named_parameters())
    ((share,), _) = learner._sharded.split_batch(batch, 100)
    assert len(share.rows) > 15
    learner.forward_backward(batch, objective)
    add_gradients(model, micro_batches_of(share.batch, share.rows), objective, objective.counts(batch))
    masters = learner.optimizer.masters()
    for name, master in optimizer.masters().items():
        difference = masters[name].grad - master.grad
        # Rounded once: 0.0012 to 0.0022, by processor. Added up in bfloat16: 0.0033 to 0.0056.
        assert difference.norm() < 2.8e-3 * master.grad.norm(), f"{name} is rounded more than once"


def test_a_model_in_which_sequences_see_one_another_is_refused_after_sharding(group, model_folder):
    for checked in (False, True):
        model = PolicyModel.load(model_folder, checked=False)
        model.network.model.layers[0].register_forward_hook(lambda _module, _args, out: out + 0.1 * out.cumsum(1))
        if not checked:
            group.shard(model, checked=False)
            continue
        with pytest.raises(ConfigError, match="packed sequences see one another"):
            group.shard(model)
    model = PolicyModel.load(model_folder, packing=False)
    model.network.model.layers[0].register_forward_hook(lambda _module, _args, out: out + 0.1 * out.cumsum(1))
    group.shard(model)


def test_values_of_a_rank_that_has_read_none_take_memory_as_they_are_sharded(group, model_folder):
    other = copy.copy(group)
    other.rank = 1
    model = PolicyModel.load(model_folder, unread=True, checked=False)
    shapes = {name: parameter.shape for name, parameter in model.network.named_parameters()}
    other._allocate(model.network)
    for name, parameter in model.network.named_parameters():
        assert (parameter.shape, parameter.is_contiguous()) == (shapes[name], True)


def test_a_frozen_tower_is_on_every_rank_as_a_whole(group, tmp_path):
    folder = save_with_tower(tmp_path / "model", "qwen2-vl")
    stored = dict(PolicyModel.load(folder).network.named_parameters())
    for trained in (False, True):
        model = PolicyModel.load(folder, train_tower=trained)
        expected = set() if trained else {name for name in stored if "visual" in name}
        assert {name for name, _ in replicated(model.network)} == expected
        group.shard(model)
        for name, parameter in model.network.named_parameters():
            assert shard_dim(parameter) == (None if name in expected else 0)
            shard = shard_of(name, parameter)
            assert (shard.name, shard.shape, shard.dim) == (name, tuple(stored[name].shape), shard_dim(parameter))
            assert torch.equal(shard.part, stored[name])


def test_a_compiler_sees_ordinary_modules(group, model_folder):
    model = PolicyModel.load(model_folder)
    group.shard(model)
    assert not any(getattr(module, "_is_fsdp_managed_module", False) for module in model.network.modules())


def test_what_is_saved_of_a_network():
    network = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 3, bias=False), "other": torch.nn.Linear(2, 3)})
    network["other"].weight = network["one"].weight
    network.register_buffer("kept", torch.ones(2))
    network.register_buffer("table", torch.ones(2), persistent=False)
    assert [name for name, _ in saved_tensors(network)] == ["one.weight", "other.bias", "kept"]


def test_collectives_have_the_groups_timeout(group):
    world = torch.distributed.group.WORLD
    assert world._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 60.0
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ, "only while it starts"


def test_leaving_twice_is_said_and_no_error(group, caplog, monkeypatch):
    def gone():
        raise ValueError("no group")

    monkeypatch.setattr(torch.distributed, "destroy_process_group", gone)
    with caplog.at_level(logging.WARNING):
        group.leave()
        group.abort()
    assert caplog.messages[0] == "destroying the ranks' process group failed with ValueError: no group"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_shards_lie_in_the_memory_of_the_engines_worker(group, model_folder, make_batch):
    stored = load_file(model_folder / "model.safetensors")
    weights = {name: torch.nn.Parameter(weight, requires_grad=False) for name, weight in stored.items()}
    exporter = Exporter(weights.values())
    shared = exporter.describe({name: weight.data for name, weight in weights.items()}, {})
    model = PolicyModel.load(model_folder)
    model.network.model.norm.requires_grad_(False)
    memory = WorkerMemory(model, [shared], 0)
    group.shard(model, memory=memory)
    assert not model.network.model.norm.weight.requires_grad
    assert model.network.lm_head.weight is model.network.model.embed_tokens.weight, "still tied"
    optimizer = MasterAdamW(model.network.named_parameters())
    local = RankModel(group, model, optimizer, memory=memory)
    learner = ShardedLearner("policy", local, Alone(), micro_batch_tokens=100)
    advance(learner, make_batch(advantages=False), 1e-2)
    for name, weight in learner.named_weights():
        assert torch.equal(weights[name], weight), "the worker's weights are those that are trained"
        assert torch.equal(weight, stored[name]) == (name == "model.norm.weight")
