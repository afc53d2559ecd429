"""Two ways of making batches of rollouts, one after the other, for as long as the run goes on.

`InDataOrder`: the groups of a batch follow from seed and step alone (`training.order = "data"`). `ReadyFirst`: groups
begin as slots become free, across batches, and the first to finish make a batch (`"ready"`). So the engine does not
wait for the longest completion of each batch. See `slots.py` for a batch's remaining waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slipstream.data.draws import Draws
from slipstream.orchestrator.batches.arrivals import Arrival
from slipstream.orchestrator.batches.batcher import Batcher, group_name
from slipstream.orchestrator.batches.dynamic_sampling import drawn_metrics
from slipstream.orchestrator.batches.pace import Pace
from slipstream.orchestrator.batches.slots import Slots
from slipstream.orchestrator.batches.staleness import oldest_version
from slipstream.orchestrator.concurrency import task_group
from slipstream.orchestrator.versions import Versions
from slipstream.records import Batch, Rollout, Task, Version

_ROUNDING = 1e-9
"""A tenth of 30 groups is 3."""
Put = Callable[[Batch], Awaitable[None]]


@dataclass
class InDataOrder:
    """One batch after the other."""

    batcher: Batcher
    versions: Versions
    tasks_of_step: Callable[[int], Sequence[Task]]
    every: int = 1
    """The weights are published after so many steps."""

    async def make_all(self, first: int, num_steps: int, put: Put) -> None:
        """Make the batches of the steps from `first` to `num_steps` - 1, and `put` each."""
        for step in range(first, num_steps):
            # A resumed run's first version is the one it begins with.
            oldest = oldest_version(step, self.batcher.staleness, first, self.every)
            version = await self.versions.wait_to_begin(step, oldest)
            if step == first:
                self.batcher.idle.begin(step)
            tasks = self.batcher.share.part(self.tasks_of_step(step))
            async with self.versions.generating(), task_group() as group:
                making = group.create_task(self.batcher.make(step, version, tasks))
                await self.versions.wait_for(oldest)
                self.batcher.ledger.trained(self.versions.released)
                self.batcher.progress.phase("generate", self.batcher.num_rollouts(tasks))
            self.batcher.progress.end_phase()
            await put(making.result())


@dataclass
class ReadyFirst:
    """Groups of several batches at once. The engine must take new weights while it generates."""

    batcher: Batcher
    versions: Versions
    tasks_of_step: Callable[[int], Sequence[Task]]
    size: int
    """A batch's groups made here."""
    draws: Draws
    """The draws of the task order used up by earlier attempts."""
    overprovision: float = 0.0
    """Surplus groups in progress, as a fraction of `size`."""
    every: int = 1
    """See `InDataOrder`: a group may begin under a version older by all but one of them."""

    def __post_init__(self) -> None:
        self._whole = self.size * self.batcher.share.of
        """Groups in a batch, of all orchestrators."""
        self._unused = self.batcher.share.draws(self.draws.unused(), self.size)
        self._began: dict[int, Version] = {}
        self._finished: dict[int, list[Rollout]] = {}
        self._silent: dict[int, list[Rollout]] = {}
        """Groups without signal, dropped since the last batch."""
        self._further = math.ceil(self.overprovision * self.size - _ROUNDING)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By number, the asyncio task of each running group."""
        self._changed = asyncio.Event()
        self._pace = Pace(self.batcher.staleness + 1)

    async def make_all(self, first: int, num_steps: int, put: Put) -> None:
        """See `InDataOrder`."""
        # No deadlines here: the trainer's wait for a batch has one.
        await self.versions.wait_for(first)
        slots = Slots(self.size, self.batcher.staleness - (self.every - 1), first, num_steps, self._further)
        self._pace.begin(time.monotonic())
        self.batcher.idle.begin(first)
        async with task_group() as tasks:
            watch = tasks.create_task(self._watch(slots))
            for step in range(first, num_steps):
                self.batcher.progress.phase("generate", self.size * self.batcher.group_size)
                while (numbers := slots.cut()) is None:
                    self._changed.clear()
                    for _ in range(slots.num_free):
                        self._begin(slots, next(self._unused), tasks)
                    self.batcher.idle.is_due(slots.num_ready >= self.size)
                    await self._changed.wait()
                self.batcher.progress.end_phase()
                await put(self._batch(step, numbers, slots))
            watch.cancel()

    async def _watch(self, slots: Slots) -> None:
        """Free the slots of batches with a released version."""
        while True:
            await self.versions.wait_for(self.versions.released + 1)
            slots.release(self.versions.released)
            self.batcher.ledger.trained(self.versions.released)
            self._changed.set()

    def _begin(self, slots: Slots, number: int, tasks: asyncio.TaskGroup) -> None:
        """Generate the group of a draw, unless an earlier attempt has finished it."""
        version = self.versions.current
        assert version is not None
        step, place = divmod(number, self._whole)
        kept = self.batcher.kept(group_name(step, place), slots.step, slots.is_in_time)
        if kept is not None:
            oldest, group = kept
            slots.begin(number, oldest)
            self._began[number] = Version(version.lineage, oldest)
            self._end(slots, number, group)
        else:
            arrival = self.batcher.waiting(slots.step, slots.is_in_time)
            slots.begin(number, arrival.step if arrival else None)
            self._began[number] = Version(version.lineage, arrival.step) if arrival else version
            task = self._group(slots, number, self.tasks_of_step(step)[place], arrival)
            self._tasks[number] = tasks.create_task(task)

    async def _group(self, slots: Slots, number: int, task: Task, arrival: Arrival | None) -> None:
        group = await self.batcher.group(*divmod(number, self._whole), task, arrival)
        del self._tasks[number]
        self._pace.add(group)
        self._end(slots, number, group)

    def _end(self, slots: Slots, number: int, group: list[Rollout]) -> None:
        """A group has finished: it is ready, or dropped for want of signal."""
        refills = self.batcher.refills
        allowed = refills.max_refills * self.size if refills is not None else 0
        if refills is not None and not refills.has_signal(group) and len(self._silent) < allowed:
            self._silent[number] = group
            self.batcher.ledger.drop(group[0].group_id, "no_signal")
            slots.drop(number)
        else:
            self._finished[number] = group
            slots.finish(number)
        self._changed.set()

    def _leave_out(self, surplus: Sequence[int]) -> dict[int, list[Rollout]]:
        """Cancel the running surplus groups; drop and return the finished ones."""
        finished = {number: self._finished.pop(number) for number in surplus if number in self._finished}
        for number in surplus:
            group_id = group_name(*divmod(number, self._whole))
            if number in finished:
                self.batcher.ledger.drop(group_id, "surplus")
            else:
                self._tasks.pop(number).cancel()
                self.batcher.ledger.cancel(group_id, "surplus")
        return finished

    def _batch(self, step: int, numbers: Sequence[int], slots: Slots) -> Batch:
        silent, self._silent = self._silent, {}
        chosen = [self._finished.pop(number) for number in numbers]
        surplus = self._leave_out(slots.surplus)
        groups = [*chosen, *silent.values(), *surplus.values()]
        oldest = min((self._began[number] for number in numbers), key=lambda version: version.step)
        used = sorted((*numbers, *silent, *slots.surplus))
        for number in used:
            del self._began[number]
        metrics = {"rollout/groups_running": float(slots.num_running), "rollout/groups_ready": float(slots.num_ready)}
        metrics |= self.batcher.idle.queues()
        if num_cancelled := len(slots.surplus) - len(surplus):
            metrics["rollout/groups_cancelled"] = float(num_cancelled)
        if self.batcher.refills is not None:
            metrics |= drawn_metrics(groups, len(chosen), len(silent))
        self.batcher.check(step, oldest, groups)
        reasons = {group[0].group_id: "no_signal" for group in silent.values()}
        reasons |= {group[0].group_id: "surplus" for group in surplus.values()}
        batch = self.batcher.batch(step, oldest, groups, chosen, reasons, metrics, self._pace.cut(time.monotonic()))
        batch.draws = used
        return batch
