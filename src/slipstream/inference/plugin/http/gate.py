"""`Gate`: keys, and limits of a request. ASGI, around the application of foreign clients.

Guarantees:
- Without the key nothing is answered but `/health`, and no body is read. Keys are compared in constant time.
- A body is read whole first, within `MAX_BODY_BYTES` and `BODY_S`.
- While the engine is out of service a request gets 503. During an update it waits, for the first `QUIET_S` here and
  then in its handler: a stream has begun by then and stays alive.
- Without a key requests must name this machine as their host, against DNS rebinding.
- A server answers `/runs/PLACE/...` like `/...`, while it holds this run's weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from starlette.types import Receive, Scope, Send

from slipstream.config.addresses import names_this_machine
from slipstream.http_listener import replaying
from slipstream.inference.lending import RUNS
from slipstream.inference.plugin.guests import Exchange, exchange_of_task
from slipstream.inference.plugin.http.answers import Answer
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.service import OutOfService

MAX_BODY_BYTES = 16 << 20
BODY_S = 60.0
"""For a body to arrive."""
QUIET_S = 5.0
REQUEST_S = 3600.0
"""For a whole request."""
_UNREAD = (401, 408, 413, 421)
"""Refusals before the body is read."""
_log = logging.getLogger("slipstream.http")


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Gate:
    """Stands before the application `app`."""

    def __init__(
        self,
        app: Any,
        server: EngineServer,
        key: str,
        *,
        is_local: bool,
        serves_run: Callable[[str], bool] | None = None,
    ) -> None:
        """`is_local`: only this machine can connect, so the key may be empty. `serves_run`: whether the engine
        holds the weights of the run with this `place_of`; None for the engine of one run."""
        self.answers: set[Answer] = set()
        """Answers under way."""
        self._app = app
        self._server = server
        self._key = sha256(key.encode()).digest() if key else b""
        self._checks_host = is_local
        self._serves_run = serves_run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        scope, place = self._without_place(scope)
        try:
            if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
                await self._tell_health(scope, send, place)
                return
            key = _shown_key(headers)
            self._check(headers, key)
            body = await _read(headers, receive)
            await self._until_open(scope["method"])
            if not self._is_of(place):
                raise Refusal(503, "service_unavailable", "the engine does not hold the weights of this address's run")
        except Refusal as refusal:
            await _send_error(send, refusal)
            return
        except ConnectionError:
            return
        await self._answer(scope, replaying(body, receive), send, Exchange(key))

    def beat(self) -> None:
        """Give each waiting stream a sign of life."""
        for answer in list(self.answers):
            answer.beat()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        answer = Answer(exchange, self._server.digests, send)
        self.answers.add(answer)
        exchange_of_task.set(exchange)
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._app(scope, receive, answer.send)
        except Exception as error:  # noqa: BLE001 (a request that fails concerns its client only)
            _log.exception("%s failed", scope["path"])
            text = f"the request was not finished: {type(error).__name__}"
            with contextlib.suppress(Exception):
                if not answer.has_begun:
                    await _send_error(send, Refusal(500, "server_error", text))
                elif answer.is_stream:
                    await answer.fail(text)
        finally:
            self.answers.discard(answer)

    def _check(self, headers: list[tuple[bytes, bytes]], key: str) -> None:
        if self._key and not hmac.compare_digest(sha256(key.encode()).digest(), self._key):
            raise Refusal(401, "authentication_error", "the key is missing or wrong")
        if self._checks_host and not self._key:
            hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
            if not all(map(names_this_machine, hosts)):
                raise Refusal(421, "misdirected_request", "without a key only 127.0.0.1 and localhost are answered")

    async def _until_open(self, method: str) -> None:
        if method != "POST" or self._server.service.is_serving:
            return
        try:
            async with asyncio.timeout(QUIET_S):
                await self._server.service.until_serving()
        except TimeoutError:
            return
        except OutOfService as error:
            raise Refusal(503, "service_unavailable", f"the engine is out of service: {error}") from error

    def _without_place(self, scope: Scope) -> tuple[Scope, str]:
        """The request without the place of a run, and that place; empty for none."""
        if self._serves_run is None or not scope["path"].startswith(RUNS):
            return scope, ""
        place, _, rest = scope["path"].removeprefix(RUNS).partition("/")
        return {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, place

    def _is_of(self, place: str) -> bool:
        """Whether the engine holds the weights of this place's run."""
        return not place or (self._serves_run is not None and self._serves_run(place))

    async def _tell_health(self, scope: Scope, send: Send, place: str) -> None:
        service, version = self._server.service, self._server.version
        found = {"status": service.status, "reason": service.reason, "version": version.name if version else ""}
        body = b"" if scope["method"] == "HEAD" else json.dumps(found).encode()
        await _send_json(send, 200 if service.is_serving and self._is_of(place) else 503, body)


def _shown_key(headers: list[tuple[bytes, bytes]]) -> str:
    """The key in `Authorization: Bearer` or `x-api-key`; empty without one, or with several."""
    shown: list[bytes] = []
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            shown.append(value[7:].strip())
        elif name == b"x-api-key":
            shown.append(value.strip())
    return shown[0].decode("latin-1") if len(set(shown)) == 1 else ""


async def _read(headers: list[tuple[bytes, bytes]], receive: Receive) -> bytes:
    too_large = Refusal(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    length = dict(headers).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise too_large
    parts, num_bytes = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionResetError
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise Refusal(408, "request_timeout", f"the body did not arrive within {BODY_S:.0f} s") from error


async def _send_error(send: Send, refusal: Refusal) -> None:
    """In a form that clients of OpenAI and of Anthropic read."""
    error = {"type": refusal.kind, "message": str(refusal), "code": refusal.status}
    more = [(b"www-authenticate", b"Bearer")] if refusal.status == 401 else []
    if refusal.status in _UNREAD:
        more.append((b"connection", b"close"))
    await _send_json(send, refusal.status, json.dumps({"type": "error", "error": error}).encode(), more)


async def _send_json(send: Send, status: int, body: bytes, more: list[tuple[bytes, bytes]] | None = None) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(more or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
