"""Measures the times of tokens from vLLM's steps, and the time without any during a weight update.

`TokenClock` wraps vLLM's `OutputProcessor.process_outputs`: it sees every step in both hosts. It reads the time once
a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from slipstream.processes import heartbeat

_POLL_S = 5e-4
_LOOK_S = 1.0
_FIRST_TOKEN_S = 5.0
"""How long an update waits for the first token after it."""


class TokenClock:
    """Records the times of steps with tokens; may be written in one thread and read in another."""

    def __init__(self) -> None:
        self._last = 0.0
        self._longest = 0.0
        self.is_watching = False
        self.num_steps = 0
        """Steps with tokens, and other steps counted by the host."""
        self.ignores_tokens = False
        """True during a flush: its tokens were sampled earlier and are no sign of steps."""

    def follow(self, processor: Any) -> None:
        """Wrap vLLM's output processor: every step with tokens ticks."""
        process = processor.process_outputs

        def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.ignores_tokens and any(output.new_token_ids for output in outputs):
                self.tick()
            return process(outputs, *args, **kwargs)

        processor.process_outputs = process_outputs

    def tick(self) -> None:
        """Tokens have come, or the first requests after an idle time."""
        now = time.perf_counter()
        if self.is_watching:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        self.num_steps += 1
        heartbeat.progress()

    def begin(self) -> None:
        """Begin to measure a stall, at the start of an update with running requests."""
        if not self.is_watching:
            self._longest, self.is_watching = 0.0, True

    async def end(self, is_busy: Callable[[], bool]) -> float:
        """Seconds of the requests' stall by the update: the longest time without a token from `begin` to the first
        token after this call; 0 when none ran. If no token comes, the time until the last request ended, or
        `_FIRST_TOKEN_S`."""
        if not self.is_watching:
            return 0.0
        resumed = time.perf_counter()
        await self.next(is_busy, _FIRST_TOKEN_S)
        self.is_watching = False
        if self._last >= resumed:
            return self._longest
        return max(self._longest, (time.perf_counter() if is_busy() else resumed) - self._last)

    async def next(self, is_busy: Callable[[], bool], timeout_s: float) -> None:
        """Wait for the next token, while `is_busy` and at most `timeout_s`."""
        since = time.perf_counter()
        while self._last < since and is_busy() and time.perf_counter() < since + timeout_s:
            await asyncio.sleep(_POLL_S)


class Stillness:
    """Measures the time without a step of vLLM despite requests. Counts at most `_LOOK_S` between two calls:
    the time of a stop of this process (SIGSTOP, a frozen container) does not count."""

    def __init__(self, clock: TokenClock) -> None:
        self._clock = clock
        self._num_steps = 0
        self._looked = time.perf_counter()
        self._seconds = 0.0

    def lasts_s(self, is_computing: bool) -> float:
        """Seconds without a step until this call; 0 while not `is_computing`."""
        now, is_still = time.perf_counter(), is_computing and self._clock.num_steps == self._num_steps
        self._seconds = self._seconds + min(now - self._looked, _LOOK_S) if is_still else 0.0
        self._looked, self._num_steps = now, self._clock.num_steps
        return self._seconds
