"""Commands to a generating side in another process, over transports: `RemoteCaller` there, `serve` here.

Requests go one way, and messages the other: replies and notices (events, warnings, progress). The trainer's process
writes the notices: it owns the run folder. Guarantees: a command is answered once. Notices come in order, and before
the reply after them. When the other side ends, every open command fails and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from slipstream.errors import DeadlineError, OrchestratorError, SlipstreamError, named_error
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.executor import Executor
from slipstream.orchestrator.control.handle import Caller
from slipstream.orchestrator.thread import POLL_S
from slipstream.processes import heartbeat
from slipstream.records import without_surrogates
from slipstream.transport import Transport, TransportAway, TransportClosed, TransportLost, Unreachable

_SILENCE_S = 60.0
"""How long the other side may give no sign of life, or the place of the queues be out of reach."""
_LONGEST_POLL_S = 15.0
"""Upper bound of a poll's time at an unresponsive server."""
_BEAT_S = 2.0
_CANCEL_S = 15.0
"""How long cancelled work may take to end."""
_NOTICE_S = 0.05
"""How long a notice waits for others, to be sent together."""
_STATE_S = 15.0
_SERVING = "serving the trainer"
"""Heartbeat text of a serving process; each end of a turn or rollout is its progress."""
PLACES = 1024
"""Capacity of the two transports."""


class Request(msgspec.Struct, frozen=True):
    """A command; without one, a cancellation of the request `number`."""

    number: int
    command: commands.AnyCommand | None


class Failure(msgspec.Struct, frozen=True):
    """The error of a failed command. `kind`: the name of an error of `slipstream.errors`, or of a bug."""

    kind: str
    text: str


class Event(msgspec.Struct, frozen=True, tag=True):
    """An event for the log; a warning if `kind` is `warning`."""

    kind: str
    fields: dict[str, Any]


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """A call of `Progress`."""

    method: str
    arguments: list[Any]


class Counted(msgspec.Struct, frozen=True, tag=True):
    """Numbers to add up in the next row of metrics."""

    values: dict[str, float]


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """A rollout to be kept for people to read."""

    fields: dict[str, Any]


Notice = Event | Progressed | Counted | Sampled


class Reply(msgspec.Struct, frozen=True):
    """The answer to a request, or its failure."""

    number: int
    answer: commands.AnyAnswer | None
    failure: Failure | None = None


class Message(msgspec.Struct, frozen=True):
    """Notices since the last message and, after them, a reply."""

    notices: list[Notice]
    num_ended: int | None
    """Ended turns and rollouts; None in a sign of life (`Beats`)."""
    reply: Reply | None = None


