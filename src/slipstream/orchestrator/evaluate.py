"""Evaluates a version on held-out tasks: accuracy with its confidence interval, and with several samples a task the
figures of `algo.validation`, over all tasks and by data source."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.algo.statistics import wilson_interval
from slipstream.algo.validation import Figure, Sampled, figures
from slipstream.config.environment import GradedText
from slipstream.engine_protocols import Generates
from slipstream.envs.answers import final_answer, graded_part, is_number, last_number
from slipstream.errors import IntegrityError
from slipstream.orchestrator.concurrency import all_of
from slipstream.orchestrator.failure_rate import check_failures, warn_of_losses, warn_of_no_tokens
from slipstream.orchestrator.rollouts import RolloutRunner, seed_of
from slipstream.records import TRAINABLE_OUTCOMES, Rollout, SamplingParams, Task, Version

MAX_SOURCES = 32
"""Most data sources with metrics of their own; further ones are counted."""
_BOXED = "\\boxed{"


@dataclass(frozen=True)
class Evaluation:
    """Results on the held-out tasks. A failed rollout, or one without a token, counts as wrong, and in `num_failed`."""

    num_tasks: int
    num_right: int
    """Right samples, over all tasks."""
    num_failed: int
    mean_reward: float
    mean_length: float
    truncated_fraction: float
    rollouts: list[Rollout] = field(default_factory=list, repr=False)
    """Rollouts of one task follow one another."""
    samples_per_task: int = 1
    further: dict[str, float] = field(default_factory=dict[str, float], repr=False)
    """Metrics of several samples a task, and by data source."""

    @property
    def accuracy(self) -> float:
        """Fraction of the tasks solved; with several samples a task, of the samples."""
        return self.num_right / (self.num_tasks * self.samples_per_task)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy: Wilson's, with several samples a task by `algo.validation`."""
        if self.samples_per_task == 1:
            return wilson_interval(self.num_right, self.num_tasks)
        mean = f"eval/mean@{self.samples_per_task}"
        return self.further[f"{mean}_low"], self.further[f"{mean}_high"]

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
            **self.further,
        }


async def evaluate(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    *,
    sampling: SamplingParams,
    threshold: float,
    seed: int,
    max_failures: float,
    samples_per_task: int = 1,
    version: Version | None = None,
    engine: Generates | None = None,
    on_rollout: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda text: None,
    graded_text: GradedText = "all",
) -> Evaluation:
    """Generate `samples_per_task` rollouts for each task concurrently; one is right when its reward reaches
    `threshold`. The first sample of a task is the same for any number of them. `engine`: if not the runner's.

    `warn` is called if the engine lost rollouts. Raises `EnvironmentFault` or `EngineError` when more than the
    fraction `max_failures` of the rollouts failed, and `IntegrityError` for a token of another version than `version`.
    """

    async def attempt(index: int, task: Task, number: int) -> Rollout:
        name = f"eval.{index}"
        rollout = await runner.run(
            task,
            rollout_id=f"{name}-{number}" if samples_per_task > 1 else name,
            group_id=name,
            sampling=sampling,
            seed=seed_of(seed, index, number) if number else seed_of(seed, index),
            is_urgent=True,
            engine=engine,
        )
        on_rollout()
        return rollout

    rollouts = await all_of(
        attempt(index, task, number) for index, task in enumerate(tasks) for number in range(samples_per_task)
    )
    if version is not None:
        refuse_other_versions(rollouts, version)
    graded = [rollout for rollout in rollouts if rollout.outcome in TRAINABLE_OUTCOMES]
    check_failures(rollouts, "the evaluation", max_failures)
    warn_of_losses(rollouts, "the evaluation", warn)
    warn_of_no_tokens(rollouts, "the evaluation", warn)
    # Majorities of many samples take seconds: the event loop must not stand still meanwhile.
    further = await asyncio.to_thread(further_metrics, tasks, rollouts, threshold, graded_text)
    return Evaluation(
        num_tasks=len(tasks),
        num_right=sum(rollout.reward >= threshold for rollout in graded),
        num_failed=len(rollouts) - len(graded),
        mean_reward=statistics.fmean([rollout.reward for rollout in graded] or [0.0]),
        mean_length=statistics.fmean([rollout.num_sampled for rollout in graded] or [0.0]),
        truncated_fraction=sum(rollout.outcome == "truncated" for rollout in graded) / len(rollouts),
        rollouts=rollouts,
        samples_per_task=samples_per_task,
        further=further,
    )


