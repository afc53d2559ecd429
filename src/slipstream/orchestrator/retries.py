"""Further tries of a rollout's request that the engine gave up: which, when, and how many.

A request that the engine did not begin or whose answer it withheld (`refused`), that passed its deadline (`late`), or
that vLLM dropped (`aborted`) is made again, with the same seed, after a wait that doubles. One that the engine refuses
for good (`invalid`) is not, and neither is one that ended with its engine: `retry_on_restart` sees to that, within one
try. Guarantees: no try begins after the budget or after `most` further tries; waits depend on the request alone.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slipstream.records import Completion

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Upper bounds of the wait before the first further try, doubled for each one after it, and of all waits. A wait is
between half of its bound and all of it."""
BUDGET = 2.0
"""Of the time that one request may take: a try begins within so many of them, counted from the first one's begin, so
that a request that is late each time has two tries and not six."""
_clock = time.monotonic
_RETRIED = frozenset({"aborted", "refused", "late"})


def wait_s(name: str, number: int) -> float:
    """Seconds before further try `number`, from 1, of the request `name`: always the same, and spread over requests, so
    that those that failed together do not come back together."""
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
    """Adds up metrics: each further try by its reason, and each request that has used its tries, or the time."""

    async def until_answered(self, name: str, attempt: Callable[[], Awaitable[Completion]]) -> tuple[Completion, int]:
        """Await `attempt` until it gives an answer, or one that is final; returns that, and the number of tries. `name`
        is the request's, the same in each run. What `attempt` raises is raised."""
        began, tries = _clock(), 0
        while True:
            completion = await attempt()
            tries += 1
            if completion.finish_reason != "abort" or completion.cause not in _RETRIED or not self.most:
                return completion, tries
            seconds = wait_s(name, tries)
            if tries > self.most or _clock() + seconds - began > self.budget_s:
                self.count({"retry/exhausted": 1.0})
                return completion, tries
            self.count({f"retry/{completion.cause}": 1.0})
            await asyncio.sleep(seconds)
