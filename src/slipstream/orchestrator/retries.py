"""Further tries of a rollout's request after the engine gave it up: the causes, times and number.

A request is made again, with the same seed, after a wait (doubled each time), for three causes. The engine did not
begin it or withheld its answer (`refused`), it passed its deadline (`late`), or vLLM dropped it (`aborted`). A request
refused for good (`invalid`) is not made again. Nor is one after its engine's end: `retry_on_restart` repeats it, within
one try. Guarantees: no try begins after the budget or after `most` further tries; waits depend on the request alone.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slipstream.records import Completion

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Upper bounds of the wait before the first further try, doubled for each one after it, and of all waits. A wait is
between half of its bound and all of it."""
BUDGET = 2.0
"""Multiple of the time limit of one request: a try begins within it, counted from the first one's begin. So a request
late each time has two tries and not six."""
_clock = time.monotonic
_RETRIED = frozenset({"aborted", "refused", "late"})


def wait_s(name: str, number: int) -> float:
    """Seconds before further try `number`, from 1, of the request `name`: always the same, and spread over requests.
    So requests failed together do not come back together."""
    bound = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(number - 1, 60))
    return bound * (0.5 + 0.5 * zlib.crc32(f"{name} {number}".encode()) / 2**32)


@dataclass(frozen=True)
class Retries:
    """How often the requests of a run are tried again."""

    most: int = 0
    """Further tries of each request."""
    budget_s: float = 0.0
    """No try begins later than so many seconds after the first."""
    count: Callable[[dict[str, float]], None] = lambda values: None
    """Adds up metrics: each further try by its reason, and each request at the end of its tries, or the time."""

    async def until_answered(
        self,
        name: str,
        attempt: Callable[[], Awaitable[Completion]],
        went_on: Callable[[], float] = lambda: -math.inf,
    ) -> tuple[Completion, int]:
        """Await `attempt` until it gives an answer, or a final failure; returns this, and the number of tries. `name`
        is the request's, the same in each run. `went_on`: when the engine, paused with its requests, went on last.
        Exceptions of `attempt` are raised."""
        began, tries = _clock(), 0
        while True:
            completion = await attempt()
            tries += 1
            if completion.finish_reason != "abort" or completion.cause not in _RETRIED or not self.most:
                return completion, tries
            seconds = wait_s(name, tries)
            if tries > self.most or _clock() + seconds - max(began, went_on()) > self.budget_s:
                self.count({"retry/exhausted": 1.0})
                return completion, tries
            self.count({f"retry/{completion.cause}": 1.0})
            await asyncio.sleep(seconds)
