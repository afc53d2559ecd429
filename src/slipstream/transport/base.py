"""Interface of transports; one test suite checks every implementation.

Records are taken in the order in which they were put, and again if they were not acknowledged. A record occupies one of
`capacity` places from `put` until `ack`, so that what a dead consumer held can be taken again; `put` waits for a free
place (back-pressure), and nothing is dropped. Every wait has a deadline, and the error names the side that was waited
for.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

from slipstream.errors import SlipstreamError

Receipt = str
T = TypeVar("T")


class TransportClosed(SlipstreamError):
    """The transport was closed because of `reason`."""

    def __init__(self, reason: str) -> None:
        """`reason` is one sentence from the caller of `close`."""
        super().__init__(reason)
        self.reason = reason


class Transport(Protocol[T]):
    """Both ends of a bounded queue. All methods may be called from any thread. The `_async` methods are for coroutines;
    a cancelled one has put or taken nothing."""

    def put(self, record: T, timeout_s: float) -> None:
        """Appends a record. Raises `DeadlineError` if no place becomes free, or `TransportClosed`."""
        ...

    def take(self, timeout_s: float) -> tuple[Receipt, T]:
        """Takes the oldest record that is not taken. Raises `DeadlineError` if none comes, or `TransportClosed`."""
        ...

    async def put_async(self, record: T, timeout_s: float) -> None:
        """`put` without blocking the event loop."""
        ...

    async def take_async(self, timeout_s: float) -> tuple[Receipt, T]:
        """`take` without blocking the event loop."""
        ...

    def ack(self, receipt: Receipt) -> bool:
        """Acknowledges a record, also after `close`, and frees its place. False if the receipt is no longer valid:
        already acknowledged, or its record was requeued."""
        ...

    def requeue(self) -> int:
        """Makes all taken, unacknowledged records available again, in their original order; returns how many. A
        restarted consumer calls it once. Earlier receipts become invalid."""
        ...

    def close(self, reason: str) -> None:
        """Ends every wait of both sides, current and later, with `TransportClosed(reason)`; the first reason is kept.
        Records that were not taken are not delivered: closing ends a run and does not drain it."""
        ...


def check_timeout(timeout_s: float) -> float:
    """Returns the timeout; raises an error for one that would wait for ever."""
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise ValueError(f"timeout_s = {timeout_s} is no deadline: give a number of seconds")
    return timeout_s
