"""Version spans in the body of an answer, and signs of life in an idle stream (`Answer`).

The last event of a stream, or the object of a JSON answer, gets two more fields: `versions`, for each choice its spans
`[index of the first token, version]`, and `digests` of these versions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping

from starlette.types import Message, Send

from slipstream.inference.plugin.guests import Exchange

_KEEP_ALIVE = b": keep-alive\n\n"
_EVENT_END = b"}\n\n"


class Answer:
    """Stands between a handler and the client. Until the answer's last token a message costs two comparisons here."""

    def __init__(self, exchange: Exchange, digests: Mapping[str, str], send: Send) -> None:
        self.has_begun = False
        """Whether the status line is sent."""
        self.is_stream = False
        self._exchange = exchange
        self._digests = digests
        self._send = send
        self._is_idle = False
        self._is_open = True
        self._held: Message | None = None
        """The beginning of a JSON answer; or, after a stream's last token, its last event so far."""
        self._beat: asyncio.Task[None] | None = None

    def send(self, message: Message) -> Awaitable[None]:
        """As ASGI's `send`."""
        self._is_idle = False
        if self._exchange.is_complete or self._held is not None:
            return self._send_last(message)
        if message["type"] == "http.response.start":
            self._begin(message)
        elif not message.get("more_body"):
            self._is_open = False
        return self._send(message)

    def beat(self) -> None:
        """Called every few seconds: a stream without an event since the last call gets a comment."""
        if self._is_idle and self.is_stream and self._is_open and (self._beat is None or self._beat.done()):
            self._beat = asyncio.get_running_loop().create_task(self._comment())
        self._is_idle = True

    async def fail(self, message: str) -> None:
        """End a stream with an error event, after its handler has raised."""
        error = {"type": "error", "error": {"type": "server_error", "message": message, "code": 500}}
        body = b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._is_open = False

    async def _comment(self) -> None:
        try:
            await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
        except Exception:  # noqa: BLE001 (the answer has ended meanwhile, or its client has gone)
            self._is_open = False

    def _begin(self, message: Message) -> None:
        self.has_begun = True
        self.is_stream = (b"text/event-stream") in dict(message["headers"]).get(b"content-type", b"")

    async def _send_last(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
            if self.is_stream or message["status"] != 200:
                await self._send(message)
            else:
                self._held = message
            return
        body, is_last = message.get("body", b""), not message.get("more_body")
        if not self.is_stream:
            if self._held is not None and is_last and body.endswith(b"}"):
                body = body[:-1] + self._fields() + b"}"
                length = (b"content-length", str(len(body)).encode())
                headers = [(name, value) for name, value in self._held["headers"] if name != b"content-length"]
                await self._send({**self._held, "headers": [*headers, length]})
                self._held = None
                message = {**message, "body": body}
            elif self._held is not None:
                held, self._held = self._held, None
                await self._send(held)
            self._is_open = not is_last
            await self._send(message)
            return
        if self._held is not None:
            held, self._held = self._held, None
            if not body.endswith(_EVENT_END):  # an end such as `data: [DONE]`, or nothing
                held = {**held, "body": held["body"][: -len(_EVENT_END)] + self._fields() + _EVENT_END}
            await self._send(held)
        if body.endswith(_EVENT_END) and not is_last and self._exchange.is_complete:
            self._held = message
            return
        self._is_open = not is_last
        await self._send(message)

    def _fields(self) -> bytes:
        names = sorted(self._exchange.names())
        digests = {name: self._digests.get(name, "") for name in names}
        versions = json.dumps(self._exchange.answers, separators=(",", ":"))
        return f',"versions":{versions},"digests":{json.dumps(digests)}'.encode()
