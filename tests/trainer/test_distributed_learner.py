"""The learner of rank 0 over a group of one rank, in this process: all that it gives is what a plain learner gives."""

import contextlib
import copy
import random
from types import SimpleNamespace

import pytest
import torch

from slipstream import records
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.errors import ZeroGradientError
from slipstream.trainer.critic import ValueModel
from slipstream.trainer.distributed import learner as module
from slipstream.trainer.distributed.learner import ShardedLearner
from slipstream.trainer.distributed.worker import Answer, Describe, Gather, Negate, Objectives, RankModel
from slipstream.trainer.learner import Learner, Reference, Sums
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import even_rows
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.fingerprint import describe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs ranks on a CPU")
SAMPLING = records.SamplingParams(max_tokens=64, temperature=0.8)
LORA = AdapterConfig(4, 12.0, ("q_proj", "down_proj"), "")


class Alone:
    """The other ranks, of which there are none."""

    def __init__(self):
        self.heard = []

    def run_on_all(self, commands, do):
        (command,) = commands
        self.heard.append(type(command))
        answer = do(command)
        assert isinstance(answer, Answer)
        return [answer]

    def run_on_others(self, command):
        self.heard.append(type(command))
        return contextlib.nullcontext()


@pytest.fixture
def make(group, model_folder):
    """A learner over the one rank, or a plain one."""

    def made(sharded, *, lora=None, tokens=150, kind=MasterAdamW, fp32_head=False, folder=model_folder, **options):
        torch.manual_seed(0)
        model = PolicyModel.load(folder, **options, fp32_head=fp32_head and not sharded)
        if lora is not None:
            adapter = model.add_adapter(lora)
            with torch.no_grad():
                for layer in adapter.layers.values():
                    layer.lora_B.normal_(std=0.1)
        if sharded:
            group.shard(model)
            if fp32_head:
                model.use_fp32_head()
        optimizer = kind(model.network.named_parameters())
        if not sharded:
            return Learner(model, optimizer, micro_batch_tokens=tokens)
        return ShardedLearner("policy", RankModel(group, model, optimizer), Alone(), micro_batch_tokens=tokens)

    return made


def objective(**changes):
    return PolicyObjective(resolved(RLConfig(**{"kl_coef": 0.0} | changes)), SAMPLING)


def advance(learner, batch, goal):
    metrics = learner.forward_backward(batch, goal)
    stats = learner.optim_prepare(1e-2)
    learner.optim_commit()
    return metrics, stats


