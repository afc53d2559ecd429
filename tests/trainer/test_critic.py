"""The critic on real models: values and gradients against the plain model in float64, cuts of a step, what is saved."""

from types import SimpleNamespace

import pytest
import torch
from tests.trainer.credit import batch_from, credit_of
from tests.trainer.steps import learner_of
from transformers import AutoModelForCausalLM

from slipstream import records
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config.schema import CriticConfig
from slipstream.errors import ConfigError, TrainingError, ZeroGradientError
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.critic import Critic, ValueModel, ValueObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import OptimStats
from slipstream.trainer.packing import make_step_batches
from slipstream.weights.adapter_folder import AdapterConfig

CLIP = 0.2


@pytest.fixture
def make_critic(model_folder):
    def make(micro_batch_tokens=256, *, folder=model_folder, packing=True, adapter=None, head=True, **config):
        policy = PolicyModel.load(folder, "float32", packing=packing)
        if adapter is not None:
            policy.add_adapter(adapter)
        model = ValueModel(policy)
        if head:  # one that does something
            with torch.no_grad():
                model.network.value_head.weight.copy_(
                    torch.linspace(-0.1, 0.1, model.network.value_head.in_features)[None]
                )
                model.network.value_head.bias.fill_(0.3)
        learner = learner_of(model, micro_batch_tokens)
        return Critic(learner, CriticConfig(learning_rate=1e-3, **config))

    return make


@pytest.fixture
def make_targets(make_batch):
    """A step of sequences and what the critic is to learn of them."""

    def make(seed=0, **options):
        batch = make_batch(seed=seed, advantages=False, **options)
        generator = torch.Generator().manual_seed(seed)
        counts = [sequence.num_trainable for sequence in batch.sequences]
        drawn = [0.3 + 0.3 * torch.randn(2, count, generator=generator) for count in counts]
        for place, name in enumerate(("old_values", "returns")):
            batch.fill(name, [each[place] for each in drawn])
        return batch

    return make


