"""When tokens come, and for how long none came while weights were updated.

vLLM's output processor sees the tokens of every step, in both hosts; one reading of the clock a step is what it costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

_POLL_S = 5e-4
_LOOK_S = 1.0
_PATIENCE_S = 5.0
"""How long the answer to an update waits for the first token after it."""


class TokenClock:
    """Notes each step's tokens; the readings may come from another thread than the questions."""

    def __init__(self) -> None:
        self._last = 0.0
        self._longest = 0.0
        self._is_watching = False
        self.num_steps = 0
        """Steps that brought tokens, and others that the host knows of."""
        self.ignores_tokens = False
        """True during a flush, whose tokens were sampled earlier and do not show that vLLM makes steps."""

    def follow(self, processor: Any) -> None:
        """Have vLLM's output processor tell each step that brought a token."""
        process = processor.process_outputs

        def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.ignores_tokens and any(output.new_token_ids for output in outputs):
                self.tick()
            return process(outputs, *args, **kwargs)

        processor.process_outputs = process_outputs

    def tick(self) -> None:
        """Tokens have come, or requests whose tokens are now waited for."""
        now = time.perf_counter()
        if self._is_watching:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        self.num_steps += 1

    def begin(self) -> None:
        """An update begins while requests run; one that has begun goes on."""
        if not self._is_watching:
            self._longest, self._is_watching = 0.0, True

    async def end(self, is_busy: Callable[[], bool]) -> float:
        """The longest time without a token since `begin`, up to the first token from now on: so long did the update
        hold up the requests, or 0 when none ran. Where no token comes, the time until the last request ended, or until
        patience did."""
        if not self._is_watching:
            return 0.0
        resumed = time.perf_counter()
        await self.next(is_busy, _PATIENCE_S)
        self._is_watching = False
        if self._last >= resumed:
            return self._longest
        return max(self._longest, (time.perf_counter() if is_busy() else resumed) - self._last)

    async def next(self, is_busy: Callable[[], bool], patience_s: float) -> None:
        """Wait for a token from now on, while there is somebody to have it and patience lasts."""
        since = time.perf_counter()
        while self._last < since and is_busy() and time.perf_counter() < since + patience_s:
            await asyncio.sleep(_POLL_S)


class Stillness:
    """For how long no step was made while some should have been. Counted in looks, which are to be taken all the time:
    what this process does not live through, stopped or frozen with its container, is not counted."""

    def __init__(self, clock: TokenClock) -> None:
        self._clock = clock
        self._num_steps = 0
        self._looked = time.perf_counter()
        self._seconds = 0.0

    def lasts_s(self, is_computing: bool) -> float:
        """Until now."""
        now, is_still = time.perf_counter(), is_computing and self._clock.num_steps == self._num_steps
        self._seconds = self._seconds + min(now - self._looked, _LOOK_S) if is_still else 0.0
        self._looked, self._num_steps = now, self._clock.num_steps
        return self._seconds
