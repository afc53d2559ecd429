"""The one OpenAI address of all deployments: finds the server of the model that a request names, and passes it on.

Guarantees: only names of ready deployments of the caller reach a server, and only the routes listed here. This Unix
user reaches all of them. A closed connection cancels its request, inside vLLM too. Answers pass through as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import Counter
from typing import Any

import aiohttp
import msgspec
from starlette.types import Receive, Scope, Send

from slipstream.service.deployments.records import Deployment
from slipstream.service.deployments.registry import Registry
from slipstream.service.deployments.servers import Server

MAX_BODY_BYTES = 16 << 20
SMOKE_S = 300.0
_OF_CHATS = "chat_template_kwargs"
_BODY_S, _SILENCE_S = 60.0, 3600.0
_ROUTES = ("/v1/chat/completions", "/v1/completions")
_GIVEN_BACK = frozenset({"content-type", "cache-control", "content-length", "retry-after"})
_SMOKE: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


class _Refused(Exception):
    """An answer other than a server's."""

    def __init__(self, status: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.status, self.kind = status, kind


class Gateway:
    """ASGI application, behind `service.access.Access`."""

    def __init__(self, registry: Registry, servers: dict[str, Server], owner: str) -> None:
        """`owner`: this Unix user."""
        self.running = Counter[str]()
        """Requests under way by served name."""
        self._registry, self._servers, self._owner = registry, servers, owner
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections to servers."""
        if self._http is not None:
            await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        try:
            if scope["method"] == "GET" and scope["path"] == "/v1/models":
                await _send_json(send, 200, self._models(str(scope["user"])))
                return
            if scope["method"] != "POST" or scope["path"] not in _ROUTES:
                raise _Refused(404, "not_found_error", f"{scope['method']} {scope['path']:.80} is not answered here")
            body = await _body(receive)
            record = self._named(str(scope["user"]), body)
            await self._pass_on(record, scope["path"], body, receive, send)
        except _Refused as refusal:
            error = {"message": str(refusal), "type": refusal.kind, "code": refusal.status}
            await _send_json(send, refusal.status, {"error": error})
        except ConnectionError:
            return

    async def smoke(self, record: Deployment) -> str:
        """A short greedy answer of a deployment; its fault, empty for finite log-probabilities. Raises
        aiohttp.ClientError and TimeoutError if the server gives no answer."""
        body = {**record.request, **_SMOKE, "model": record.served, "logprobs": True}
        server = self._servers[record.server]
        async with asyncio.timeout(SMOKE_S), self._post(server, _ROUTES[0], body) as answer:
            status, data = answer.status, await answer.read()
        if status == 404:
            return "the files of its adapter have changed since it was deployed: undeploy it, and deploy it again"
        if status != 200:
            return f"vLLM refused it ({data.decode(errors='replace'):.300}): see {server.log}"
        found = json.loads(data)["choices"][0].get("logprobs") or {}
        values = [each.get("logprob") for each in found.get("content") or ()]
        if not values or not all(isinstance(each, float | int) and math.isfinite(each) for each in values):
            return "the log-probabilities of a greedy answer are not finite: name another step"
        return ""

    def _models(self, user: str) -> dict[str, Any]:
        mine = [each for each in self._registry.all() if user in (self._owner, each.owner) and each.state == "ready"]
        rows = [
            {
                "id": each.name,
                "object": "model",
                "created": int(each.created),
                "owned_by": each.owner,
                "root": each.base,
            }
            for each in mine
        ]
        return {"object": "list", "data": rows}

    def _named(self, user: str, body: dict[str, Any]) -> Deployment:
        name = body.get("model")
        record = self._registry.one(name) if isinstance(name, str) else None
        if record is None or user not in (self._owner, record.owner) or record.state == "undeploying":
            raise _Refused(404, "not_found_error", f"there is no deployment {name!r:.120}: slipstream deployments")
        server = self._servers.get(record.server)
        if record.state != "ready" or server is None or not server.is_up:
            text = f"{record.name} is {record.state} {record.reason}".rstrip()
            raise _Refused(503, "service_unavailable", text)
        return record

    async def _pass_on(self, record: Deployment, path: str, body: dict[str, Any], receive: Receive, send: Send) -> None:
        asked = request_of(record, path, body)
        self.running[record.served] += 1
        answering = asyncio.ensure_future(self._answer(record, path, asked, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
            self.running[record.served] -= 1

    async def _answer(self, record: Deployment, path: str, body: dict[str, Any], send: Send) -> None:
        has_begun = False
        try:
            async with self._post(self._servers[record.server], path, body) as answer:
                headers = [
                    (name.lower().encode(), value.encode())
                    for name, value in answer.headers.items()
                    if name.lower() in _GIVEN_BACK
                ]
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                has_begun = True
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError) as error:
            if has_begun:  # without the last chunk, the client sees a broken answer
                raise ConnectionAbortedError from error
            text = f"the server of {record.name} gave no answer ({type(error).__name__}): ask again"
            raise _Refused(503, "service_unavailable", text) from error

    def _post(self, server: Server, path: str, body: dict[str, Any]) -> Any:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # vLLM closes after 5 s
            self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        return self._http.post(f"{server.url}{path}", data=msgspec.json.encode(body), headers=headers)


def request_of(record: Deployment, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A client's request for vLLM: with the run's settings, unless it brings its own."""
    asked = {**body, "model": record.served}
    for name, value in record.request.items():
        if name == _OF_CHATS and path != _ROUTES[0]:
            continue
        given = body.get(name)
        if given is None:
            asked[name] = value
        elif name == _OF_CHATS and isinstance(given, dict):
            asked[name] = {**value, **given}
    return asked


async def _body(receive: Receive) -> dict[str, Any]:
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(_BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionResetError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise _Refused(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise _Refused(408, "request_timeout", f"the body did not arrive within {_BODY_S:g} s") from None
    try:
        return msgspec.json.decode(b"".join(parts), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _Refused(400, "invalid_request_error", "the body is no JSON object") from None


async def _left(receive: Receive) -> None:
    with contextlib.suppress(ConnectionError):
        while (await receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)


async def _send_json(send: Send, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    more = [(b"retry-after", b"2")] if status == 503 else []
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