@pytest.mark.parametrize("lora", [None, LORA])
def test_it_trains_as_a_plain_one(lora, make, make_batch):
    ours, plain = (make(sharded, lora=lora) for sharded in (True, False))
    for seed in range(2):
        batch = make_batch(seed=seed)
        for name, value in (("old_logprobs", -4.4), ("reference_logprobs", -4.6)):
            batch.fill(name, [torch.full((each.num_trainable,), value) for each in batch.sequences])
        (metrics, stats), (expected, wanted) = (
            advance(each, copy.deepcopy(batch), objective(kl_coef=0.1)) for each in (ours, plain)
        )
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert metrics["num_micro_batches"] > 1
        assert stats.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        assert (stats.clipped, stats.learning_rate) == (wanted.clipped, 1e-2)
    kinds = ["base_weights", "adapter_weights"] if lora else ["named_weights"]
    for kind in kinds:
        found, others = dict(getattr(ours, kind)()), dict(getattr(plain, kind)())
        assert found.keys() == others.keys()
        assert describe(getattr(ours, kind)()) == describe(found.items())
        torch.testing.assert_close(found, others, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_it_says_whether_a_gradient_was_clipped(scale, make, make_batch):
    learner = make(True, kind=lambda named: MasterAdamW(named, max_grad_norm=scale))
    _, stats = advance(learner, make_batch(advantages=False), SFTObjective())
    assert stats.clipped == (scale < 1.0)
    assert not stats.overflowed
    assert stats.loss_scale == 1.0


def test_an_overflow_is_said_and_made_again(make, make_batch):
    learner = make(True, dtype="float16", kind=lambda named: MasterAdamW(named, max_grad_norm=1e9))
    learner.optimizer.loss_scale.value = 2.0**40
    _, stats = advance(learner, make_batch(advantages=False), SFTObjective())
    assert stats.num_overflows > 10
    assert stats.loss_scale == 2.0 ** (40 - stats.num_overflows)
    assert stats.grad_norm < 100.0


@pytest.mark.parametrize("fp32_head", [False, True])
def test_its_scores_are_a_plain_ones(fp32_head, make, make_batch):
    ours, plain = (make(sharded, fp32_head=fp32_head) for sharded in (True, False))
    sequences = make_batch().sequences
    sequences.insert(2, records.Sequence([1, 2, 3], [False] * 3))
    for found, expected in (
        (ours.forward(sequences, SAMPLING), plain.forward(sequences, SAMPLING)),
        (ours.forward(sequences, micro_batch_tokens=40), plain.forward(sequences)),
        (Reference(ours._sharded.predictions, 90).forward(sequences), plain.forward(sequences)),
    ):
        for kind in ("logprobs", "entropies"):
            torch.testing.assert_close(getattr(found, kind), getattr(expected, kind), atol=1e-5, rtol=1e-5)


class Two:
    """Two ranks that have computed already."""

    def __init__(self, *answers):
        self.answers = answers
        self.sent = []

    def run_on_all(self, commands, do):
        self.sent = commands
        return list(self.answers)


def test_what_two_ranks_found_is_added_up(make, make_batch, monkeypatch):
    plain, asked = make(False), []

    def dealt(batch, most, parts, **options):
        asked.append((most, parts, options))
        return even_rows(batch, most, parts, **options)

    monkeypatch.setattr(module, "even_rows", dealt)
    group, objectives = SimpleNamespace(size=2), Objectives()
    local = SimpleNamespace(model=plain.model, optimizer=plain.optimizer, group=group, objectives=objectives, do=None)
    first = {"loss": torch.tensor(2.0), "clipped": torch.tensor(3.0)}
    second = {"loss": torch.tensor(0.25), "clipped": torch.tensor(-1.0)}
    others = Two(
        *(
            Answer(sums=Sums({name: value.double() for name, value in values.items()}, *numbers))
            for values, numbers in ((first, [3, 70, 40]), (second, [2, 50, 45]))
        )
    )
    learner, batch = ShardedLearner("policy", local, others, micro_batch_tokens=150), make_batch()
    sums = learner._add_gradients(batch, objective(), {"tokens": 7.0})
    assert {name: value.item() for name, value in sums.values.items()} == {"loss": 2.25, "clipped": 2.0}
    assert (sums.num_micro_batches, sums.num_row_tokens) == (5, 120)
    assert sums.longest_row == 40, "rank 0's, whose memory it explains"
    shares = [command.batch for command in others.sent]
    assert asked == [(150, 2, {"packing": True, "device": torch.device("cpu")})]
    assert sum(len(share.batch.sequences) for share in shares) == 9
    assert len(shares[0].rows) == len(shares[1].rows)
    assert [command.divisors for command in others.sent] == [{"tokens": 7.0}] * 2


def test_a_gradient_of_zero_is_discarded(make, make_batch):
    learner, batch = make(True), make_batch()
    batch.advantages = [0.0] * 9
    learner.forward_backward(batch, objective())
    with pytest.raises(ZeroGradientError):
        learner.optim_prepare(1e-2)
    assert all(not master.grad or not master.grad.any() for master in learner.optimizer.masters().values())
    advance(learner, make_batch(), objective())
    assert learner.step == 1


@pytest.mark.parametrize("lora", [None, LORA])
def test_its_state_goes_on_in_either(lora, make, make_batch, tmp_path):
    learner = make(True, lora=lora)
    advance(learner, make_batch(seed=1), objective())
    if lora:
        (tmp_path / "new" / "state").mkdir(parents=True)
    learner.save(tmp_path / "new" / "state")
    drawn = torch.rand(3)
    last = []
    for other in (learner, make(True, lora=lora), make(False, lora=lora)):
        other.load(tmp_path / "new" / "state")
        assert torch.equal(torch.rand(3), drawn), "random numbers go on, too"
        assert other.step == 1
        advance(other, make_batch(seed=2), objective())
        last.append(dict(other.adapter_weights() if lora else other.named_weights()))
    for found in last[1:]:
        torch.testing.assert_close(found, last[0], atol=1e-3, rtol=1e-2)


def test_a_consumer_of_weights_may_stop_early(make):
    learner = make(True)
    expected = list(learner.named_weights())
    random.shuffle(expected)
    for name, tensor in learner.named_weights():
        assert torch.equal(dict(expected)[name], tensor)
        break
    assert [spec.name for spec in describe(learner.named_weights())] == [name for name, _ in learner.named_weights()]


def test_fingerprints_need_no_gathering_where_weights_are_stored_as_they_are(make):
    learner, plain = make(True), make(False)
    assert set(describe(learner.named_weights())) == set(describe(plain.named_weights()))
    assert learner._sharded.others.heard == [Describe]
    assert dict(learner.named_weights()).keys() == dict(plain.named_weights()).keys()
    assert learner._sharded.others.heard == [Describe, Gather]


def test_experts_that_are_stored_one_by_one_are_gathered(make, save_model, tmp_path):
    experts = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = save_model(tmp_path, "Qwen3Moe", **experts)
    learner, plain = make(True, folder=folder), make(False, folder=folder)
    assert set(describe(learner.named_weights())) == set(describe(plain.named_weights()))
    found, expected = dict(learner.named_weights()), dict(plain.named_weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert set(learner._sharded.others.heard) == {Gather}


def test_a_critics_values_are_a_plain_ones(group, model_folder, make_batch):
    sequences = make_batch().sequences
    sequences.insert(2, records.Sequence([1, 2, 3], [False] * 3))
    found = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model = ValueModel(PolicyModel.load(model_folder))
        torch.nn.init.normal_(model.network.value_head.weight)
        if sharded:
            group.shard(model, checked=False)
        optimizer = MasterAdamW(model.network.named_parameters())
        local = RankModel(group, model, optimizer)
        plain = Learner(model, optimizer, micro_batch_tokens=150)
        learner = ShardedLearner("critic", local, Alone(), micro_batch_tokens=150) if sharded else plain
        found.append(learner.values(sequences))
    assert [len(values) for values in found[0]] == [each.num_trainable for each in sequences]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_benchmarks_change_columns_of_the_weights(make):
    learner = make(True)
    before = {name: tensor.clone() for name, tensor in learner.named_weights()}
    (answer,) = learner._sharded.all_do(Negate("policy", 1, 3))
    assert answer.num_bytes == 0, "nothing is copied to an engine"
    for name, tensor in learner.named_weights():
        signs = torch.ones(tensor.shape[-1])
        signs[1::3] = -1.0
        assert torch.equal(tensor, before[name] * signs)
