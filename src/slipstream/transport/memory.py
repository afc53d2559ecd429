"""The transport within one process, between the orchestrator's event loop and the trainer's thread.

Nothing survives the process; records are passed without a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from slipstream.transport.base import Receipt, Sides, TransportClosed, check_timeout

T = TypeVar("T")
Answer = TypeVar("Answer")


class MemoryTransport(Sides, Generic[T]):
    """A bounded queue with acknowledgements; `producer` and `consumer` are their names in errors."""

    def __init__(self, capacity: int, producer: str = "the orchestrator", consumer: str = "the trainer") -> None:
        """`capacity` counts records from `put` to `ack`."""
        super().__init__(capacity, producer, consumer)
        self._waiting: deque[T] = deque()
        self._taken: set[Receipt] = set()
        self._num_takes = 0
        self._reason: str | None = None
        self._changed = threading.Condition()
        self._listeners: set[Callable[[], None]] = set()

    def put(self, record: T, timeout_s: float) -> None:
        """See `Transport.put`."""
        if self._wait(lambda: self._try_put(record), timeout_s) is None:
            raise self._put_deadline(timeout_s)

    def take(self, timeout_s: float) -> tuple[Receipt, T]:
        """See `Transport.take`."""
        if (taken := self._wait(self._try_take, timeout_s)) is None:
            raise self._take_deadline(timeout_s)
        return taken

    async def put_async(self, record: T, timeout_s: float) -> None:
        """See `Transport.put_async`."""
        if await self._wait_async(lambda: self._try_put(record), timeout_s) is None:
            raise self._put_deadline(timeout_s)

    async def take_async(self, timeout_s: float) -> tuple[Receipt, T]:
        """See `Transport.take_async`."""
        if (taken := await self._wait_async(self._try_take, timeout_s)) is None:
            raise self._take_deadline(timeout_s)
        return taken

    def ack(self, receipt: Receipt) -> bool:
        """See `Transport.ack`."""
        with self._changing():
            is_valid = receipt in self._taken
            self._taken.discard(receipt)
            return is_valid

    def close(self, reason: str) -> None:
        """See `Transport.close`."""
        with self._changing():
            self._reason = reason if self._reason is None else self._reason

    def remove(self) -> None:
        """See `Transport.remove`: there is nothing."""

    def __len__(self) -> int:
        """Number of occupied places."""
        with self._changed:
            return len(self._waiting) + len(self._taken)

    def _try_put(self, record: T) -> bool | None:
        with self._changing():
            self._refuse_closed()
            if len(self) >= self._capacity:
                return None
            self._waiting.append(record)
            return True

    def _try_take(self) -> tuple[Receipt, T] | None:
        with self._changing():
            self._refuse_closed()
            if not self._waiting:
                return None
            self._num_takes += 1
            receipt = str(self._num_takes)
            self._taken.add(receipt)
            return receipt, self._waiting.popleft()

    def _wait(self, attempt: Callable[[], Answer | None], timeout_s: float) -> Answer | None:
        """The result of `attempt` once it succeeds; None at the deadline."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        with self._changed:
            while (answer := attempt()) is None and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
        return answer

    async def _wait_async(self, attempt: Callable[[], Answer | None], timeout_s: float) -> Answer | None:
        deadline = time.monotonic() + check_timeout(timeout_s)
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so no task waits there
                loop.call_soon_threadsafe(woken.set)

        with self._changed:
            self._listeners.add(wake)
        try:
            # No await between an attempt that succeeds and the return: a cancellation cannot lose the record.
            while (answer := attempt()) is None and (left_s := deadline - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), left_s)
                woken.clear()
            return answer
        finally:
            with self._changed:
                self._listeners.discard(wake)

    @contextlib.contextmanager
    def _changing(self) -> Generator[None]:
        """Context manager: holds the lock and notifies all waiters of a change."""
        with self._changed:
            before = (len(self._waiting), len(self._taken), self._reason)
            yield
            if before != (len(self._waiting), len(self._taken), self._reason):
                self._changed.notify_all()
                for listener in self._listeners:
                    listener()

    def _refuse_closed(self) -> None:
        if self._reason is not None:
            raise TransportClosed(self._reason)
