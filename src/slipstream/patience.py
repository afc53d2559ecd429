"""A timeout for an event loop that counts only the time in which the loop was running; and whether a task is cancelled.

While the process was stopped (SIGSTOP, a debugger) or its loop was blocked by a synchronous call, it could not have
received what it waits for: that time is no evidence against the other side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

_TICK_S = 1.0
_LATE_S = 1.0
"""A tick that comes this much too late shows that the loop was blocked."""
_LEAST_S = 1e-3


_lasting: WeakSet[asyncio.Task[Any]] = WeakSet()


def lasting(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that `passing_tasks` leaves out: at the end of a run it is still needed to close something, and ends with
    that."""
    task = asyncio.create_task(work)
    _lasting.add(task)
    return task


def passing_tasks() -> list[asyncio.Task[Any]]:
    """The event loop's tasks that are cancelled at the end of a run: all others but `lasting` ones."""
    current = asyncio.current_task()
    return [task for task in asyncio.all_tasks() if task is not current and task not in _lasting]


def is_cancelled() -> bool:
    """Whether the current task itself is being cancelled. If not, a `CancelledError` is that of something it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Patience:
    """Async context manager: raises `TimeoutError` in the block after `limit_s` seconds in which the loop was running
    and `is_counting` was true; both are checked once a second. Waits for ever if there is no limit. `paused` stops the
    clock."""

    def __init__(self, limit_s: float | None, is_counting: Callable[[], bool] = lambda: True) -> None:
        self._limit_s = limit_s
        self._is_counting = is_counting
        self._timeout = asyncio.timeout(None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks: _Ticks | None = None
        """Those that look at it, while it needs no timer of its own."""
        self._left_s = self._since = self._due = 0.0
        self._num_paused = 0
        self._restarted: asyncio.Event | None = None  # few wait for it

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self.restart()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ticks is not None:
            self._ticks.waiting.discard(self)
        await self._timeout.__aexit__(*raised)

    @property
    def expired(self) -> bool:
        """Whether the `TimeoutError` is its own."""
        return self._timeout.expired()

    def restart(self) -> None:
        """Restarts the timeout after a sign of life."""
        if self._limit_s is None or self._loop is None or self._timeout.expired():
            return
        self._left_s, self._since = self._limit_s, self._loop.time()
        if self._restarted is not None:
            self._restarted.set()
        if self._timer is None and self._ticks is None:
            self._arm(self._loop)

    async def restarted(self) -> None:
        """Waits for the next sign of life."""
        if self._restarted is None:
            self._restarted = asyncio.Event()
        self._restarted.clear()
        await self._restarted.wait()

    def end(self) -> None:
        """Raises the `TimeoutError` now."""
        if self._loop is not None and not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())

    def paused(self) -> _Paused:
        """A context manager: stops the clock inside, and restarts it from zero afterwards."""
        return _Paused(self)

    def pause(self) -> None:
        """Stops the clock, until `go_on` was called as often."""
        self._num_paused += 1

    def go_on(self) -> None:
        """Restarts it from zero."""
        self._num_paused -= 1
        self.restart()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = self._since + min(self._left_s, _TICK_S)
        if self._left_s > _TICK_S:
            if self._ticks is None:
                self._ticks = _ticks_of(loop)
                self._ticks.add(self, loop)
            return
        if self._ticks is not None:
            self._ticks.waiting.discard(self)
            self._ticks = None
        self._timer = loop.call_at(self._due, self.tick, loop)

    def tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks at the clock."""
        now = loop.time()
        seconds = now - self._since
        if now > self._due + _LATE_S:  # count half, so that a loop that is always late still times out
            seconds = max(0.0, self._due - self._since) / 2
        if not self._num_paused and self._is_counting():
            self._left_s -= seconds
        self._since = now
        if self._left_s > _LEAST_S:
            self._arm(loop)
        else:
            self._timeout.reschedule(now)


class _Paused:
    """See `Patience.paused`. Thousands wait at once, and an object of a generator's has four more."""

    __slots__ = ("_patience",)

    def __init__(self, patience: Patience) -> None:
        self._patience = patience

    def __enter__(self) -> None:
        self._patience.pause()

    def __exit__(self, *raised: object) -> None:
        self._patience.go_on()


class _Ticks:
    """Looks once a second at the deadlines of an event loop that are further away, which need no timers then."""

    def __init__(self) -> None:
        self.waiting: set[Patience] = set()
        self._is_ticking = False

    def add(self, patience: Patience, loop: asyncio.AbstractEventLoop) -> None:
        """One more to look at."""
        self.waiting.add(patience)
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        for patience in [*self.waiting]:
            patience.tick(loop)
        self._is_ticking = bool(self.waiting)
        if self._is_ticking:
            loop.call_later(_TICK_S, self._tick, loop)


_all_ticks: WeakKeyDictionary[asyncio.AbstractEventLoop, _Ticks] = WeakKeyDictionary()


def _ticks_of(loop: asyncio.AbstractEventLoop) -> _Ticks:
    found = _all_ticks.get(loop)
    if found is None:
        found = _all_ticks[loop] = _Ticks()
    return found