def plain(folder, batch, head):
    """Loss and gradients in float64, one sequence at a time, by transformers' own attention."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").model
    weight, bias = (tensor.detach().double().requires_grad_() for tensor in (head.weight, head.bias))
    total = 0.0
    for sequence in batch.sequences:
        hidden = network(input_ids=torch.tensor([sequence.token_ids])).last_hidden_state[0]
        values = (hidden @ weight[0] + bias)[:-1][torch.tensor(sequence.mask)[1:]]
        old, returns = (torch.tensor(sequence.values(name)).double() for name in ("old_values", "returns"))
        bounded = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
        errors = torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
        loss = 0.5 * errors.sum() / batch.num_tokens
        loss.backward()
        total += loss.item()
    gradients = {f"model.{name}": parameter.grad for name, parameter in network.named_parameters()}
    return total, gradients | {"value_head.weight": weight.grad, "value_head.bias": bias.grad}


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(("micro_batch_tokens", "packing"), [(100, True), (10_000, True), (100, False)])
def test_equals_the_plain_model_however_it_is_cut(
    packing, micro_batch_tokens, alike, model_folder, make_critic, make_targets, gradients_of
):
    critic, batch = make_critic(micro_batch_tokens, packing=packing), make_targets()
    for sequence in batch.sequences if alike else ():  # prompts that are shared in a row
        start = sequence.mask.index(True)
        sequence.token_ids[:start] = [7] * start
    loss, gradients = plain(model_folder, batch, critic.learner.model.network.value_head)
    metrics = critic.learner.forward_backward(batch, ValueObjective(CLIP))
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert 0.0 < metrics["clip_fraction"] < 1.0
    expected = {name: gradient.float() for name, gradient in gradients.items()}
    torch.testing.assert_close(gradients_of(critic.learner), expected, atol=1e-5, rtol=1e-5)


def batch_of(sequences, rewards):
    """One rollout of each list of sequences."""
    rollouts = [
        records.Rollout(f"{i}", "task", f"g{i // 2}", own, reward=reward, outcome="done")
        for i, (own, reward) in enumerate(zip(sequences, rewards, strict=True))
    ]
    return batch_from(rollouts)


def test_values_are_those_before_each_token(make_critic, make_batch, model_folder):
    critic = make_critic(120)
    sequences = make_batch(num=4).sequences
    found = critic.values(batch_of([sequences[:1], sequences[1:3], [], sequences[3:]], [0.0] * 4))
    assert [len(own) for own in found] == [1, 2, 0, 1]
    network = AutoModelForCausalLM.from_pretrained(model_folder).model
    head = critic.learner.model.network.value_head
    for sequence, values in zip(sequences, [v for own in found for v in own], strict=True):
        hidden = network(input_ids=torch.tensor([sequence.token_ids])).last_hidden_state[0]
        expected = head(hidden)[:-1, 0][torch.tensor(sequence.mask)[1:]]
        torch.testing.assert_close(values, expected.detach(), atol=1e-5, rtol=1e-5)


def test_a_fresh_critic_expects_nothing_and_leaves_out_steps_without_error(make_critic, make_targets):
    critic, batch = make_critic(head=False), make_targets()
    assert not torch.cat([v for own in critic.values(batch_of([batch.sequences], [1.0])) for v in own]).any()
    for name in ("old_values", "returns"):
        batch.fill(name, [torch.zeros(sequence.num_trainable) for sequence in batch.sequences])
    assert critic.train([batch]) == {"value/skipped_updates": 1.0}
    assert critic.learner.step == 0


def test_in_bfloat16_the_head_stays_exact_and_layers_may_be_computed_again(model_folder, make_targets, gradients_of):
    found = []
    for checkpointing in (False, True):
        model = ValueModel(PolicyModel.load(model_folder, "bfloat16", checkpointing=checkpointing))
        learner = learner_of(model, 300)
        critic = Critic(learner, CriticConfig(learning_rate=1e-2))
        # At first only the head has a gradient: it is zero.
        assert [critic.train([make_targets()])["value/skipped_updates"] for _ in range(2)] == [0.0, 0.0]
        learner.forward_backward(make_targets(1), ValueObjective(CLIP))
        found.append(gradients_of(learner))
        assert {p.dtype for p in model.network.value_head.parameters()} == {torch.float32}
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert found[0]["model.embed_tokens.weight"].any()


def test_a_head_that_is_not_tied_is_dropped(make_critic, make_targets, tmp_path):
    folder = new_model(tmp_path / "untied", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1,
                       context_length=256, tie_embeddings=False)  # fmt: skip
    critic = make_critic(folder=folder)
    names = set(critic.learner.optimizer.masters())
    assert "lm_head.weight" not in names
    assert {"model.embed_tokens.weight", "value_head.weight", "value_head.bias"} <= names
    assert critic.train([make_targets()])["value/skipped_updates"] == 0.0


def test_under_lora_only_adapter_and_head_are_trained(make_critic, make_targets):
    critic = make_critic(adapter=AdapterConfig(4, 8.0, ("q_proj", "down_proj"), base=""))
    names = set(critic.learner.optimizer.masters())
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B", "weight", "bias"}
    assert {name for name in names if "lora" not in name} == {"value_head.weight", "value_head.bias"}
    frozen = critic.learner.model.network.model.embed_tokens.weight.clone()
    critic.train([make_targets()])
    assert torch.equal(frozen, critic.learner.model.network.model.embed_tokens.weight)


def test_a_checkpoint_has_it_and_goes_on_bit_for_bit(make_critic, make_learner, make_targets, model_folder, tmp_path):
    store, critic, step = CheckpointStore(tmp_path), make_critic(), make_targets()
    critic.train([step])
    learner = make_learner()
    path = store.save(3, learner, model_folder, {"step": 3}, critic)
    assert not list((path / "weights").rglob("*critic*"))
    resumed = make_critic()
    store.load(path, make_learner(), resumed)
    for each in (critic, resumed):
        each.train([make_targets(1)])
    for (name, ours), theirs in zip(
        critic.learner.optimizer.state().items(), resumed.learner.optimizer.state().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    without = store.save(4, learner, model_folder, {"step": 4})
    with pytest.raises(ConfigError, match="has no critic"):
        store.load(without, make_learner(), resumed)


class Fixed:
    """A critic that says the same of every token."""

    def __init__(self, value, **config):
        self.value, self.config = value, CriticConfig(**config)

    def values(self, batch):
        return [[torch.full((s.num_trainable,), self.value) for s in r.sequences] for r in batch.rollouts]


PPO = {"kind": "ppo", "scale_rewards": "none"}


def turn(length):
    return records.Sequence([1] * (length + 2), [False, False] + [True] * length)


def test_the_reward_is_at_the_last_token_of_the_last_turn():
    batch = batch_of([[turn(2), turn(1)], [turn(2)]], [1.0, 0.0])
    credit = credit_of(batch, critic=Fixed(0.25, gamma=0.5, gae_lambda=1.0), **PPO)
    first, second = batch.rollouts[0].sequences
    assert first.values("advantages") == [0.0, 0.25]
    assert second.values("advantages") == [0.75]
    assert credit.advantages == [None, None]
    assert (first.values("returns"), second.values("returns")) == ([0.25, 0.5], [1.0])
    assert credit.has_signal
    assert credit.metrics["value/mean"] == 0.25
    steps = make_step_batches(batch, credit.advantages, updates_per_batch=1)
    assert [s.values("old_values") for s in steps[0].sequences] == [[0.25] * 2, [0.25], [0.25] * 2]
    assert steps[0].has_signal


def test_advantages_are_whitened_over_the_tokens_that_carry_loss():
    batch = batch_of([[turn(3)], [turn(1)], [turn(2)], [turn(2)]], [1.0, 0.0, 1.0, 0.5])
    batch.rollouts[2].outcome, batch.rollouts[3].outcome = "truncated", "reward_error"
    credit = credit_of(batch, critic=Fixed(0.0, gae_lambda=1.0), kind="ppo", train_on_truncated=False)
    assert credit.carries_loss == [True, True, False, False]
    assert batch.rollouts[2].sequences[0].streams == {}
    found = torch.tensor([a for r in batch.rollouts[:2] for a in r.sequences[0].values("advantages")])
    assert found.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5])


def test_a_batch_in_which_all_is_as_expected_teaches_the_policy_nothing():
    batch = batch_of([[turn(3)], [turn(1)]], [1.0, 1.0])
    credit = credit_of(batch, critic=Fixed(0.0, gae_lambda=1.0), kind="ppo")
    assert not credit.has_signal
    assert batch.rollouts[0].sequences[0].values("returns") == [1.0] * 3


def test_what_a_critic_explains_is_told_where_there_is_something_to_explain():
    batch = batch_of([[turn(1)], [turn(1)]], [1.0, 0.0])
    credit = credit_of(batch, critic=Fixed(0.25), **PPO)
    assert credit.metrics == {
        "reward/signal_fraction": 1.0, "value/mean": 0.25, "value/return": 0.5, "value/explained_variance": 0.0,
    }  # fmt: skip
    assert credit.of(0) == {"carries_loss": True}
    same = credit_of(batch_of([[turn(1)], [turn(1)]], [1.0, 1.0]), critic=Fixed(0.25), **PPO)
    assert same.metrics.keys() == {"reward/signal_fraction", "value/mean", "value/return"}
    nothing = batch_of([[turn(1)], [turn(1)]], [1.0, 0.0])
    for rollout in nothing.rollouts:
        rollout.outcome = "truncated"
    credit = credit_of(nothing, critic=Fixed(0.25), kind="ppo", train_on_truncated=False)
    assert (credit.metrics, credit.carries_loss) == ({"reward/signal_fraction": 1.0}, [False, False])
    assert not credit.has_signal
    assert [rollout.sequences[0].streams for rollout in nothing.rollouts] == [{}, {}]


def test_advantages_by_a_critic_that_are_no_numbers_are_refused():
    with pytest.raises(TrainingError, match="not finite"):
        credit_of(batch_of([[turn(1)]], [float("nan")]), critic=Fixed(0.0), **PPO)


def test_a_rollout_without_tokens_takes_no_penalty():
    batch = batch_of([[], [turn(1)]], [1.0, 1.0])
    penalties = [[], [torch.tensor([0.5]).double()]]
    credit_of(batch, penalties, Fixed(0.0), **PPO)
    assert batch.rollouts[1].sequences[0].values("advantages") == [0.5]


def test_only_the_best_of_a_group_train_the_critic():
    batch = batch_of([[turn(1)], [turn(2)]], [0.0, 1.0])
    for rollout in batch.rollouts:
        rollout.group_id = "g"
    credit = credit_of(batch, critic=Fixed(0.0, gae_lambda=1.0), **PPO, best_of=1)
    assert credit.carries_loss == [False, True]
    assert ["returns" in rollout.sequences[0].streams for rollout in batch.rollouts] == [False, True]
    assert credit.metrics["value/return"] == 1.0


class Steps:
    """A learner whose steps have these gradients; notes its calls."""

    def __init__(self, *norms):
        self.norms, self.calls = iter(norms), []
        self.optimizer = SimpleNamespace(discard_gradients=lambda: self.calls.append("discard"))

    def forward_backward(self, step, objective):
        self.norm = next(self.norms)
        return {"loss": self.norm, "clip_fraction": 2.0 * self.norm, "num_row_tokens": 9.0}

    def optim_prepare(self, rate):
        self.calls.append(f"prepare {rate}")
        if self.norm == 0.0:
            raise ZeroGradientError("zero")
        return OptimStats(rate, 4.0 * self.norm, clipped=False)

    def optim_commit(self):
        self.calls.append("commit")


def test_steps_of_a_critic_are_averaged_and_those_without_error_passed_over():
    learner = Steps(1.0, 0.0, 3.0)
    metrics = Critic(learner, CriticConfig(learning_rate=0.5)).train([None] * 3)
    assert metrics == {
        "value/loss": 2.0, "value/clip_fraction": 4.0, "value/grad_norm": 8.0, "value/learning_rate": 0.5,
        "value/skipped_updates": 1.0,
    }  # fmt: skip
    assert learner.calls == ["prepare 0.5", "commit", "prepare 0.5", "discard", "prepare 0.5", "commit"]


def test_without_targets_a_critic_refuses_to_learn(make_critic, make_batch):
    with pytest.raises(TrainingError, match="give each the streams old_values and returns"):
        make_critic().learner.forward_backward(make_batch(), ValueObjective(CLIP))
