"""Makes groups of rollouts, and batches of groups.

Under dynamic sampling a batch is made in rounds: groups without signal are dropped, and more tasks are sampled until
the batch has enough groups with signal. Which groups are chosen does not depend on the order in which they finish.

Guarantees: every rollout that is started ends in the batch or is counted in `dropped` by reason; a batch for step k
holds no token of a version older than k - staleness, or of another lineage; too many failed rewards end the run with
the first failure's text; a turn whose engine died is requested again once the engine is back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.algo.readiness import SignalRule
from slipstream.errors import TrainingError
from slipstream.orchestrator.batches.arrivals import Arrival, Arrivals
from slipstream.orchestrator.batches.dynamic_sampling import Refills, choose, losses, task_counts
from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.batches.pace import Generated
from slipstream.orchestrator.batches.share import Share
from slipstream.orchestrator.batches.staleness import refuse_stale, staleness_metrics
from slipstream.orchestrator.concurrency import all_of
from slipstream.orchestrator.failure_rate import (
    RECENT_BATCHES,
    FailureCounts,
    check_failures,
    warn_of_losses,
    warn_of_no_tokens,
)
from slipstream.orchestrator.rollouts import RolloutRunner, seed_of
from slipstream.orchestrator.teacher_engine import RunTeacher
from slipstream.patience import is_cancelled
from slipstream.progress import Progress
from slipstream.records import TRAINABLE_OUTCOMES, Batch, Rollout, SamplingParams, Task, Version
from slipstream.runlog.ledger import Ledger

_FAILED = "failed"
"""Why a group is dropped in which no rollout can be trained on."""


def group_name(step: int, place: int) -> str:
    """The id of the group of one task of the data order."""
    return f"{step}.{place}"


@dataclass
class Batcher:
    """Makes groups of rollouts, and of groups the batch of a step; the ledger learns of both."""

    runner: RolloutRunner
    group_size: int
    sampling: SamplingParams
    seed: int
    max_reward_failures: float
    needs_logprobs: bool
    """Whether a rollout without the engine's log-probabilities is an error."""
    ledger: Ledger
    progress: Progress
    warn: Callable[[str], None]
    staleness: int
    """How many versions older than the newest possible one a token may be."""
    has_signal: SignalRule
    parts: Collection[str]
    """Of a mixture."""
    refills: Refills | None
    teacher: RunTeacher | None
    """Scores each rollout as soon as it has ended."""
    share: Share
    """Which groups of each batch are made here."""
    idle: IdleTime
    credit: Callable[[list[Rollout]], None] | None = None
    """Gives each complete group its advantages."""
    arrivals: Arrivals | None = None
    """Brings all groups, if programs outside of the run make them."""
    settles: bool = True
    """Whether what is in a batch will be trained on; else whoever asked for it says so later."""
    _has_warned: bool = False
    """Whether episodes without a token were reported: they come again with their tasks."""
    _recent_failures: deque[FailureCounts] = field(default_factory=lambda: deque(maxlen=RECENT_BATCHES))
    _reused: set[str] = field(default_factory=set[str])
    """Groups of the batch in the making that an earlier attempt has generated."""
    _num_generated: int = 0
    """Tokens of the groups that ended since the batch before."""

    async def make(self, step: int, version: Version, tasks: Sequence[Task], first: int = 0) -> Batch:
        """Generate a group for every task concurrently; under dynamic sampling, in further rounds too. `first`: groups
        of the step that were made before."""
        started = time.monotonic()
        self._reused.clear()
        size, groups = len(tasks), await self._round(step, version, first, tasks, len(tasks))
        chosen, reasons, metrics = groups, dict[str, str](), dict[str, float]()
        if self.refills is not None:
            number = 0
            while number < self.refills.max_refills and (wanted := self.refills.num_wanted(groups, size)):
                number += 1
                further = self.share.part(self.refills.tasks(step, number))[:wanted]
                self.progress.phase("generate", self.num_rollouts(further))
                groups += await self._round(step, version, first + number * size, further, size)
            choice = choose(self.refills, groups, size, number, may_be_empty=self.share.number > 0)
            chosen, reasons, metrics = choice.groups, choice.reasons, choice.metrics
            for group, reason in reasons.items():
                self.ledger.drop(group, reason)
        new = (group for group in groups if group[0].group_id not in self._reused)
        made = Generated.of(new, time.monotonic() - started)
        return self.batch(step, version, groups, chosen, reasons, metrics, made)

    async def group(self, step: int, place: int, task: Task, arrival: Arrival | None = None) -> list[Rollout]:
        """Generate the rollouts of one task concurrently, scored by the teacher where there is one. `step` and `place`
        are the task's in the data order; ids and seeds depend on them. With `arrivals` the group is `arrival`, or else
        the next one."""
        group_id = group_name(step, place)
        self.ledger.begin(group_id)
        with self.idle.groups:
            if self.arrivals is None:
                rollouts = await self._generate(group_id, step, place, task)
            else:
                rollouts = await self._received(group_id, task, arrival or await self.arrivals.take())
        if is_cancelled():  # the environment has suppressed it
            raise asyncio.CancelledError
        if self.credit is not None:
            self.credit(rollouts)
        self.ledger.finish(group_id, rollouts)
        self._num_generated += sum(rollout.num_sampled for rollout in rollouts)
        return rollouts

    def kept(
        self, group_id: str, step: int, is_in_time: Callable[[int], bool] = lambda oldest: True
    ) -> tuple[int, list[Rollout]] | None:
        """See `Ledger.kept`."""
        kept = self.ledger.kept(group_id, step, is_in_time)
        if kept is not None:
            self.progress.advance(len(kept[1]))
        return kept

    def waiting(self, step: int, is_in_time: Callable[[int], bool] = lambda oldest: True) -> Arrival | None:
        """With `arrivals`, a group in time for `step`, if one waits."""
        if self.arrivals is None:
            return None
        return self.arrivals.take_now(lambda oldest: oldest + self.staleness >= step and is_in_time(oldest))

    def batch(
        self,
        step: int,
        version: Version,
        groups: Sequence[list[Rollout]],
        chosen: Sequence[list[Rollout]],
        reasons: Mapping[str, str],
        metrics: Mapping[str, float],
        made: Generated,
    ) -> Batch:
        """The batch of the groups `chosen` of those generated; `reasons`: why the others are left out, by their ids.
        The groups must have passed `check`. `made`: what was generated meanwhile."""
        rollouts = [rollout for group in groups for rollout in group]
        warn_of_losses(rollouts, f"step {step}", self.warn)
        self._has_warned = self._has_warned or warn_of_no_tokens(rollouts, f"step {step}", self.warn)
        failed = {
            group[0].group_id: _FAILED
            for group in chosen
            if all(rollout.outcome not in TRAINABLE_OUTCOMES for rollout in group)
        }
        for group_id, reason in failed.items():
            self.ledger.drop(group_id, reason)
        dropped, lost = losses(groups, {**reasons, **failed})
        num_generated, self._num_generated = self._num_generated, 0
        kept = [rollout for group in chosen for rollout in group if rollout.outcome in TRAINABLE_OUTCOMES]
        if self.settles:
            self.ledger.batch(step, [group[0].group_id for group in chosen if group[0].group_id not in failed])
        return Batch(
            step=step,
            version=version,
            rollouts=kept,
            dropped=dropped,
            metrics={
                **made.rates(),
                **staleness_metrics(step, kept),
                **task_counts(groups, self.has_signal, self.parts),
                "tokens/generated": float(num_generated),
                **self.idle.cut(step),
                **lost,
                **metrics,
            },
        )

    def num_rollouts(self, tasks: Sequence[Task]) -> int:
        """How many rollouts the groups of these tasks have."""
        return sum(self.runner.group_size(task, self.group_size) for task in tasks)

    def check(self, step: int, version: Version, groups: Sequence[list[Rollout]]) -> None:
        """Raise where too many rollouts failed, log-probabilities are missing, or a token's version is too old."""
        rollouts = [rollout for group in groups for rollout in group]
        check_failures(rollouts, f"step {step}", self.max_reward_failures, self._recent_failures)
        for rollout in rollouts:
            for sequence in rollout.sequences:
                if self.needs_logprobs and sequence.logprobs is None:
                    raise TrainingError(
                        f"rollout {rollout.id} came without log-probabilities, which algorithm.importance_sampling and "
                        'old_policy = "engine" need: use an engine that returns them, or set the first to "none" and'
                        ' the second to "trainer"'
                    )
        refuse_stale(rollouts, step, version.lineage, self.staleness, self.ledger.survivors)

    async def _round(
        self, step: int, version: Version, first: int, tasks: Sequence[Task], size: int
    ) -> list[list[Rollout]]:
        """A group for each task; `first` is the index of the first group among all that are made here of this step, and
        `size` the number of groups in a batch."""

        async def group(place: int, task: Task) -> list[Rollout]:
            kept = self.kept(group_name(step, place), step)
            if kept is None:
                return await self.group(step, place, task, self.waiting(step))
            self._reused.add(group_name(step, place))
            return kept[1]

        places = (self.share.place(own, size) for own in range(first, first + len(tasks)))
        groups = await all_of(group(place, task) for place, task in zip(places, tasks, strict=True))
        self.check(step, version, groups)
        return groups

    async def _generate(self, group_id: str, step: int, place: int, task: Task) -> list[Rollout]:
        size = self.runner.group_size(task, self.group_size)
        grades, prompts = self.runner.group(task, size), self.runner.prompts()

        async def rollout(number: int) -> Rollout:
            made = await self.runner.run(
                task,
                rollout_id=f"{group_id}.{number}",
                group_id=group_id,
                sampling=self.sampling,
                seed=seed_of(self.seed, step, place, number),
                place=grades.places[number] if grades is not None else None,
                prompts=prompts,
            )
            return await self._ended(made)

        try:
            return await all_of(rollout(number) for number in range(size))
        finally:
            if grades is not None:
                grades.cancel()

    async def _received(self, group_id: str, task: Task, arrival: Arrival) -> list[Rollout]:
        for number, rollout in enumerate(arrival.rollouts):
            rollout.id, rollout.group_id, rollout.task_id = f"{group_id}.{number}", group_id, task.id
        return await all_of(map(self._ended, arrival.rollouts))

    async def _ended(self, rollout: Rollout) -> Rollout:
        """The rollout, scored by the teacher where there is one."""
        if self.teacher is not None and rollout.outcome in TRAINABLE_OUTCOMES:
            await self.teacher.score(rollout)
        self.progress.advance()
        return rollout
