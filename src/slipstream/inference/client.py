"""The client's side of the engine's socket. Every call has a deadline and names who was waited for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.errors import DeadlineError, EngineError
from slipstream.records import (
    ApplyReport,
    Completion,
    EngineHealth,
    GenerateRequest,
    ParameterSpec,
    Ticket,
    Version,
    encode,
)
from slipstream.weights.single_copy import SharedWeights

_HEALTH_TIMEOUT_S = 5.0
_GRACE_S = 5.0
"""How much longer than a request's own deadline we wait for the engine to say so."""
_DYING_S = 5.0
"""How long an engine whose connections break may take to be seen to be dead."""

T = TypeVar("T")


class EngineClient:
    """Talks to one engine over its Unix socket, from one event loop."""

    def __init__(self, socket: str, *, is_alive: Callable[[], bool], describe: Callable[[], str]) -> None:
        self.socket = socket
        self._is_alive = is_alive
        self._describe = describe
        self._session: aiohttp.ClientSession | None = None
        self._outbox: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoder = msgspec.msgpack.Decoder(Completion)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            connector = aiohttp.UnixConnector(self.socket, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def close(self) -> None:
        """Drop the connections; a later call opens them again."""
        for task in list(self._tasks):
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, path: str, body: bytes, kind: type[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open().post(f"http://engine{path}", data=body) as response:
                    answer = await response.read()
                    status = response.status
        except (TimeoutError, aiohttp.ClientError) as error:
            raise await self._explain(path, error, timeout_s) from error
        if status != 200:
            raise EngineError(f"the engine refused {path} with status {status}: {answer.decode(errors='replace')}")
        return msgspec.msgpack.decode(answer, type=kind)

    async def health(self) -> EngineHealth | None:
        """What the engine says of itself; None while nobody answers."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                async with self._open().get("http://engine/health") as response:
                    return msgspec.json.decode(await response.read(), type=EngineHealth)
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError):
            return None

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion. Requests made in the same turn of the event loop travel together; each is answered as
        soon as it is finished. Cancelling the call cancels the request inside the engine.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._outbox:
            loop.call_soon(self._send_outbox)
        self._outbox.append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._keep(loop.create_task(self._cancel(request.id)))
            raise

    async def _cancel(self, request_id: str) -> None:
        # An engine that is gone has nothing left to cancel.
        with contextlib.suppress(EngineError):
            await self._post("/cancel", msgspec.msgpack.encode([request_id]), bool, _HEALTH_TIMEOUT_S)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_outbox(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._keep(asyncio.get_running_loop().create_task(self._stream(outbox)))

    async def _stream(self, outbox: list[tuple[GenerateRequest, asyncio.Future[Completion]]]) -> None:
        waiting = {request.id: future for request, future in outbox}
        timeout_s = max(request.timeout_s for request, _ in outbox) + _GRACE_S
        body = msgspec.msgpack.encode([request for request, _ in outbox])
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                async with self._open().post("http://engine/generate", data=body) as response:
                    if response.status != 200:
                        text = (await response.read()).decode(errors="replace")
                        raise EngineError(f"the engine refused to generate with status {response.status}: {text}")
                    # An engine that takes a version answers this much only after it; then each has its whole time.
                    deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
                    while waiting:
                        size = int.from_bytes(await response.content.readexactly(4), "big")
                        completion = self._decoder.decode(await response.content.readexactly(size))
                        # Some wait in the engine for others to end: while answers come, nothing hangs.
                        deadline.reschedule(asyncio.get_running_loop().time() + timeout_s)
                        future = waiting.pop(completion.id)
                        if not future.done():
                            future.set_result(completion)
        except (TimeoutError, aiohttp.ClientError, asyncio.IncompleteReadError, EngineError) as error:
            failure: EngineError = EngineError("the connections to the engine were closed")
            try:
                failure = await self._explain("/generate", error, timeout_s)
            finally:
                _fail(waiting.values(), failure)
        except asyncio.CancelledError:
            # By `close`: whoever waits must learn that nothing will come.
            _fail(waiting.values(), EngineError("the connections to the engine were closed"))
            raise

    async def _explain(self, path: str, error: Exception, timeout_s: float) -> EngineError:
        if isinstance(error, EngineError):
            return error
        if isinstance(error, TimeoutError):
            return DeadlineError(f"the engine did not answer {path} within {timeout_s:.0f} s: {self._describe()}")
        # The connection breaks before the child can be reaped: on a busy machine long before.
        deadline = time.monotonic() + _DYING_S
        while self._is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(_DYING_S / 100)
        what = "lost its connection" if self._is_alive() else "died"
        return EngineError(f"the engine {what} during {path} ({error}): {self._describe()}")

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Have the engine load a published version in place and verify it."""
        return await self._post("/apply", encode(ticket), ApplyReport, timeout_s)

    async def sleep(self, timeout_s: float) -> None:
        """Have the engine free its memory until `wake`."""
        await self._post("/sleep", b"", bool, timeout_s)

    async def wake(self, timeout_s: float) -> None:
        """Have it take the memory back."""
        await self._post("/wake", b"", bool, timeout_s)

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """Where the engine's live weights lie, for a trainer that is to train them."""
        return await self._post("/share", msgspec.msgpack.encode(parameters), tuple[SharedWeights, ...], timeout_s)

    async def fence(self, timeout_s: float) -> None:
        """Have it compute nothing until the next apply."""
        await self._post("/fence", b"", bool, timeout_s)

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """Have it compute with what was written, as `version`, and hold answers until that is proved."""
        await self._post("/go-on", msgspec.msgpack.encode(version), bool, timeout_s)

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Compare the engine's live weights with a published version, changing nothing."""
        return await self._post("/verify", encode(ticket), ApplyReport, timeout_s)


def _fail(futures: Iterable[asyncio.Future[Completion]], failure: EngineError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(failure)
