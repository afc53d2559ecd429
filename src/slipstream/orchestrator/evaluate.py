"""Evaluates a version on held-out tasks: accuracy with its confidence interval."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.algo.statistics import wilson_interval
from slipstream.orchestrator.concurrency import all_of
from slipstream.orchestrator.rollouts import RolloutRunner, check_failures, seed_of, warn_of_losses
from slipstream.records import TRAINABLE_OUTCOMES, Rollout, SamplingParams, Task


@dataclass(frozen=True)
class Evaluation:
    """Results on the held-out tasks. A failed rollout counts as wrong, and in `num_failed`."""

    num_tasks: int
    num_right: int
    num_failed: int
    mean_reward: float
    mean_length: float
    truncated_fraction: float
    rollouts: list[Rollout] = field(default_factory=list, repr=False)

    @property
    def accuracy(self) -> float:
        """Fraction of the tasks solved."""
        return self.num_right / self.num_tasks

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy."""
        return wilson_interval(self.num_right, self.num_tasks)

    def metrics(self) -> dict[str, float]:
        """The row's metrics, as in `metrics.jsonl`."""
        low, high = self.interval
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/num_tasks": float(self.num_tasks),
            "eval/num_failed": float(self.num_failed),
            "eval/reward": self.mean_reward,
            "eval/length": self.mean_length,
            "eval/truncated_fraction": self.truncated_fraction,
        }


async def evaluate(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    *,
    sampling: SamplingParams,
    threshold: float,
    seed: int,
    max_failures: float,
    on_rollout: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Generate one rollout for each task concurrently; it is right when its reward reaches `threshold`.

    `warn` is called where the engine lost rollouts. Raises `EnvironmentFault` or `EngineError` when more than the
    fraction `max_failures` of the rollouts failed.
    """

    async def attempt(index: int, task: Task) -> Rollout:
        name = f"eval.{index}"
        rollout = await runner.run(
            task, rollout_id=name, group_id=name, sampling=sampling, seed=seed_of(seed, index), is_urgent=True
        )
        on_rollout()
        return rollout

    rollouts = await all_of(attempt(index, task) for index, task in enumerate(tasks))
    graded = [rollout for rollout in rollouts if rollout.outcome in TRAINABLE_OUTCOMES]
    check_failures(rollouts, "the evaluation", max_failures)
    warn_of_losses(rollouts, "the evaluation", warn)
    return Evaluation(
        num_tasks=len(rollouts),
        num_right=sum(rollout.reward >= threshold for rollout in graded),
        num_failed=len(rollouts) - len(graded),
        mean_reward=statistics.fmean([rollout.reward for rollout in graded] or [0.0]),
        mean_length=statistics.fmean([rollout.num_sampled for rollout in graded] or [0.0]),
        truncated_fraction=sum(rollout.outcome == "truncated" for rollout in graded) / len(rollouts),
        rollouts=rollouts,
    )
