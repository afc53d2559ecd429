"""What training on one batch consists of: which optimizer steps it makes, at what rate, and which it skips."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.loops import SAMPLING, Learner, batch_of, planned, sequence

from slipstream.errors import MismatchError, ZeroGradientError
from slipstream.records import Sequence
from slipstream.trainer.batch_trainer import BatchTrainer, NoSignal


class Critic:
    """Finds every token worth nothing."""

    def __init__(self, warmup_steps=0):
        self.config = SimpleNamespace(warmup_steps=warmup_steps, gamma=1.0, gae_lambda=1.0)
        self.trained = []

    def values(self, batch):
        return [[torch.zeros(s.num_trainable) for s in rollout.sequences] for rollout in batch.rollouts]

    def train(self, steps):
        self.trained.append(steps)
        return {"value/loss": 0.5}


def make_trainer(config, *, critic=None, reference=None, ignores_silent=False):
    calls = []
    return BatchTrainer(
        config,
        Learner(calls),
        SimpleNamespace(ignores_silent=ignores_silent),
        SAMPLING,
        reference,
        critic,
        on_optimizer_steps=lambda number: calls.append(f"steps {number}"),
        before_write=lambda: calls.append("write"),
    )


GROUPS = ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.0, 1.0))


def test_the_rate_follows_the_number_of_the_optimizer_step_in_the_run():
    settings = {"updates_per_batch": 2, "epochs_per_batch": 2, "schedule": "linear", "warmup_steps": 2}
    trainer = make_trainer(planned(training=settings))
    result = trainer.train(batch_of(1, *GROUPS))
    # 12 steps in all; the second batch begins with the fifth.
    rates = [0.5 * (12 - number) / 10 for number in range(4, 8)]
    each = [call for rate in rates for call in (f"prepare {rate:g}", "write", "commit")]
    assert trainer.learner.calls == ["steps 4", *each]
    assert all("old_logprobs" in sequence.streams for step in trainer.learner.steps for sequence in step.sequences)
    assert result.metrics["train/learning_rate"] == pytest.approx(sum(rates) / 4)
    assert (result.metrics["train/grad_norm"], result.metrics["train/loss"]) == (0.125, 0.25)
    assert (result.metrics["train/skipped_updates"], result.no_signal, result.is_critic_only) == (0.0, None, False)
    assert result.credit.carries_loss == [True] * 8
    assert [len(batch.sequences) for batch in trainer.learner.steps] == [4] * 4
    first = make_trainer(planned(training=settings))
    first.train(batch_of(0, *GROUPS))
    assert first.learner.calls[1] == "prepare 0.25", "half of the peak: the first of two steps of warm-up"


def test_metrics_are_named_by_their_group_and_a_loss_scale_is_told_in_float16_only():
    for dtype in ("float16", "bfloat16"):
        trainer = make_trainer(planned(model={"dtype": dtype}))
        trainer.learner.metrics = {"loss": 1.0, "mismatch/kl": 2.0}
        metrics = trainer.train(batch_of(0)).metrics
        assert (metrics["train/loss"], metrics["mismatch/kl"]) == (1.0, 2.0)
        assert "loss" not in metrics
        told = {name: metrics.get(name) for name in ("train/loss_scale", "train/overflows")}
        assert told == dict.fromkeys(told) if dtype == "bfloat16" else {"train/loss_scale": 8.0, "train/overflows": 2.0}


def test_a_zero_gradient_is_an_error_unless_clipping_explains_it_or_a_step_came_before():
    trainer = make_trainer(planned(training={"updates_per_batch": 2}))
    trainer.learner.zero = {1}
    with pytest.raises(ZeroGradientError):
        trainer.train(batch_of(0, *GROUPS))
    assert "discard" not in trainer.learner.calls
    later = make_trainer(planned(training={"updates_per_batch": 2}))
    later.learner.zero = {2}
    result = later.train(batch_of(0, *GROUPS))
    assert later.learner.calls[-2:] == ["prepare 0.5", "discard"], "nothing is written"
    assert (result.metrics["train/skipped_updates"], result.no_signal) == (1.0, None)
    clipped = make_trainer(planned())
    clipped.learner.zero, clipped.learner.metrics = {1}, {"loss": 0.0, "clip_fraction": 1.0}
    result = clipped.train(batch_of(0))
    assert result.no_signal is NoSignal.ALL_CLIPPED
    assert (result.metrics["train/skipped_updates"], result.metrics["train/clip_fraction"]) == (1.0, 1.0)
    assert "train/grad_norm" not in result.metrics
    assert result.credit is not None


def test_steps_without_signal_are_left_out_and_counted():
    groups = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    trainer = make_trainer(planned(training={"updates_per_batch": 2}))
    result = trainer.train(batch_of(1, *groups))
    assert trainer.learner.calls == ["steps 1", "prepare 0.5", "write", "commit"]
    assert result.metrics["train/skipped_updates"] == 1.0
    second = make_trainer(planned(training={"updates_per_batch": 2, "schedule": "linear"}))
    second.train(batch_of(1, *reversed(groups)))
    assert second.learner.calls[1] == f"prepare {0.5 * 3 / 6:g}", "the second of its batch, and fourth of six"


def test_a_batch_without_variance_trains_nothing():
    trainer = make_trainer(planned())
    result = trainer.train(batch_of(0, (1.0, 1.0)))
    assert (result.no_signal, trainer.learner.calls) == (NoSignal.NO_VARIANCE, [])
    assert result.credit.has_signal is False
    assert result.metrics["reward/mean"] == 1.0
    assert result.metrics["reward/signal_fraction"] == 0.0


def test_a_batch_of_truncated_rollouts_trains_nothing_where_these_are_left_out():
    batch = batch_of(0, outcome="truncated")
    left_out = make_trainer(planned(algorithm={"arguments": {"train_on_truncated": False}})).train(batch)
    assert left_out.no_signal is NoSignal.ALL_TRUNCATED
    assert not any(left_out.credit.carries_loss)
    assert make_trainer(planned()).train(batch).no_signal is None


def test_sft_trains_on_whatever_was_written():
    trainer = make_trainer(planned("sft"))
    result = trainer.train(batch_of(0, outcome="truncated"))
    assert trainer.learner.calls == ["steps 1", "prepare 0.5", "write", "commit"]
    assert (result.no_signal, result.credit, result.metrics.keys()) == (
        None, None, {"train/loss", "train/learning_rate", "train/grad_norm"},
    )  # fmt: skip
    assert trainer.learner.steps[0].advantages is None
    nothing = make_trainer(planned("sft")).train(batch_of(0, outcome="reward_error"))
    assert (nothing.no_signal, nothing.metrics) == (NoSignal.NOTHING_KEPT, {})
    one_of_two = make_trainer(planned("sft", training={"updates_per_batch": 2}))
    one_of_two.learner.zero = {2}
    result = one_of_two.train(batch_of(0, *GROUPS))
    assert (result.no_signal, result.metrics["train/skipped_updates"]) == (None, 1.0)
    clipped = make_trainer(planned("sft"))
    clipped.learner.zero, clipped.learner.metrics = {1}, {"clip_fraction": 0.5}
    assert clipped.train(batch_of(0)).no_signal is NoSignal.ALL_CLIPPED


@pytest.mark.parametrize("differs", [0.0, 1e-6, None])
def test_an_exact_run_takes_no_difference_in_its_steps(differs):
    trainer = make_trainer(planned(run={"exact": True}))
    trainer.learner.metrics = {} if differs is None else {"mismatch/abs_logprob_diff": differs}
    if differs == 0.0:
        assert trainer.train(batch_of(2)).no_signal is None
        return
    with pytest.raises(MismatchError, match=r"at optimizer step 2, and run\.exact"):
        trainer.train(batch_of(2))
    plain = make_trainer(planned())
    plain.learner.metrics = trainer.learner.metrics
    assert plain.train(batch_of(2)).no_signal is None


def test_silent_rollouts_are_ignored_only_where_neither_loss_nor_critic_needs_them():
    batch = batch_of(0, (1.0, 0.0), *[(1.0, 1.0)] * 4)
    counts = []
    for ignores, critic in ((True, None), (False, None), (True, Critic())):
        kind = "ppo" if critic else "grpo"
        trainer = make_trainer(planned(kind), critic=critic, ignores_silent=ignores)
        for rollout in batch.rollouts:
            rollout.sequences = [sequence()]
        trainer.train(batch)
        counts.append(len(trainer.learner.steps[0].sequences))
    assert counts == [3, 10, 10]


def test_a_critic_is_trained_first_and_alone_while_it_warms_up():
    for step, is_alone in ((1, True), (2, False)):
        critic = Critic(warmup_steps=2)
        trainer = make_trainer(planned("ppo"), critic=critic)
        result = trainer.train(batch_of(step, (1.0, 0.0)))
        assert result.is_critic_only == is_alone
        assert result.metrics["value/loss"] == 0.5
        assert result.metrics.get("value/warmup") == (1.0 if is_alone else None)
        assert bool(trainer.learner.steps) == (not is_alone)
        ((planned_step,),) = critic.trained
        assert all({"old_values", "returns"} <= each.streams.keys() for each in planned_step.sequences)
        assert (result.no_signal, result.credit.advantages) == (None, [None, None])


def test_a_critic_learns_from_rewards_that_teach_the_policy_nothing():
    critic = Critic()
    trainer = make_trainer(planned("ppo"), critic=critic)
    result = trainer.train(batch_of(0, (0.0, 0.0)))
    assert len(critic.trained) == 1
    assert (result.no_signal, trainer.learner.steps) == (NoSignal.NO_VARIANCE, [])


def test_a_kl_term_in_the_reward_is_measured_and_no_signal():
    config = planned("reinforce_pp", algorithm={"kl_coef": 0.5, "arguments": {"kl_in": "reward", "kl_estimator": "k1"}})
    reference = Learner([])
    reference.logprob = -1.0
    trainer = make_trainer(config, reference=reference)
    result = trainer.train(batch_of(0, (1.0, 1.0)))
    assert result.metrics["train/kl_reference"] == pytest.approx(0.5)
    assert result.no_signal is NoSignal.NO_VARIANCE
    assert not math.isnan(result.metrics["reward/mean"])


@pytest.mark.parametrize("critic", [None, Critic()])
def test_rollouts_without_a_token_make_no_update(critic):
    """Of records that were kept before such episodes were left out of batches: a group of them is an update alone."""
    batch = batch_of(0, *GROUPS)
    for rollout in batch.rollouts[:2]:
        rollout.sequences = []
    batch.rollouts[2].sequences = [Sequence([1, 2], [False, False])]
    trainer = make_trainer(planned(training={"updates_per_batch": 4}), critic=critic)
    result = trainer.train(batch)
    assert result.no_signal is None
    assert [sum(s.num_trainable > 0 for s in step.sequences) for step in trainer.learner.steps] == [1, 2, 2]
    assert result.metrics["dropped/no_tokens"] == 3.0


@pytest.mark.parametrize("kept", [False, True])
def test_a_batch_without_a_token_says_so(kept):
    batch = batch_of(0, *GROUPS)
    for rollout in batch.rollouts:
        rollout.sequences = []
    if not kept:
        batch.rollouts, batch.dropped = [], {"no_tokens": 8}
    trainer = make_trainer(planned())
    result = trainer.train(batch)
    assert (result.no_signal, trainer.learner.calls) == (NoSignal.NO_TOKENS, [])
    assert result.metrics["dropped/no_tokens"] == 8.0


def test_a_full_context_is_the_reason_where_it_cut_most_episodes():
    same = batch_of(0, (1.0, 1.0), outcome="truncated")
    for rollout in same.rollouts:
        rollout.stop = "context_full"
    assert make_trainer(planned()).train(same).no_signal is NoSignal.CONTEXT_FULL
    cut = batch_of(0, outcome="truncated")
    left_out = planned(algorithm={"arguments": {"train_on_truncated": False}})
    for stop, reason in (("length", NoSignal.ALL_TRUNCATED), ("context_full", NoSignal.CONTEXT_FULL)):
        for rollout in cut.rollouts:
            rollout.stop = stop
        assert make_trainer(left_out).train(cut).no_signal is reason
