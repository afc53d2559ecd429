"""What transports between processes have in common: records as bytes, and waits that ask again.

A record is MessagePack in an envelope with a schema number and a checksum; nothing that is read is executed. Rollouts
that keep their bytes (`records.encode_kept`) are not encoded again. Tokens are plain MessagePack lists: 5,000 rollouts
of 512 tokens take 0.1 s to encode and 0.5 s to decode on one core, against 0.1 and 0.2 s as raw arrays, and their bytes
differ by less than a tenth.

A wait repeats an attempt that does not wait itself, after 1 ms and then less and less often, down to every 20 ms. The
`_async` methods make their attempts in threads, as an attempt writes files or asks a server.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar
from zlib import crc32

import msgspec

from slipstream.errors import DeadlineError
from slipstream.records import decode, encode_kept
from slipstream.transport.base import Receipt, RecordError, Sides, check_timeout

T = TypeVar("T")
Answer = TypeVar("Answer")

_SCHEMA = 1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_LONGEST_PAUSE_UNREACHABLE_S = 0.5
_PAUSE_GROWTH = 1.5
_CALL_S = 30.0
"""Deadline of calls that wait for nothing but the place where the queue is."""
_NUM_THREADS = 4


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A record with what surrounds it. `checksum` is the CRC-32 of `body`."""

    schema: int
    checksum: int
    body: bytes


class Unreachable(Exception):
    """An attempt could not be made, or its result is unknown; the same attempt may be made again. The message says who
    did not answer and why."""


class TransportAway(DeadlineError):
    """What carries the records did not answer for as long as the call could wait. They may still be there."""

    failure_class = "orchestrator"


