"""Groups from programs outside of the run: a second source of finished groups, beside `rollouts.py`.

Nobody outside knows versions. A group gets the engine's version at its arrival. Its tokens are no newer, and older by
the updates during their sampling.

Guarantees: a group is handed out once, or dropped with a reason; a wait ends after `patience_s` without any group.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.errors import EnvironmentFault
from slipstream.records import Rollout, Version, VersionSpan


@dataclass(frozen=True)
class Arrival:
    """A group."""

    rollouts: list[Rollout]
    step: int
    """Its version's."""
    maker: int | None
    """Number of its environment."""


class Arrivals:
    """Hands groups out in the order of their arrival. All methods belong to one event loop."""

    def __init__(
        self,
        version: Callable[[], Version | None],
        *,
        capacity: int,
        patience_s: float,
        whom: str,
        on_drop: Callable[[str, Sequence[Rollout]], None] = lambda reason, rollouts: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version`: the engine's. `capacity`: most groups ahead of training. `whom`: for the error, the senders and
        the remedy."""
        self.capacity = capacity
        self.num_arrived = 0
        """Any thread may read it."""
        self._version, self._patience_s, self._whom = version, patience_s, whom
        self._on_drop, self._clock = on_drop, clock
        self._pending: deque[Arrival] = deque()
        self._waiting: deque[asyncio.Future[Arrival]] = deque()
        self._given: deque[Arrival] = deque(maxlen=capacity)
        self._last = clock()

    @property
    def num_wanted(self) -> int:
        """Groups that the run waits for."""
        return sum(not future.done() for future in self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether more groups would only take memory."""
        return len(self._pending) >= 8 * self.capacity

    @property
    def held(self) -> list[Arrival]:
        """The groups ahead of training: waiting ones, and the last ones handed out. The run waits for no other group in
        their places."""
        given = max(0, self.capacity - self.num_wanted)
        return [*itertools.islice(reversed(self._given), given), *self._pending]

    @property
    def num_held(self) -> int:
        """Their number, and that of places without room."""
        return max(0, self.capacity - self.num_wanted) + len(self._pending)

    def offer(self, rollouts: Sequence[Rollout], maker: int | None = None) -> None:
        """A group has arrived."""
        version = self._version()
        assert version is not None, "nobody is asked for groups before the first version"
        for rollout in rollouts:
            for sequence in rollout.sequences:
                start = sequence.mask.index(True) if any(sequence.mask) else 0
                sequence.versions = [VersionSpan(start, version.name)]
        arrival = Arrival(list(rollouts), version.step, maker)
        self.num_arrived += 1
        self._last = self._clock()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(arrival)
                return
        self._pending.append(arrival)

    def wait_anew(self) -> None:
        """Groups could not come so far: `patience_s` begins again."""
        self._last = self._clock()

    def take_now(self, is_in_time: Callable[[int], bool]) -> Arrival | None:
        """The oldest group in time, by its step; older ones are dropped."""
        while self._pending:
            arrival = self._pending.popleft()
            if is_in_time(arrival.step):
                self._given.append(arrival)
                return arrival
            self._on_drop("stale", arrival.rollouts)
        return None

    async def take(self) -> Arrival:
        """The next group. Raises `EnvironmentFault` if none comes."""
        if (arrival := self.take_now(lambda step: True)) is not None:
            return arrival
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        began = self._clock()
        try:
            while not future.done():
                left = max(began, self._last) + self._patience_s - self._clock()
                if left <= 0:
                    raise EnvironmentFault(
                        f"no group of rollouts came for {self._patience_s:g} s (environment.run_timeout_s) {self._whom}"
                    )
                await asyncio.wait([future], timeout=left)
            self._given.append(future.result())
            return future.result()
        except asyncio.CancelledError:
            if future.done():
                self._pending.appendleft(future.result())
            raise
        finally:
            future.cancel()
