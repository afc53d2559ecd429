"""Slots: how far generation may run ahead of training, and the choice of finished groups for the next batch. Pure.

With staleness S and P groups in a batch there are (S + 1) * P slots. A group takes one when it begins. It gives it back
when the trainer releases the version made from its batch, or when it is dropped. A group begun under version v may be
trained at step v + S at the latest.

Guarantees: a batch takes the groups finished first, with one exception: a group without room in later batches before it
is too old goes first, and the batch waits for it. So no group is ever too old, in any order of finishing. When the
batch of step k is cut, at most (j + 1) * P groups to train by step k + j exist. If all slots are always full, exactly
as many exist, and the batch is the groups begun under version k - S.

With over-provision there are `further` slots, and a batch does not wait for as many groups. Its `surplus`, running or
finished, are the groups without room in it and too old for later ones.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class Slots:
    """The groups of one run, from version `first`, the beginning of the run or its resume, to its last step."""

    size: int
    """P, groups in a batch."""
    staleness: int
    first: int
    num_steps: int
    """The last batch is of step `num_steps` - 1; no more groups begin than the batches need."""
    further: int = 0
    """Running groups beyond the batches' need."""
    step: int = field(init=False)
    """The step of the next batch."""

    def __post_init__(self) -> None:
        self.step = self.first
        self._running: dict[int, int] = {}
        """The latest step of each running group, by number."""
        self._finished: dict[int, int] = {}
        """The same of finished groups, in the order of finishing."""
        self._released = self.first
        self.surplus: list[int] = []
        """Groups left out for good by the last cut, by ascending number."""

    @property
    def num_running(self) -> int:
        """Groups in generation."""
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """Finished groups in no batch."""
        return len(self._finished)

    @property
    def num_free(self) -> int:
        """How many groups may begin now."""
        uncut = self.num_running + self.num_ready
        ahead = (self._released + self.staleness + 1 - self.step) * self.size
        needed = min(ahead, (self.num_steps - self.step) * self.size)
        return max(0, needed + self.further - uncut) if needed > 0 else 0

    def release(self, version: int) -> None:
        """The trainer has released `version`: the slots of its batches are free."""
        self._released = max(self._released, version)

    def is_in_time(self, version: int) -> bool:
        """Whether one more group, begun under `version` in an earlier attempt, can be trained before it is too old,
        with all others still in time."""
        last = [*self._running.values(), *self._finished.values()]
        return all(
            sum(each <= latest for each in last) < (latest - self.step + 1) * self.size + self.further
            for latest in range(version + self.staleness, self._released + self.staleness)
        )

    def begin(self, number: int, version: int | None = None) -> None:
        """Group `number` begins, under the newest released version, or began in an earlier attempt under `version`."""
        if not self.num_free:
            raise ValueError(f"no slot is free for group {number}")
        self._running[number] = (self._released if version is None else version) + self.staleness

    def finish(self, number: int) -> None:
        """A running group has finished."""
        self._finished[number] = self._running.pop(number)

    def drop(self, number: int) -> None:
        """A running group will not be trained on; its slot is free."""
        del self._running[number]

    def cut(self) -> list[int] | None:
        """The groups of the next batch by ascending number, or None while it waits for groups."""
        if self.num_ready < self.size:
            return None
        chosen: dict[int, None] = {}
        for latest in range(self.step, self.step + self.staleness + 1):
            due = [number for number, last in self._finished.items() if last <= latest]
            num_due = len(due) + sum(last <= latest for last in self._running.values())
            needed = num_due - (latest - self.step) * self.size - self.further
            missing = needed - sum(number in chosen for number in due)
            picked = [number for number in due if number not in chosen][: max(0, missing)]
            if len(picked) < missing:
                return None
            chosen |= dict.fromkeys(picked)
        others = [number for number in self._finished if number not in chosen]
        others.sort(key=lambda number: self._finished[number] > self.step)  # first the ones surplus otherwise
        chosen |= dict.fromkeys(itertools.islice(others, self.size - len(chosen)))
        for number in chosen:
            del self._finished[number]
        self.step += 1
        self._leave_out()
        return sorted(chosen)

    def _leave_out(self) -> None:
        """Give up the groups too old for any later batch."""
        is_over = self.step == self.num_steps
        both = (self._running, self._finished)
        self.surplus = sorted(n for groups in both for n, last in groups.items() if is_over or last < self.step)
        for number in self.surplus:
            for groups in both:
                groups.pop(number, None)
