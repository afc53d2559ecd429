"""HTTP client of one engine, at its Unix socket or the address of a server.

A call ends with its answer, at its deadline, or when the engine has been silent for too long: while calls wait, the
client asks `/health` once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.errors import DeadlineError, EngineError, IntegrityError
from slipstream.inference.addresses import ControlAddress
from slipstream.inference.shared_requests import SharedRequests
from slipstream.patience import Patience
from slipstream.processes.channel import LENGTH, length_of
from slipstream.records import (
    ApplyReport,
    Completion,
    EngineHealth,
    GenerateRequest,
    ParameterSpec,
    SessionOpening,
    SessionTurn,
    Ticket,
    Version,
    encode,
)
from slipstream.weights.bridges.single_copy import SharedWeights

_HEALTH_TIMEOUT_S = 5.0
_SESSION_TIMEOUT_S = 60.0
SILENCE_S = 60.0
"""An engine that is silent for so long is given up."""
_LISTEN_S = 1.0
_DYING_S = 5.0
"""How long after a broken connection the engine's process may take to end."""
_CLOSED = "the connections to the engine were closed"

T = TypeVar("T")


async def _nothing() -> None:
    """The default for an engine that somebody else owns."""


class EngineClient:
    """Talks to one engine, from one event loop."""

    def __init__(
        self,
        address: str | ControlAddress,
        *,
        is_alive: Callable[[], bool],
        describe: Callable[[], str],
        give_up: Callable[[], Awaitable[None]] = _nothing,
        silence_s: float = SILENCE_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`address`: a Unix socket's path, or a server's. `give_up` is called when the engine is silent for
        `silence_s`, and may kill it; calls then fail as for a dead engine. `headers`: of each request."""
        own = ControlAddress(f"unix:{address}") if isinstance(address, str) else address
        self.socket = own.path or own.url
        self._address, self._base, self._headers = own, own.base, {**own.headers, **(headers or {})}
        self._is_alive = is_alive
        self._describe = describe
        self._give_up = give_up
        self._session: aiohttp.ClientSession | None = None
        self._openings = SharedRequests(self._open_sessions)
        self._endings = SharedRequests(self._close_sessions)
        self._outbox: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []
        self._asked: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoder = msgspec.msgpack.Decoder(Completion)
        self._silence_s = silence_s
        self._listening: set[Patience] = set()
        self._is_listening = False

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=self._address.connector(),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        return self._session

    async def close(self) -> None:
        """Drop the connections; a later call opens them again."""
        for task in [*self._tasks, self._openings, self._endings]:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    @contextlib.asynccontextmanager
    async def _heard(self, path: str) -> AsyncGenerator[Patience]:
        """Bounds a block that waits for the answer to `path` by the engine's silence. Raises `DeadlineError`, or
        `EngineError` when the engine was killed."""
        patience = Patience(self._silence_s)
        self._listening.add(patience)
        if not self._is_listening:
            self._is_listening = True
            self._keep(asyncio.get_running_loop().create_task(self._listen()))
        try:
            async with patience:
                yield patience
        except TimeoutError as error:
            silence = f"said nothing for {self._silence_s:.0f} s after {path}"
            await self._give_up()
            if self._is_alive():
                raise DeadlineError(f"the engine {silence}: {self._describe()}") from error
            raise EngineError(f"the engine {silence} and was killed: {self._describe()}") from error
        finally:
            self._listening.discard(patience)

    async def _listen(self) -> None:
        """Ask `/health` once a second for as long as calls wait; each answer restarts their silence limit."""
        try:
            while self._listening:
                if await self._ask_health() is not None:
                    for patience in self._listening:
                        patience.restart()
                await asyncio.sleep(_LISTEN_S)
        finally:
            self._is_listening = False

    async def _post(self, path: str, body: bytes, kind: type[T], timeout_s: float) -> T:
        try:
            async with self._heard(path) as patience:
                try:
                    async with Patience(timeout_s), self._open().post(self._base + path, data=body) as response:
                        answer = await response.read()
                        status = response.status
                except TimeoutError as error:
                    await patience.restarted()  # a silent engine raises in `_heard` instead
                    raise DeadlineError(
                        f"the engine did not answer {path} within {timeout_s:.0f} s: {self._describe()}"
                    ) from error
        except aiohttp.ClientError as error:
            raise await self._explain(path, error) from error
        if status != 200:
            raise EngineError(f"the engine refused {path} with status {status}: {answer.decode(errors='replace')}")
        return msgspec.msgpack.decode(answer, type=kind)

    async def health(self) -> EngineHealth | None:
        """The engine's health; None while it does not answer."""
        try:
            async with Patience(_HEALTH_TIMEOUT_S):
                return await self._ask_health()
        except TimeoutError:
            return None

    async def _ask_health(self) -> EngineHealth | None:
        try:
            async with self._open().get(f"{self._base}/health") as response:
                return msgspec.json.decode(await response.read(), type=EngineHealth)
        except (aiohttp.ClientError, msgspec.DecodeError):
            return None

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion. Requests of the same turn of the event loop share one POST; each is answered as soon as it is
        finished. Cancelling the call cancels the request inside the engine. Raises `IntegrityError` when the answer
        contradicted itself.
        """
        if request.id in self._asked:
            raise ValueError(f"a request with the id {request.id} is waiting already: give each one its own")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._outbox:
            loop.call_soon(self._send_outbox)
        self._outbox.append((request, future))
        self._asked.add(request.id)
        try:
            completion = await future
        except asyncio.CancelledError:
            self._take_back(request, loop)
            raise
        finally:
            self._asked.discard(request.id)
        if completion.contradiction:
            raise IntegrityError(
                f"the engine contradicted itself in request {request.id} ({completion.contradiction}) and is out of "
                f"service: report it to us, with the traceback in its log; {self._describe()}"
            )
        return completion

    def _take_back(self, request: GenerateRequest, loop: asyncio.AbstractEventLoop) -> None:
        kept = [each for each in self._outbox if each[0] is not request]
        if len(kept) < len(self._outbox):  # it was never sent
            self._outbox[:] = kept
        else:
            self._keep(loop.create_task(self._cancel(request.id)))

    async def _cancel(self, request_id: str) -> None:
        # An engine that is gone has nothing left to cancel.
        with contextlib.suppress(EngineError):
            await self._post("/cancel", msgspec.msgpack.encode([request_id]), bool, _HEALTH_TIMEOUT_S)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_outbox(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox:
            task = asyncio.get_running_loop().create_task(self._stream(outbox))
            self._keep(task)
            # One that is cancelled before it begins does nothing, for those who wait neither.
            task.add_done_callback(lambda _: _fail((future for _, future in outbox), EngineError(_CLOSED)))

    async def _stream(self, outbox: list[tuple[GenerateRequest, asyncio.Future[Completion]]]) -> None:
        """Send requests in one POST and resolve their futures; every future is done at the end, whatever happens."""
        waiting = {request.id: future for request, future in outbox}
        failure: Exception = EngineError(_CLOSED)
        try:
            async with self._heard("/generate"):
                await self._receive(msgspec.msgpack.encode([request for request, _ in outbox]), waiting)
        except EngineError as error:
            failure = error
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            if any(not future.done() for future in waiting.values()):
                failure = await self._explain("/generate", error)
        except Exception as error:  # noqa: BLE001 (whatever it is, those who wait are told)
            failure = EngineError(
                f"the engine's answer to /generate cannot be read ({type(error).__name__}: {error}): {self._describe()}"
            )
            failure.__cause__ = error
        finally:
            _fail(waiting.values(), failure)

    async def _receive(self, body: bytes, waiting: dict[str, asyncio.Future[Completion]]) -> None:
        async with self._open().post(f"{self._base}/generate", data=body) as response:
            if response.status != 200:
                text = (await response.read()).decode(errors="replace")
                raise EngineError(f"the engine refused to generate with status {response.status}: {text}")
            while waiting:
                length = length_of(await response.content.readexactly(LENGTH))
                completion = self._decoder.decode(await response.content.readexactly(length))
                future = waiting.pop(completion.id)
                if not future.done():
                    future.set_result(completion)

    async def _explain(self, path: str, error: Exception) -> EngineError:
        # The connection breaks before the dead child can be reaped, on a busy machine long before.
        for _ in itertools.takewhile(lambda _: self._is_alive(), range(100)):
            await asyncio.sleep(_DYING_S / 100)
        what = "lost its connection" if self._is_alive() else "died"
        return EngineError(f"the engine {what} during {path} ({error}): {self._describe()}")

    async def open_session(self, opening: SessionOpening) -> None:
        """Record the requests of an agent."""
        await self._openings.call(opening)

    async def close_session(self, key: str) -> list[SessionTurn]:
        """End a session; returns its turns. Raises `EngineError` if it is not open, as after the engine's death."""
        turns = await self._endings.call(key)
        if turns is None:
            raise EngineError(f"the engine was started again, and has lost an agent's session: {self._describe()}")
        return turns

    async def _open_sessions(self, openings: Sequence[SessionOpening]) -> Sequence[None]:
        await self._post("/sessions-open", msgspec.msgpack.encode(openings), bool, _SESSION_TIMEOUT_S)
        return [None] * len(openings)

    async def _close_sessions(self, keys: Sequence[str]) -> Sequence[list[SessionTurn] | None]:
        kind = list[list[SessionTurn] | None]
        return await self._post("/sessions-close", msgspec.msgpack.encode(keys), kind, _SESSION_TIMEOUT_S)

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Load a published version in place and verify it."""
        return await self._post("/apply", encode(ticket), ApplyReport, timeout_s)

    async def sleep(self, timeout_s: float) -> None:
        """Free the GPU's memory until `wake`."""
        await self._post("/sleep", b"", bool, timeout_s)

    async def wake(self, timeout_s: float) -> None:
        """Take the memory back."""
        await self._post("/wake", b"", bool, timeout_s)

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """Handles of the engine's live weights, for a trainer that writes them in place."""
        return await self._post("/share", msgspec.msgpack.encode(parameters), tuple[SharedWeights, ...], timeout_s)

    async def fence(self, timeout_s: float) -> None:
        """Pause vLLM until the next `go_on` or `apply`."""
        await self._post("/fence", b"", bool, timeout_s)

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """Resume with the weights that were written in place, as `version`; answers are held back until it is
        verified."""
        await self._post("/go-on", msgspec.msgpack.encode(version), bool, timeout_s)

    async def leave(self, timeout_s: float) -> None:
        """Leave the process group that brings weights."""
        await self._post("/leave", b"", bool, timeout_s)

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Compare the engine's live weights with a published version, changing nothing."""
        return await self._post("/verify", encode(ticket), ApplyReport, timeout_s)


def _fail(futures: Iterable[asyncio.Future[Completion]], failure: EngineError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(failure)