class RemoteCaller(Caller):
    """Sends commands to a process in `serve`, and hears its messages in a thread of its own."""

    def __init__(
        self,
        requests: Transport[Request],
        messages: Transport[Message],
        *,
        on_notice: Callable[[Notice], None],
        ended: Callable[[], SlipstreamError | None],
        silent: Callable[[float], SlipstreamError],
        should_stop: Callable[[], bool],
    ) -> None:
        """`on_notice` is called in order. `ended`: why the other side has ended; None while it lives. `silent` ends it
        after the given seconds of silence, and returns the run's error."""
        super().__init__(should_stop)
        self._silent = silent
        self._requests = requests
        self._messages = messages
        self._on_notice = on_notice
        self._ended = ended
        self._guard = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, Future[commands.AnyAnswer]] = {}
        self._outgoing: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._num_ended = 0
        self._closed = threading.Event()
        names = (("orchestrator", self._listen), ("commands", self._send))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in names]
        for thread in self._threads:
            thread.start()

    def submit(self, command: commands.AnyCommand) -> Future[commands.AnyAnswer]:
        """See `Caller`."""
        number, future = next(self._numbers), Future[commands.AnyAnswer]()
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        with self._guard:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._open[number] = future
        self._outgoing.put(Request(number, command))
        return future

    def _cancel(self, number: int) -> None:
        self._outgoing.put(Request(number, None))

    def _send(self) -> None:
        """Send submitted requests, in a thread of its own: no other thread waits for a silent server."""
        request: Request | None = None
        while not self._closed.is_set():
            try:
                request = request or self._outgoing.get(timeout=POLL_S)
                self._requests.put(request, POLL_S)
                request = None
            except (queue.Empty, DeadlineError):
                continue  # the other thread notices silence
            except Exception as error:  # noqa: BLE001 (open commands fail with it)
                self._fail(error)
                return

    def activity(self) -> int:
        """See `Caller`."""
        return self._num_ended

    def engine_state(self, *, settles: bool) -> commands.EngineState:
        """See `Caller`."""
        waits_for = "the orchestrator to say whether the engine runs"
        try:
            return self.call(commands.AskState(settles), commands.EngineState, _STATE_S, waits_for, may_stop=False)
        except Exception:  # noqa: BLE001 (the engine ended with the orchestrator, or nobody can say)
            is_lost = isinstance(self._failure, OrchestratorError | TransportLost)
            return commands.EngineState(is_up=not is_lost, is_in_memory_only=is_lost)

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * POLL_S)

    def _listen(self) -> None:
        silence_s = away_s = 0.0
        is_last = False
        try:
            while not self._closed.is_set():
                began = time.monotonic()
                try:
                    receipt, message = self._messages.take(POLL_S)
                except DeadlineError as error:
                    if (why := self._ended()) is not None:
                        if is_last:
                            raise why from None
                        is_last = True  # its last messages may have come since
                        continue
                    # Time of a stop of this process itself does not count.
                    waited_s = min(time.monotonic() - began, _LONGEST_POLL_S)
                    if isinstance(error.__cause__, Unreachable):
                        away_s += waited_s
                    else:
                        silence_s += waited_s
                    if away_s >= _SILENCE_S:
                        raise TransportAway(f"nothing was heard for {_SILENCE_S:g} s: {error}") from None
                    if silence_s >= _SILENCE_S:
                        raise self._silent(_SILENCE_S) from None
                    continue
                silence_s = away_s = 0.0
                self._hear(message)
                self._messages.ack(receipt)
        except Exception as error:  # noqa: BLE001 (open commands fail with it)
            self._fail(error)

    def _hear(self, message: Message) -> None:
        for notice in message.notices:
            self._on_notice(notice)
        if message.num_ended is not None:
            self._num_ended = message.num_ended
        if (reply := message.reply) is None:
            return
        with self._guard:
            future = self._open.pop(reply.number, None)
        if future is None:  # it was cancelled
            return
        with contextlib.suppress(InvalidStateError):
            if reply.failure is not None:
                kind, text = reply.failure.kind, reply.failure.text
                unnamed = f"{kind}: {text} (in the orchestrator, see logs/orchestrator*.log)"
                future.set_exception(named_error(kind, text) or RuntimeError(unnamed))
            elif reply.answer is not None:
                future.set_result(reply.answer)

    def _fail(self, error: Exception) -> None:
        """Nothing will be answered any more."""
        with self._guard:
            self._failure = error
            waiting, self._open = list(self._open.values()), {}
        for future in waiting:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)


class Beats:
    """In this context a thread sends a sign of life every two seconds, even during imports, loading and compilation in
    other threads: it needs the interpreter for an instant only."""

    def __init__(self, messages: Transport[Message]) -> None:
        self._messages = messages
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(DeadlineError):
                try:
                    self._messages.put(Message([], None), POLL_S)
                except (TransportLost, TransportClosed):  # the trainer has ended
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join(2 * POLL_S)


