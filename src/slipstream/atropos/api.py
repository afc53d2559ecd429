"""The run's API: the routes of a `run-api`. Environments push groups to it; the run is its trainer.

Without a token it listens on loopback and answers requests to loopback names only. A token comes as a bearer, in
`x-api-key`, or as the password in the address: `atroposlib` sends no headers of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import uuid
import zlib
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from slipstream.atropos.environments import Environments, UnknownEnvironment
from slipstream.atropos.groups import Refused
from slipstream.atropos.protocol import EnvIdentifier, RegisterEnv, Registration, ScoredData
from slipstream.config.addresses import is_loopback, names_this_machine
from slipstream.errors import ConfigError
from slipstream.http_listener import Listener, replaying, tcp_socket
from slipstream.http_listener import serve as serve_app

MAX_BODY_BYTES = 256 << 20
"""Largest body, packed and unpacked."""
_BODY_S = 60.0
_NOTHING = {
    name: list[Any]()
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"),
        *("messages", "images"),
    )
}


class Desk:
    """The run, as its routes see it."""

    def __init__(
        self,
        registration: Registration,
        environments: Environments,
        *,
        take_in: Callable[[ScoredData, str], None],
        held: Callable[[], tuple[list[tuple[int | None, int]], int]],
        step: Callable[[], int],
    ) -> None:
        """`take_in` gets each group and its environment's name; it raises `Refused`. `held`: the groups ahead of
        training, and the number of further places without room."""
        self.registration, self.environments = registration, environments
        self.take_in, self.held, self.step = take_in, held, step
        self.has_registered = False
        self.has_started = False
        self.latest: dict[str, Any] = dict(_NOTHING)


def create_app(desk: Desk) -> FastAPI:
    """The application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    registration, environments = desk.registration, desk.environments

    def take(data: ScoredData) -> None:
        environments.seen(data.env_id)
        desk.take_in(data, environments.name_of(data.env_id))
        desk.latest = data.model_dump()

    @app.get("/")
    async def root() -> Any:
        return {"message": "AtroposLib API"}

    @app.post("/register")
    async def register(registration: Registration) -> Any:
        return {"uuid": uuid.uuid4().int}  # the run was first

    @app.post("/register-env")
    async def register_env(asked: RegisterEnv) -> Any:
        if not desk.has_started:
            return {"status": "wait for trainer to start"}
        number, name = environments.register(asked)
        return {
            "status": "success",
            "env_id": number,
            "wandb_name": name,
            "checkpoint_dir": registration.checkpoint_dir,
            "starting_step": desk.step(),
            "checkpoint_interval": registration.save_checkpoint_interval,
            "num_steps": registration.num_steps,
        }

    @app.post("/disconnect-env")
    async def disconnect_env(asked: EnvIdentifier) -> Any:
        try:
            environments.disconnect(asked.env_id)
        except IndexError as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    @app.get("/wandb_info")
    async def wandb_info() -> Any:
        if not desk.has_registered:
            return {"group": None, "project": None}
        return {"group": registration.wandb_group, "project": registration.wandb_project}

    @app.get("/info")
    async def info() -> Any:
        if not desk.has_registered:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": registration.batch_size, "max_token_len": registration.max_token_len}

    @app.get("/batch")
    async def batch() -> Any:
        if not desk.has_registered:
            message = "Trainer not registered. Call /register first."
            return {"status": "error", "message": message, "batch": []}
        return {"batch": None}  # the run takes them

    @app.get("/latest_example")
    async def latest_example() -> Any:
        return desk.latest

    @app.post("/scored_data")
    async def scored_data(data: ScoredData) -> Any:
        try:
            take(data)
        except Refused as refused:
            raise HTTPException(503 if refused.reason == "full" else 422, str(refused)) from refused
        return {"status": "received"}

    @app.post("/scored_data_list")
    async def scored_data_list(groups: list[ScoredData]) -> Any:
        refusals: list[str] = []
        for data in groups:
            try:
                take(data)
            except Refused as refused:
                refusals.append(str(refused))
        answer = {"status": "received", "groups_processed": len(groups) - len(refusals)}
        return answer | ({"refused": refusals} if refusals else {})

    @app.get("/status")
    async def status() -> Any:
        held, num_free = desk.held()
        return {"current_step": desk.step(), "queue_size": len(held) + num_free if desk.has_started else 0}

    @app.get("/status-env")
    async def status_env(asked: EnvIdentifier) -> Any:
        try:
            return {"current_step": desk.step(), **environments.status(asked.env_id, *desk.held())}
        except UnknownEnvironment as error:
            raise HTTPException(404, str(error)) from error

    @app.get("/reset_data")
    async def reset_data() -> Any:
        return PlainTextResponse("the run keeps its groups", 403)

    return app


