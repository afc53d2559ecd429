"""The client's side of the engine's socket. Every call has a deadline and names who was waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from slipstream.errors import DeadlineError, EngineError
from slipstream.records import ApplyReport, Completion, EngineHealth, GenerateRequest, Ticket, encode

_HEALTH_TIMEOUT_S = 5.0
_GRACE_S = 5.0
"""How much longer than a request's own deadline we wait for the engine to say so."""

T = TypeVar("T")


class EngineClient:
    """Talks to one engine over its Unix socket, from one event loop."""

    def __init__(self, socket: str, *, is_alive: Callable[[], bool], describe: Callable[[], str]) -> None:
        self.socket = socket
        self._is_alive = is_alive
        self._describe = describe
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            connector = aiohttp.UnixConnector(self.socket, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def close(self) -> None:
        """Drop the connections; a later call opens them again."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, path: str, body: bytes, kind: type[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open().post(f"http://engine{path}", data=body) as response:
                    answer = await response.read()
                    status = response.status
        except TimeoutError:
            raise DeadlineError(f"the engine did not answer {path} within {timeout_s:.0f} s: {self._describe()}") from None
        except aiohttp.ClientError as error:
            # The connection breaks a moment before the child can be reaped.
            await asyncio.sleep(0.2)
            what = "lost its connection" if self._is_alive() else "died"
            raise EngineError(f"the engine {what} during {path} ({error}): {self._describe()}") from error
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

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Completions in the order of the requests; those past their deadline end with `abort`."""
        timeout_s = max(request.timeout_s for request in requests) + _GRACE_S
        return await self._post("/generate", msgspec.msgpack.encode(requests), list[Completion], timeout_s)

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Have the engine load a published version in place and verify it."""
        return await self._post("/apply", encode(ticket), ApplyReport, timeout_s)

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Compare the engine's live weights with a published version, changing nothing."""
        return await self._post("/verify", encode(ticket), ApplyReport, timeout_s)
