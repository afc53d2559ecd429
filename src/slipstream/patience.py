"""Deadlines of an event loop that count only the time for which it turned.

A process that was stopped and goes on (SIGSTOP, a debugger), or whose loop was held up by somebody's synchronous call,
could not have heard what it waits for: that time says nothing about whoever is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

_TICK_S = 1.0
_LATE_S = 1.0
"""A tick that comes so much too late shows that the loop did not turn."""
_LEAST_S = 1e-3


class Patience:
    """`async with` it: raises `TimeoutError` in the block once `limit_s` have passed for which the loop turned and
    `is_counting` was true; both are looked at once a second. Without a limit it waits for ever."""

    def __init__(self, limit_s: float | None, is_counting: Callable[[], bool] = lambda: True) -> None:
        self._limit_s = limit_s
        self._is_counting = is_counting
        self._timeout = asyncio.timeout(None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left_s = self._since = self._due = 0.0
        self._restarted = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self.restart()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(*raised)

    def restart(self) -> None:
        """Begin anew: there was a sign of life."""
        if self._limit_s is None or self._loop is None or self._timeout.expired():
            return
        self._left_s, self._since = self._limit_s, self._loop.time()
        self._restarted.set()
        if self._timer is None:
            self._arm(self._loop)

    async def restarted(self) -> None:
        """Wait for the next sign of life."""
        self._restarted.clear()
        await self._restarted.wait()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = self._since + min(self._left_s, _TICK_S)
        self._timer = loop.call_at(self._due, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        seconds = now - self._since
        if now > self._due + _LATE_S:  # half of what was due, so that a loop which is always late has an end, too
            seconds = max(0.0, self._due - self._since) / 2
        if self._is_counting():
            self._left_s -= seconds
        self._since = now
        if self._left_s > _LEAST_S:
            self._arm(loop)
        else:
            self._timeout.reschedule(now)
