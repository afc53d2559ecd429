"""Interface of transports; one test suite checks every implementation.

Records are taken in the order in which they were put. A record occupies one of `capacity` places from `put` until
`ack`; `put` waits for a free place (back-pressure), and nothing is dropped. Every wait has a deadline, and the error
names the side that was waited for.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

from slipstream.errors import DeadlineError, SlipstreamError

Receipt = str
T = TypeVar("T")


class TransportClosed(SlipstreamError):
    """The transport was closed because of `reason`."""

    def __init__(self, reason: str) -> None:
        """`reason` is one sentence from the caller of `close`."""
        super().__init__(reason)
        self.reason = reason


class TransportLost(SlipstreamError):
    """The queue is gone with all its records: its folder was removed, or its server came back without its data. Opening
    the transport again makes an empty queue, for which the producer has to make again what was not acknowledged."""

    failure_class = "orchestrator"
    is_retriable = True


class RecordError(SlipstreamError):
    """A record in the queue cannot be read: it is damaged, of another type or of a newer Slipstream. It stays, as
    the next one to be taken."""

    failure_class = "orchestrator"


class Transport(Protocol[T]):
    """Both ends of a bounded queue. All methods may be called from any thread. The `_async` methods are for coroutines;
    one that ends with `CancelledError` has put or taken nothing."""

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
        """Acknowledges a record, also after `close`, and frees its place. False if the receipt is not valid, or
        no longer."""
        ...

    def __len__(self) -> int:
        """Number of occupied places."""
        ...

    def close(self, reason: str) -> None:
        """Ends every wait of both sides, current and later, with `TransportClosed(reason)`; the first reason is kept.
        Records that were not taken are not delivered: closing ends a run and does not drain it."""
        ...

    def remove(self) -> None:
        """Removes what the queue keeps outside of this process; neither side uses it any more."""
        ...


def check_timeout(timeout_s: float) -> float:
    """Returns the timeout; raises an error for one that would wait for ever."""
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise ValueError(f"timeout_s = {timeout_s} is no deadline: give a number of seconds")
    return timeout_s


class Sides:
    """The number of places, and the names of both sides in errors."""

    def __init__(self, capacity: int, producer: str, consumer: str) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity} lets nothing through: use at least 1")
        self._capacity = capacity
        self._producer = producer
        self._consumer = consumer

    def _put_deadline(self, timeout_s: float) -> DeadlineError:
        """The error of a `put` for which no place became free."""
        return DeadlineError(
            f"waited {timeout_s:g} s for {self._consumer}, which has not finished any of {self._capacity} "
            "records: see why it is slow or allow more time"
        )

    def _take_deadline(self, timeout_s: float) -> DeadlineError:
        """The error of a `take` for which no record came."""
        return DeadlineError(
            f"waited {timeout_s:g} s for {self._producer}, which has put nothing more: see why it is slow or allow "
            "more time"
        )