class Outbox:
    """Takes notices from any thread, for `serve` to send."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._items: list[Notice] = []

    def add(self, notice: Notice) -> None:
        """Send a notice soon; calls of `advance` in a row become one."""
        with self._guard:
            match self._items[-1:], notice:
                case [Progressed("advance", [before])], Progressed("advance", [more]):
                    self._items[-1] = Progressed("advance", [before + more])
                case _:
                    self._items.append(notice)

    def take(self) -> list[Notice]:
        """The notices since the last call."""
        with self._guard:
            items, self._items = self._items, []
        return items

    def take_warnings(self) -> list[str]:
        """The texts of the warnings since the last call of `take`, for use after the last send."""
        return [item.fields["message"] for item in self.take() if isinstance(item, Event) and item.kind == "warning"]

    def put_back(self, items: list[Notice]) -> None:
        """These could not be sent, and come first next time."""
        with self._guard:
            self._items = [*items, *self._items]


@dataclass
class NoticeLog:
    """An `EventLog` written by another process."""

    outbox: Outbox
    folder: Path
    lineage: int

    def event(self, kind: str, **fields: Any) -> None:
        """See `RunLog`."""
        self.outbox.add(Event(kind, without_surrogates(msgspec.to_builtins(fields, enc_hook=str))))

    def warning(self, message: str, **fields: Any) -> None:
        """See `RunLog`."""
        self.event("warning", message=message, **fields)

    def count(self, values: Mapping[str, float]) -> None:
        """See `RunLog`."""
        self.outbox.add(Counted(dict(values)))

    def sample(self, record: Mapping[str, Any]) -> None:
        """See `RunLog`."""
        self.outbox.add(Sampled(without_surrogates(msgspec.to_builtins(record, enc_hook=str))))


class NoticeProgress:
    """A `Progress` shown by another process; it shows nothing of the whole run."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def start(self, *given: Any, **named: Any) -> None:
        """Nothing."""

    ready = step = stop = evaluated = start

    def phase(self, name: str, total: int | None = None) -> None:
        """See `Progress`."""
        heartbeat.doing(f'"{name}"')
        self._outbox.add(Progressed("phase", [name, total]))

    def advance(self, n: int = 1) -> None:
        """See `Progress`."""
        self._outbox.add(Progressed("advance", [n]))

    def end_phase(self) -> None:
        """See `Progress`."""
        heartbeat.doing(_SERVING)
        self._outbox.add(Progressed("end_phase", []))

    def message(self, text: str, level: str = "info") -> None:
        """See `Progress`."""
        self._outbox.add(Progressed("message", [without_surrogates(text), level]))


async def serve(executor: Executor, requests: Transport[Request], messages: Transport[Message], outbox: Outbox) -> None:
    """Carry out requests until `commands.Close`; all other work is cancelled before it. Raises if replies cannot be
    sent; waits while the other side merely does not read."""
    sending, tasks, num_told = asyncio.Lock(), dict[int, asyncio.Task[None]](), -1
    broken: list[Exception] = []

    async def send(reply: Reply | None) -> None:
        nonlocal num_told
        async with sending:
            items, num_ended = outbox.take(), executor.num_ended()
            if not items and num_ended == num_told and reply is None:
                return
            try:
                await messages.put_async(Message(items, num_ended, reply), POLL_S)
            except BaseException:
                outbox.put_back(items)
                raise
            if num_ended != num_told:
                heartbeat.progress()
            num_told = num_ended

    async def send_reply(reply: Reply) -> None:
        while True:
            with contextlib.suppress(DeadlineError):  # the trainer is stopped, or the server is away
                return await send(reply)

    async def answer(number: int, command: commands.AnyCommand) -> None:
        try:
            try:
                await send_reply(Reply(number, await executor.do(command)))
            except (asyncio.CancelledError, TransportLost, TransportClosed):
                raise
            except BaseException as error:  # noqa: BLE001 (the trainer learns of any error, of encoding its answer too)
                if not isinstance(error, SlipstreamError):
                    traceback.print_exception(error)
                failure = Failure(type(error).__name__, without_surrogates(str(error)))
                await send_reply(Reply(number, None, failure))
        except Exception as error:  # noqa: BLE001 (raised by `serve`)
            broken.append(error)
        finally:
            tasks.pop(number, None)

    async def tell() -> None:
        try:
            while True:
                await asyncio.sleep(_NOTICE_S)
                with contextlib.suppress(DeadlineError):
                    await send(None)
        except Exception as error:  # noqa: BLE001 (raised by `serve`)
            broken.append(error)

    heartbeat.doing(_SERVING)
    telling = asyncio.create_task(tell())
    try:
        while True:
            if broken:
                raise broken[0]
            try:
                receipt, request = await requests.take_async(POLL_S)
            except DeadlineError:
                continue
            await asyncio.to_thread(requests.ack, receipt)
            number, command = request.number, request.command
            if command is None:
                if (task := tasks.get(number)) is not None:
                    task.cancel()
            elif isinstance(command, commands.Close):
                if not await _cancel([*tasks.values()]):
                    outbox.add(Event("warning", {"message": "work of the environment did not end when cancelled"}))
                await answer(number, command)
                return
            else:
                tasks[number] = asyncio.create_task(answer(number, command))
    finally:
        await _cancel([telling, *tasks.values()])


async def _cancel(tasks: list[asyncio.Task[None]]) -> bool:
    """Cancel tasks and wait for their end; whether all ended in time."""
    for task in tasks:
        task.cancel()
    return not tasks or not (await asyncio.wait(tasks, timeout=_CANCEL_S))[1]
