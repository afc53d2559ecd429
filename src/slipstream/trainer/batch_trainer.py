"""Trains the policy, and the critic of PPO, on one batch of rollouts or of written examples.

For RL the stages are: credit assignment, step batches (one per optimizer step), critic updates, reference and old
log-probabilities, optimizer steps. SFT has the step batches and the optimizer steps only. Every stage takes the results
of the earlier ones as arguments; nothing but the learner, the critic and their optimizers changes from batch to batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from slipstream import records
from slipstream.algo.algorithm import Algorithm, algorithm_of, check_reads, custom_metrics, terms_of, write_credit
from slipstream.algo.readiness import CONTEXT_ADVICE
from slipstream.config.planned import PlannedConfig, PlannedRL
from slipstream.data.examples import Examples
from slipstream.errors import ZeroGradientError
from slipstream.trainer.credit_assignment import Credit, assign_credit
from slipstream.trainer.critic import Critic
from slipstream.trainer.learner import Learner, Scorer
from slipstream.trainer.loss import Objective, PolicyObjective, SFTObjective
from slipstream.trainer.metrics import any_cut, refuse_difference, rollout_metrics
from slipstream.trainer.old_logprobs import fill_logprobs, fill_read, reward_kl_penalties
from slipstream.trainer.optim.base import learning_rate_at
from slipstream.trainer.packing import StepBatch, make_step_batches

_COUNTS = ("num_tokens", "num_sequences", "num_micro_batches", "num_row_tokens", "overflows")
_SUMS = {f"train/{name}" for name in _COUNTS}
_LARGEST = "memory/"
"""Sums over a batch's updates, and metrics with their largest value; all others are means."""


class NoSignal(Enum):
    """Why a batch trains nothing: the reason, and advice for the user."""

    NO_TOKENS = (
        "no episode has a token of the policy",
        "have the environment ask the policy before it ends an episode, and make the first observation shorter than "
        "the context (inference.max_model_len)",
    )

    NO_VARIANCE = (
        "no group had any reward variance",
        "make the task easier or harder, or start from a better model",
    )
    ALL_TRUNCATED = (
        "no completion ended before the limit, and truncated ones are not trained on,",
        "raise sampling.max_tokens, or set algorithm.arguments.train_on_truncated = true",
    )
    CONTEXT_FULL = (
        "most episodes ended as the context was full, and what is left teaches nothing",
        CONTEXT_ADVICE,
    )
    NOTHING_KEPT = (
        "no rollout could be trained on",
        "look at dropped/too_long and the other counts of dropped/ in metrics.jsonl: lower sampling.max_tokens, or use "
        "a model with a longer context",
    )
    """Batches of a method with rollouts may be like this."""
    ALL_CLIPPED = (
        "importance sampling and clipping left no token a gradient",
        "look at mismatch/kl and mismatch/abs_logprob_diff, and raise algorithm.arguments.importance_cap or make fewer "
        "updates",
    )

    def __init__(self, reason: str, advice: str) -> None:
        self.reason = reason
        self.advice = advice


@dataclass(frozen=True)
class BatchResult:
    """What training on one batch gave."""

    metrics: dict[str, float]
    credit: Credit | None = None
    """The rollouts' advantages; None for SFT."""
    no_signal: NoSignal | None = None
    """Why no optimizer step was made; None when at least one was."""
    is_critic_only: bool = False
    """Whether the critic alone was trained, in its warm-up."""


class Weighs(Protocol):
    """A method of SFT, as the trainer asks it (`orchestrator.method.Method`)."""

    def before_update(self, step: StepBatch, learner: Learner, reference: Scorer | None) -> dict[str, float]:
        """Fill streams of the sequences before an optimizer step; returns its metrics."""
        ...

    def held_out(self, examples: Examples, learner: Learner, reference: Scorer | None) -> dict[str, float] | None:
        """Metrics of held-out sequences; None: their cross-entropy is measured."""
        ...