class Door:
    """ASGI, around the application: checks token, name and size, and unpacks bodies."""

    def __init__(self, app: Any, token: str = "") -> None:
        self._app = app
        self._token = sha256(token.encode()).digest() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._refusal(headers)
        body = b""
        if refusal is None:
            try:
                async with asyncio.timeout(_BODY_S):
                    body = await _read(headers, receive)
            except TimeoutError:
                refusal = PlainTextResponse("the body did not arrive in time", 408, {"connection": "close"})
            except _Unreadable as error:
                refusal = PlainTextResponse(str(error), error.status, {"connection": "close"})
            except ConnectionError:
                return
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        left_out = (b"content-length", b"content-encoding", b"transfer-encoding")
        kept = [(name, value) for name, value in scope["headers"] if name not in left_out]
        kept.append((b"content-length", str(len(body)).encode()))
        await self._app({**scope, "headers": kept}, replaying(body, receive), send)

    def _refusal(self, headers: dict[bytes, bytes]) -> Any:
        if self._token:
            shown = sha256(_shown(headers)).digest()
            if not hmac.compare_digest(shown, self._token):
                return JSONResponse({"detail": "the token is missing or wrong"}, 401, {"www-authenticate": "Basic"})
        elif not names_this_machine(headers.get(b"host", b"").decode("latin-1")):
            return JSONResponse({"detail": "without a token only 127.0.0.1 and localhost are answered"}, 421)
        return None


class _Unreadable(Exception):
    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def _shown(headers: dict[bytes, bytes]) -> bytes:
    """The token of a request."""
    if key := headers.get(b"x-api-key"):
        return key.strip()
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return value.strip() if kind.lower() == b"bearer" else b""


async def _read(headers: dict[bytes, bytes], receive: Receive) -> bytes:
    """The body, unpacked."""
    too_large = _Unreadable(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", 413)
    parts, num_bytes = list[bytes](), 0
    unpack = zlib.decompressobj(31) if b"gzip" in headers.get(b"content-encoding", b"").lower() else None
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        part = message.get("body", b"")
        if unpack is not None:
            try:
                part = unpack.decompress(part, MAX_BODY_BYTES - num_bytes + 1)
            except zlib.error as error:
                raise _Unreadable("Invalid gzip payload", 400) from error
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body"):
            if unpack is not None and num_bytes and not unpack.eof:
                raise _Unreadable("Invalid gzip payload", 400)
            return b"".join(parts)


async def serve(desk: Desk, *, host: str, port: int, token: str = "") -> Listener:
    """Listen. Raises `ConfigError` for an address in use, and for other machines without a token."""
    if not token and not is_loopback(host):
        raise ConfigError(f"environment.settings.host = {host!r} needs a token: set token_variable")
    try:
        listening = tcp_socket(host, port)
    except OSError as error:
        raise ConfigError(
            f"environment.settings.port = {port}: nothing can listen on that port of {host} ({error.strerror}): name "
            "another one, or 0 for any that is free"
        ) from error
    return await serve_app(Door(create_app(desk), token), listening)
