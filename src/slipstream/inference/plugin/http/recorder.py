"""ASGI middleware between the gate and vLLM's handlers: finds the session of a request, and shows its answer to the
recording."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.http_listener import replaying
from slipstream.inference.plugin.recording import CURRENT, Recording, Sessions
from slipstream.records import REQUEST_HEADER


class Recorder:
    """ASGI middleware around vLLM's handlers."""

    def __init__(self, app: ASGIApp, sessions: Sessions, model: str) -> None:
        """`model`: what vLLM's handlers call it."""
        self._app, self._sessions, self._model = app, sessions, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        session = self._sessions.of(scope["headers"]) if scope["type"] == "http" else None
        if session is None and any(name == REQUEST_HEADER.encode() for name, _ in scope.get("headers", ())):
            await _refuse(send, 410, "the episode of this key has ended")
            return
        if session is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body: bytes = (await receive()).get("body", b"")  # the gate has read all of it
        try:
            fields: dict[str, Any] = json.loads(body)
            headers = dict(scope["headers"])
            number = int(headers.get(REQUEST_HEADER.encode(), b"-1"))
            recording = Recording(session, number, scope["path"], fields)
        except (ValueError, AttributeError, TypeError):  # vLLM says what is wrong with it
            await self._app(scope, replaying(body, receive), send)
            return
        is_changed = _lets_choose(fields) | _limits(fields, session.opening.sampling.max_tokens)
        if fields.get("model") in session.opening.names:
            fields["model"], is_changed = self._model, True
        if is_changed:
            body = json.dumps(fields).encode()
            length = (b"content-length", str(len(body)).encode())
            scope = {**scope, "headers": [*(each for each in scope["headers"] if each[0] != length[0]), length]}
        token = CURRENT.set(recording)
        try:
            await self._app(scope, replaying(body, receive), _Answering(recording, send))
        finally:
            CURRENT.reset(token)


class _Answering:
    """Sends a response, and shows it to its recording before each piece goes out."""

    def __init__(self, recording: Recording, send: Send) -> None:
        self._recording, self._send = recording, send
        self._parts: list[bytes] = []
        self._is_good = self._is_stream = False

    async def __call__(self, event: Message) -> None:
        if event["type"] == "http.response.start":
            self._is_good = event["status"] == 200
            kinds = [value for name, value in event.get("headers", ()) if name.lower() == b"content-type"]
            self._is_stream = any(value.startswith(b"text/event-stream") for value in kinds)
        elif event["type"] == "http.response.body" and self._is_good:
            self._parts.append(event.get("body", b""))
            if self._recording.is_complete:
                body = b"".join(self._parts)
                self._recording.answer(body, is_stream=self._is_stream, is_whole=not event.get("more_body", False))
        await self._send(event)


def _lets_choose(fields: dict[str, Any]) -> bool:
    """Make a forced call of a tool the model's choice, since force would change its distribution; whether one was."""
    choice = fields.get("tool_choice")
    if choice in (None, "auto", "none") or (isinstance(choice, dict) and choice.get("type") in ("auto", "none")):
        return False
    fields["tool_choice"] = (
        {"type": "auto"} if isinstance(choice, dict) and choice.get("type") != "function" else "auto"
    )
    return True


def _limits(fields: dict[str, Any], most: int) -> bool:
    """Lower limits of tokens to the run's: vLLM refuses one above the context; whether one was."""
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    higher = [name for name in names if isinstance(fields.get(name), int) and fields[name] > most]
    fields.update(dict.fromkeys(higher, most))
    return bool(higher)


async def _refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": {"message": text, "type": "invalid_request_error", "code": status}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
