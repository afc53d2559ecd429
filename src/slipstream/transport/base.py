"""The transport's contract, which one test suite holds for every implementation.

A record put is taken, in order, and taken again if it was not acknowledged. Back-pressure, never trimming: a
record occupies one of `capacity` places from `put` until `ack`, so that what a dead taker left can be taken
again, and `put` waits for a free place. Every wait has a deadline, and its failure names who was waited for.

Left to others: which process lives on which side, and what happens to a record that is taken twice.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

from slipstream.errors import SlipstreamError

Receipt = str
T = TypeVar("T")


class TransportClosed(SlipstreamError):
    """Nothing more is put or taken, because of `reason`."""

    def __init__(self, reason: str) -> None:
        """`reason` is one sentence from whoever closed the transport."""
        super().__init__(reason)
        self.reason = reason


class Transport(Protocol[T]):
    """Both ends of a bounded queue. All methods may be called from any thread.

    The `_async` methods do the same for a coroutine; one that is cancelled has put or taken nothing.
    """

    def put(self, record: T, timeout_s: float) -> None:
        """Hand over a record. Raises `DeadlineError` if no place becomes free, or `TransportClosed`."""
        ...

    def take(self, timeout_s: float) -> tuple[Receipt, T]:
        """The oldest record that is not taken. Raises `DeadlineError` if none comes, or `TransportClosed`."""
        ...

    async def put_async(self, record: T, timeout_s: float) -> None:
        """`put` without blocking the event loop."""
        ...

    async def take_async(self, timeout_s: float) -> tuple[Receipt, T]:
        """`take` without blocking the event loop."""
        ...

    def ack(self, receipt: Receipt) -> bool:
        """Declare a record done, also after `close`; its place becomes free.

        False when the receipt is not valid any more: acknowledged before, or its record was requeued.
        """
        ...

    def requeue(self) -> int:
        """Make all taken, unacknowledged records takable again, in their first order; returns how many.

        A taker that starts anew calls this once. Earlier receipts are no longer valid.
        """
        ...

    def close(self, reason: str) -> None:
        """End every wait of both sides, now and later, by `TransportClosed(reason)`; a first reason stays.

        Records that were not taken stay untaken: closing ends a run, it does not drain it.
        """
        ...


def check_timeout(timeout_s: float) -> float:
    """The timeout itself, unless it would mean waiting without end."""
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise ValueError(f"timeout_s = {timeout_s} is no deadline: give a number of seconds")
    return timeout_s