@dataclass(frozen=True)
class BatchTrainer:
    """See the module. Holds what is constant over a run."""

    config: PlannedConfig
    learner: Learner
    objective: Objective
    sampling: records.SamplingParams
    reference: Scorer | None
    """The frozen model of the KL term; None without one."""
    critic: Critic | None
    on_optimizer_steps: Callable[[int], None]
    """Called with the number of optimizer steps before the first of them."""
    before_write: Callable[[], None]
    """Called before each write to the live weights, which an engine may share."""
    method: Weighs | None = None
    """Of SFT; None: cross-entropy alone."""

    def train(self, batch: records.Batch, objective: Objective | None = None) -> BatchResult:
        """Run all stages on `batch`. `objective`: in place of the run's."""
        if objective is not None:
            return replace(self, objective=objective).train(batch)
        algorithm = self.config.algorithm
        if isinstance(algorithm, PlannedRL) and not isinstance(self.objective, SFTObjective):
            return self._train_rl(batch, algorithm)
        steps = self.step_batches(batch)
        if not steps:
            return BatchResult({}, no_signal=NoSignal.NOTHING_KEPT)
        metrics, num_skipped = self.optimizer_steps(list(enumerate(steps)), batch.step)
        if num_skipped:
            metrics["train/skipped_updates"] = float(num_skipped)
        return BatchResult(metrics, no_signal=NoSignal.ALL_CLIPPED if num_skipped == len(steps) else None)

    def _train_rl(self, batch: records.Batch, algorithm: PlannedRL) -> BatchResult:
        metrics, hooks = rollout_metrics(batch), self._hooks(algorithm)
        if (batch.rollouts or metrics.get("dropped/no_tokens")) and not any(r.num_sampled for r in batch.rollouts):
            return BatchResult(metrics, no_signal=NoSignal.NO_TOKENS)
        is_full = metrics.get("rollout/stop_context_full_fraction", 0.0) > 0.5
        no_variance = NoSignal.CONTEXT_FULL if is_full else NoSignal.NO_VARIANCE
        fill_read(batch, hooks.reads, self.learner, self.reference, self.sampling)
        check_reads(hooks, batch.rollouts)
        write_credit(hooks, "credit_batch", batch.rollouts)
        metrics |= custom_metrics(hooks, batch.rollouts)
        penalties, kl_metrics = reward_kl_penalties(batch, algorithm, self.learner, self.reference, self.sampling)
        credit = assign_credit(batch, algorithm, self.sampling.max_tokens, penalties, self.critic)
        metrics |= kl_metrics | credit.metrics
        planned = self.step_batches(batch, credit)
        if not planned:
            return BatchResult(metrics, credit, NoSignal.CONTEXT_FULL if is_full else NoSignal.ALL_TRUNCATED)
        # Further losses, and a session's own loss, have gradients without advantages.
        is_chosen = hooks.defines("loss") and bool(getattr(self.objective, "chosen", ""))
        is_free = is_chosen or hooks.defines("terms")
        if not credit.has_signal and self.critic is None and not is_free:
            return BatchResult(metrics, credit, no_variance)
        if self.critic is not None:
            metrics |= self.critic.train(planned)
            if batch.step < self.critic.config.warmup_steps:
                return BatchResult(metrics | {"value/warmup": 1.0}, credit, is_critic_only=True)
        steps = [(index, step) for index, step in enumerate(planned) if step.has_signal or is_free]
        metrics["train/skipped_updates"] = float(len(planned) - len(steps))
        if not steps:
            return BatchResult(metrics, credit, no_variance)
        fill_logprobs([step for _, step in steps], algorithm, self.learner, self.reference, self.sampling)
        update_metrics, num_skipped = self.optimizer_steps(steps, batch.step, may_be_zero=not credit.has_signal)
        metrics["train/skipped_updates"] += num_skipped
        why = NoSignal.ALL_CLIPPED if credit.has_signal else no_variance
        return BatchResult(metrics | update_metrics, credit, why if num_skipped == len(steps) else None)

    def _hooks(self, algorithm: PlannedRL) -> Algorithm:
        """The objective's: all hooks of this process share one object."""
        return self.objective.algorithm if isinstance(self.objective, PolicyObjective) else algorithm_of(algorithm)

    def step_batches(self, batch: records.Batch, credit: Credit | None = None) -> list[StepBatch]:
        """One batch per optimizer step, at most `updates_per_batch * epochs_per_batch`. `credit`: None for SFT."""
        training = self.config.training
        rewards = [rollout.reward for rollout in batch.rollouts] if self.method is not None else None
        return make_step_batches(
            batch,
            credit.advantages if credit else rewards,
            updates_per_batch=training.updates_per_batch,
            epochs=training.epochs_per_batch,
            carries_loss=credit.carries_loss if credit else None,
            ignores_silent=self.critic is None and self.objective.ignores_silent,
        )

    def _add_terms(self, step: StepBatch) -> dict[str, float]:
        """Accumulate the gradients of the algorithm's further losses; returns their means."""
        if not isinstance(self.objective, PolicyObjective):
            return {}
        terms = terms_of(self.objective.algorithm, step.sequences)
        made = (
            self.learner.forward_backward(StepBatch(term.sequences), self.objective.term(term.loss), term.weight)
            for term in terms
        )
        return {f"term/{term.name}": metrics["loss"] for term, metrics in zip(terms, made, strict=True)}

    def optimizer_steps(
        self, steps: Sequence[tuple[int, StepBatch]], batch_step: int, *, may_be_zero: bool = False
    ) -> tuple[dict[str, float], int]:
        """Make one optimizer step per `(index in the batch, step batch)`. Returns the metrics of the steps that were
        applied, or of all if none was, as means or sums, and how many were skipped because their gradient was zero."""
        training = self.config.training
        self.on_optimizer_steps(len(steps))
        per_batch = training.updates_per_batch * training.epochs_per_batch
        applied: list[dict[str, float]] = []
        skipped: list[dict[str, float]] = []
        for index, step in steps:
            number, may_skip = batch_step * per_batch + index, may_be_zero or bool(applied)
            row, is_applied = self.optimizer_step(step, number, may_be_zero=may_skip)
            (applied if is_applied else skipped).append(row)
        rows = applied or skipped
        names = dict.fromkeys(name for row in rows for name in row)
        # Not each step has tokens of every position and probability.
        values = {name: [row[name] for row in rows if name in row] for name in names}
        return {name: _joined(name, own) for name, own in values.items()}, len(skipped)

    def optimizer_step(self, step: StepBatch, number: int, *, may_be_zero: bool) -> tuple[dict[str, float], bool]:
        """Compute the gradient of `step` and apply it. Returns its metrics, and whether it was applied: a gradient of
        zero is skipped where clipping or masking explains it, and raises ZeroGradientError otherwise.

        `number` counts the run's optimizer steps, skipped ones included; the learning-rate schedule reads it.
        `may_be_zero`: after the first update of a batch the ratio of every token may be outside the clipping range.
        """
        training, found = self.config.training, {}
        if self.method is not None:
            found = self.method.before_update(step, self.learner, self.reference)
        metrics = self.learner.forward_backward(step, self.objective) | found
        if not math.isfinite(metrics.get("loss", 0.0)) and isinstance(self.objective, PolicyObjective):
            self.objective.refuse(metrics["loss"], number)
        named = {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}
        named |= self._add_terms(step)
        if self.config.run.exact:
            refuse_difference(metrics.get("mismatch/abs_logprob_diff", math.nan), f"optimizer step {number}")
        rate = learning_rate_at(
            number,
            peak=float(training.learning_rate),
            schedule=training.schedule,
            warmup_steps=training.warmup_steps,
            num_steps=training.steps * training.updates_per_batch * training.epochs_per_batch,
        )
        try:
            stats = self.learner.optim_prepare(rate)
        except ZeroGradientError:
            if not (may_be_zero or any_cut(metrics) or not step.has_signal):
                raise
            self.learner.optimizer.discard_gradients()
            return named, False
        self.before_write()
        self.learner.optim_commit()
        named |= {"train/learning_rate": stats.learning_rate, "train/grad_norm": stats.grad_norm}
        if self.config.model.dtype == "float16":
            named |= {"train/loss_scale": stats.loss_scale, "train/overflows": float(stats.num_overflows)}
        return named, True


def _joined(name: str, values: list[float]) -> float:
    if name in _SUMS:
        return math.fsum(values)
    return max(values) if name.startswith(_LARGEST) else statistics.fmean(values)