def refuse_other_versions(rollouts: Sequence[Rollout], version: Version, of: str = "the evaluation") -> None:
    """Raise `IntegrityError` for a sampled token of another version than `version`, or of none."""
    for rollout in rollouts:
        for sequence in rollout.sequences:
            found = {span.version for span in sequence.versions}
            if any(sequence.mask) and found != {version.name}:
                raise IntegrityError(
                    f"rollout {rollout.id} of {of} of version {version.name} holds tokens of version "
                    f"{', '.join(sorted(found)) or 'nobody knows which'}: its result is of no version; report this"
                )


def is_right(rollout: Rollout, threshold: float) -> bool:
    """Whether it was graded, and its reward reaches the threshold."""
    return rollout.outcome in TRAINABLE_OUTCOMES and rollout.reward >= threshold


def vote_of(completion: str, answer: str, graded_text: GradedText = "all") -> str | None:
    """The vote of the graded part of a completion in a majority: the text of its last `\\boxed{}`; if the task's
    `answer` is a number, its last number; else all of its text. Thinking does not count, nor does white space. None if
    the thinking never ends or there is no number."""
    part = graded_part(completion, graded_text)
    text = None if part is None else final_answer(part)
    if text is None:
        return None
    if (boxed := _last_boxed(text)) is not None:
        return " ".join(boxed.split())
    if is_number(answer):
        number = last_number(text)
        return None if number is None else str(number)
    return " ".join(text.split())


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, inside = 1, start + len(_BOXED)
    for place in range(inside, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[inside:place]
    return None


@dataclass(frozen=True)
class _Graded:
    """The samples of one task."""

    source: str
    rights: Sampled
    rewards: Sampled | None
    """Rewards of the graded samples; None if there is none."""


def _graded(task: Task, rollouts: Sequence[Rollout], threshold: float, graded_text: GradedText) -> _Graded:
    votes: list[str | None] | None = None
    if task.answer is not None and len(rollouts) > 1:
        votes = [vote_of(each.completion, task.answer, graded_text) if each.completion else None for each in rollouts]
    rights = tuple(float(is_right(each, threshold)) for each in rollouts)
    scored = [number for number, each in enumerate(rollouts) if each.outcome in TRAINABLE_OUTCOMES]
    rewards = Sampled(
        tuple(rollouts[number].reward for number in scored),
        None if votes is None else tuple(votes[number] for number in scored),
    )
    return _Graded(task.source, Sampled(rights, None if votes is None else tuple(votes)), rewards if scored else None)


def further_metrics(
    tasks: Sequence[Task], rollouts: Sequence[Rollout], threshold: float, graded_text: GradedText = "all"
) -> dict[str, float]:
    """Metrics beyond accuracy and means: of several samples a task, and by data source if tasks have one. A task's n
    rollouts follow one another; failed ones are wrong and have no reward."""
    size = len(rollouts) // len(tasks)
    graded = [
        _graded(task, rollouts[index * size : (index + 1) * size], threshold, graded_text)
        for index, task in enumerate(tasks)
    ]
    found = {"eval/samples_per_task": float(size), **_figures_of(graded, "eval")} if size > 1 else {}
    by_source: dict[str, list[_Graded]] = {}
    for task in graded:
        if task.source:
            by_source.setdefault(task.source, []).append(task)
    for source, group in list(by_source.items())[:MAX_SOURCES]:
        found |= _of_source(source, group, size)
    if len(by_source) > MAX_SOURCES:
        found["eval/sources_left_out"] = float(len(by_source) - MAX_SOURCES)
    return found


def _of_source(source: str, group: Sequence[_Graded], size: int) -> dict[str, float]:
    name = f"eval/source/{source}"
    accuracy = figures([task.rights for task in group], is_fraction=True)[f"mean@{size}"]
    rewards = [reward for task in group if task.rewards for reward in task.rewards.values]
    return {
        **_with_interval(f"{name}/accuracy", accuracy),
        f"{name}/num_tasks": float(len(group)),
        f"{name}/reward": statistics.fmean(rewards or [0.0]),
        **(_figures_of(group, name) if size > 1 else {}),
    }


def _figures_of(group: Sequence[_Graded], name: str) -> dict[str, float]:
    """Figures of right and wrong with their intervals, and of the rewards."""
    found: dict[str, float] = {}
    for kind, figure in figures([task.rights for task in group], is_fraction=True).items():
        found |= _with_interval(f"{name}/{kind}", figure)
    rewards = figures([task.rewards for task in group if task.rewards], is_fraction=False)
    return found | {f"{name}/reward/{kind}": figure.value for kind, figure in rewards.items()}


def _with_interval(name: str, figure: Figure) -> Mapping[str, float]:
    bounds = {f"{name}_low": figure.low, f"{name}_high": figure.high}
    return {name: figure.value, **{bound: value for bound, value in bounds.items() if math.isfinite(value)}}