class PolledTransport(Sides, ABC, Generic[T]):
    """The parts of a `Transport` that wait, on top of attempts that do not."""

    def __init__(self, kind: type[T], capacity: int, producer: str, consumer: str) -> None:
        """`kind` is the type of the records, `capacity` their number from `put` to `ack`; `producer` and `consumer`
        are the sides' names in errors."""
        super().__init__(capacity, producer, consumer)
        self._kind = kind
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="transport")

    @abstractmethod
    def _putting(self, envelope: Envelope) -> Callable[[], bool | None]:
        """One call's attempts to put: None while there is no place."""

    @abstractmethod
    def _try_take(self) -> tuple[Receipt, bytes] | None:
        """Takes an envelope as MessagePack; None while the queue is empty."""

    @abstractmethod
    def _give_back(self, receipt: Receipt) -> None:
        """Makes a taken record the next one to be taken; does nothing if the receipt is no longer valid."""

    def put(self, record: T, timeout_s: float) -> None:
        """See `Transport.put`."""
        deadline = _deadline(timeout_s)
        if self._wait(self._putting(_wrap(record)), deadline) is None:
            raise self._put_deadline(timeout_s)

    def take(self, timeout_s: float) -> tuple[Receipt, T]:
        """See `Transport.take`; raises `RecordError` for a record that cannot be read."""
        if (taken := self._wait(self._try_take, _deadline(timeout_s))) is None:
            raise self._take_deadline(timeout_s)
        return self._opened(*taken)

    async def put_async(self, record: T, timeout_s: float) -> None:
        """See `Transport.put_async`. If the record has already been put when a cancellation comes, it returns, and the
        task is cancelled where it next waits."""
        deadline = _deadline(timeout_s)
        envelope, is_cancelled = await self._in_thread(lambda: _wrap(record))
        if is_cancelled:
            raise asyncio.CancelledError
        done, is_cancelled = await self._wait_async(self._putting(envelope), deadline)
        if done is None and is_cancelled:
            raise asyncio.CancelledError
        if done is None:
            raise self._put_deadline(timeout_s)
        if is_cancelled:
            _cancel_later()

    async def take_async(self, timeout_s: float) -> tuple[Receipt, T]:
        """See `Transport.take_async`; raises `RecordError` for a record that cannot be read."""
        taken, is_cancelled = await self._wait_async(self._try_take, _deadline(timeout_s))
        if taken is None:
            raise asyncio.CancelledError if is_cancelled else self._take_deadline(timeout_s)
        if not is_cancelled:
            opened, is_cancelled = await self._in_thread(lambda: self._opened(*taken))
            if not is_cancelled:
                return opened
        await self._in_thread(lambda: self._give_back(taken[0]))
        raise asyncio.CancelledError

    def _opened(self, receipt: Receipt, data: bytes) -> tuple[Receipt, T]:
        try:
            return receipt, _unwrap(data, self._kind)
        except RecordError:
            self._give_back(receipt)
            raise

    def _call(self, attempt: Callable[[], Answer | None], timeout_s: float = _CALL_S) -> Answer:
        """The answer of a call that waits only while the place of the queue cannot be reached."""
        answer = self._wait(attempt, _deadline(timeout_s))
        assert answer is not None
        return answer

    def _wait(self, attempt: Callable[[], Answer | None], deadline: float) -> Answer | None:
        """The answer of the first attempt that has one; None at the deadline."""
        attempts = _Attempts(attempt, deadline)
        while (answer := attempts.make()) is None and (pause_s := attempts.pause_s()) is not None:
            time.sleep(pause_s)
        return answer

    async def _wait_async(self, attempt: Callable[[], Answer | None], deadline: float) -> tuple[Answer | None, bool]:
        """`_wait`, and whether the task was cancelled during the last attempt."""
        attempts = _Attempts(attempt, deadline)
        while True:
            answer, is_cancelled = await self._in_thread(attempts.make)
            if answer is not None or is_cancelled or (pause_s := attempts.pause_s()) is None:
                return answer, is_cancelled
            await asyncio.sleep(pause_s)

    async def _in_thread(self, call: Callable[[], Answer]) -> tuple[Answer, bool]:
        """The result of a short call in a thread, always waited for, and whether the task was cancelled meanwhile."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        is_cancelled = False
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled and future.exception() is not None:
            raise asyncio.CancelledError
        return future.result(), is_cancelled


class _Attempts(Generic[Answer]):
    """The attempts of one call until its deadline, and the pauses between them."""

    def __init__(self, attempt: Callable[[], Answer | None], deadline: float) -> None:
        self._attempt = attempt
        self._deadline = deadline
        self._pause_s = _FIRST_PAUSE_S
        self._unreachable: Unreachable | None = None

    def make(self) -> Answer | None:
        """The result of the next attempt: None if there is no answer yet."""
        self._unreachable = None
        try:
            return self._attempt()
        except Unreachable as error:
            self._unreachable = error
            return None

    def pause_s(self) -> float | None:
        """Seconds until the next attempt; None at the deadline, which is a `DeadlineError` where nobody answers."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 and self._unreachable is not None:
            raise TransportAway(str(self._unreachable)) from self._unreachable
        if left_s <= 0:
            return None
        pause_s = min(self._pause_s, left_s)
        longest_s = _LONGEST_PAUSE_S if self._unreachable is None else _LONGEST_PAUSE_UNREACHABLE_S
        self._pause_s = min(self._pause_s * _PAUSE_GROWTH, longest_s)
        return pause_s


def _wrap(record: Any) -> Envelope:
    body = encode_kept(record)
    return Envelope(_SCHEMA, crc32(body), body)


def _unwrap(data: bytes, kind: type[T]) -> T:
    try:
        envelope = msgspec.msgpack.decode(data, type=Envelope)
        if envelope.schema != _SCHEMA:
            raise RecordError(
                f"a record in the queue has schema {envelope.schema}, and this Slipstream reads {_SCHEMA}: "
                "use the same version on both sides"
            )
        if crc32(envelope.body) != envelope.checksum:
            raise RecordError("a record in the queue is damaged (its checksum differs): check the disk or network")
        return decode(envelope.body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise RecordError(
            f"a record in the queue is no {name} of this Slipstream ({error}): use the same version on both sides, and "
            "let nothing else write there"
        ) from error


def _deadline(timeout_s: float) -> float:
    return time.monotonic() + check_timeout(timeout_s)


def _cancel_later() -> None:
    """Cancels the current task where it next waits, unless whoever had cancelled it has taken that back by then, as
    `asyncio.timeout` does at its end."""
    task = asyncio.current_task()

    def cancel() -> None:
        if task is not None and not task.done() and task.cancelling():
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(cancel)
