"""Two ways of making batches of rollouts, one after the other, for as long as the run goes on.

`InDataOrder`: the groups of a batch follow from seed and step alone (`training.order = "data"`). `ReadyFirst`: groups
begin as slots become free, across batches, and a batch is made of those that finish first (`"ready"`), so that the
engine does not wait for the longest completion of each batch. See `slots.py` for what a batch still waits for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slipstream.data.draws import Draws
from slipstream.orchestrator.batches.batcher import Batcher, group_name
from slipstream.orchestrator.batches.dynamic_sampling import drawn_metrics
from slipstream.orchestrator.batches.pace import Pace
from slipstream.orchestrator.batches.slots import Slots
from slipstream.orchestrator.batches.staleness import oldest_version
from slipstream.orchestrator.concurrency import task_group
from slipstream.orchestrator.hooks import Hooks
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
    hooks: Hooks

    async def make_all(self, first: int, num_steps: int, put: Put) -> None:
        """Make the batches of the steps from `first` to `num_steps` - 1, and `put` each."""
        for step in range(first, num_steps):
            # A resumed run's first version is the one it begins with.
            version = await self.versions.wait_for(oldest_version(step, self.batcher.staleness, first))
            if step == first:
                self.batcher.idle.begin(step)
            self.batcher.trained(self.versions.released)
            tasks = self.batcher.share.part(self.tasks_of_step(step))
            self.hooks.round_began(self.batcher.num_rollouts(tasks))
            async with self.versions.generating():
                batch = await self.batcher.make(step, version, tasks)
            self.hooks.batch_ended()
            await put(batch)


class ReadyFirst:
    """Groups of several batches at once. The engine must take new weights while it generates."""

    def __init__(
        self,
        batcher: Batcher,
        versions: Versions,
        tasks_of_step: Callable[[int], Sequence[Task]],
        hooks: Hooks,
        size: int,
        draws: Draws,
        overprovision: float = 0.0,
    ) -> None:
        """`size`: groups of a batch that are made here. `draws`: which draws of the task order an earlier attempt has
        used up. `overprovision`: groups that run beyond those that the batches need, as a part of `size`."""
        self._batcher = batcher
        self._versions = versions
        self._tasks_of_step = tasks_of_step
        self._hooks = hooks
        self._size = size
        self._whole = size * batcher.share.of
        """Groups in a batch, of all orchestrators."""
        self._draws = batcher.share.draws(draws.unused(), size)
        self._began: dict[int, Version] = {}
        self._finished: dict[int, list[Rollout]] = {}
        self._silent: dict[int, list[Rollout]] = {}
        """Groups without signal that were dropped since the last batch."""
        self._further = math.ceil(overprovision * size - _ROUNDING)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By number, what generates each running group."""
        self._changed = asyncio.Event()
        self._pace = Pace(batcher.staleness + 1)

    async def make_all(self, first: int, num_steps: int, put: Put) -> None:
        """See `InDataOrder`."""
        # No deadlines here: the trainer's wait for a batch has one.
        await self._versions.wait_for(first)
        slots = Slots(self._size, self._batcher.staleness, first, num_steps, self._further)
        self._pace.begin(time.monotonic())
        self._batcher.idle.begin(first)
        async with task_group() as tasks:
            watch = tasks.create_task(self._watch(slots))
            for step in range(first, num_steps):
                self._hooks.round_began(self._size * self._batcher.group_size)
                while (numbers := slots.cut()) is None:
                    self._changed.clear()
                    for _ in range(slots.num_free):
                        self._begin(slots, next(self._draws), tasks)
                    self._batcher.idle.is_due(slots.num_ready >= self._size)
                    await self._changed.wait()
                self._hooks.batch_ended()
                await put(self._batch(step, numbers, slots))
            watch.cancel()

    async def _watch(self, slots: Slots) -> None:
        """Free the slots of batches whose version is released."""
        while True:
            await self._versions.wait_for(self._versions.released + 1)
            slots.release(self._versions.released)
            self._batcher.trained(self._versions.released)
            self._changed.set()

    def _begin(self, slots: Slots, number: int, tasks: asyncio.TaskGroup) -> None:
        """Generate the group of a draw, unless an earlier attempt has finished it."""
        version = self._versions.current
        assert version is not None
        step, place = divmod(number, self._whole)
        kept = self._batcher.kept(group_name(step, place), slots.step, slots.is_in_time)
        if kept is not None:
            oldest, group = kept
            slots.begin(number, oldest)
            self._began[number] = Version(version.lineage, oldest)
            self._end(slots, number, group)
        else:
            slots.begin(number)
            self._began[number] = version
            task = self._group(slots, number, self._tasks_of_step(step)[place])
            self._tasks[number] = tasks.create_task(task)

    async def _group(self, slots: Slots, number: int, task: Task) -> None:
        group = await self._batcher.group(*divmod(number, self._whole), task)
        del self._tasks[number]
        self._pace.add(group)
        self._end(slots, number, group)

    def _end(self, slots: Slots, number: int, group: list[Rollout]) -> None:
        """A group has finished: it is ready, or dropped for want of signal."""
        refills = self._batcher.refills
        allowed = refills.max_refills * self._size if refills is not None else 0
        if refills is not None and not refills.has_signal(group) and len(self._silent) < allowed:
            self._silent[number] = group
            self._batcher.drop(group[0].group_id, "no_signal")
            slots.drop(number)
        else:
            self._finished[number] = group
            slots.finish(number)
        self._changed.set()

    def _leave_out(self, surplus: Sequence[int]) -> dict[int, list[Rollout]]:
        """Cancel the surplus groups that are running, and drop and return those that have finished."""
        finished = {number: self._finished.pop(number) for number in surplus if number in self._finished}
        for number in surplus:
            group_id = group_name(*divmod(number, self._whole))
            if number in finished:
                self._batcher.drop(group_id, "surplus")
            else:
                self._tasks.pop(number).cancel()
                self._batcher.cancel(group_id, "surplus")
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
        metrics |= self._batcher.idle.queues()
        if num_cancelled := len(slots.surplus) - len(surplus):
            metrics["rollout/groups_cancelled"] = float(num_cancelled)
        if self._batcher.refills is not None:
            metrics |= drawn_metrics(groups, len(chosen), len(silent))
        self._batcher.check(step, oldest, groups)
        reasons = {group[0].group_id: "no_signal" for group in silent.values()}
        reasons |= {group[0].group_id: "surplus" for group in surplus.values()}
        batch = self._batcher.batch(step, oldest, groups, chosen, reasons, metrics, self._pace.cut(time.monotonic()))
        batch.draws = used
        return batch
