"""The HTTP face of the engine's server: bodies are MessagePack records, errors one sentence of text."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
from aiohttp import web

from slipstream.errors import WeightsError
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.service import OutOfService
from slipstream.processes.channel import pack
from slipstream.records import (
    Completion,
    GenerateRequest,
    ParameterSpec,
    SessionOpening,
    SessionTurn,
    Ticket,
    Version,
    encode,
)

_MAX_BODY_BYTES = 1 << 30
_SHUTDOWN_S = 2.0
"""Time that open calls get when vLLM has died, as it may never answer them."""
_EARLY_S = 600.0
"""How long a cancellation is remembered that came before its request."""
_BEGUN_AT_ONCE = 8
"""A request takes a fifth of a millisecond to begin: other calls, such as the end of an update, come between."""
_log = logging.getLogger("slipstream.engine")


async def listen(server: EngineServer, socket: str) -> web.AppRunner:
    """Start the HTTP server on a Unix socket of mode 0600."""
    app = application(server, [errors_as_text])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    os.chmod(socket, 0o600)
    return runner


def application(
    server: EngineServer, middlewares: Sequence[Any], more: Callable[[], dict[str, Any]] = dict[str, Any]
) -> web.Application:
    """All routes of the engine's server; `more` is told by `/health`, too."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=middlewares)
    app.add_routes(routes(server, more))
    return app


def routes(server: EngineServer, more: Callable[[], dict[str, Any]] = dict[str, Any]) -> list[web.RouteDef]:
    """See `application`."""

    async def health(_: web.Request) -> web.Response:
        state = server.health()
        state = msgspec.structs.replace(state, info=state.info | more())
        return web.Response(
            body=msgspec.json.encode(state),
            status=200 if state.status == "ready" else 503,
            content_type="application/json",
        )

    return [web.get("/health", health), *_generation(server), *_weights(server), *_sessions(server)]


class _Cancelled:
    """Ids of requests that were cancelled before they arrived: `/cancel` has a connection of its own and may overtake
    `/generate`."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def add(self, id_: str) -> None:
        now = time.monotonic()
        self._since = {known: since for known, since in self._since.items() if now - since < _EARLY_S} | {id_: now}

    def take(self, id_: str) -> bool:
        return self._since.pop(id_, None) is not None


def _generation(server: EngineServer) -> list[web.RouteDef]:
    """Routes of requests: /generate and /cancel."""
    running: dict[str, asyncio.Task[Completion]] = {}
    cancelled_early = _Cancelled()

    async def answered(request: GenerateRequest) -> Completion:
        """The completion, or an `abort` for a cancelled request, which nobody waits for."""
        cancelled = Completion(request.id, [], None, "abort", error="was cancelled")
        if cancelled_early.take(request.id):
            return cancelled
        running[request.id] = cast("asyncio.Task[Completion]", asyncio.current_task())
        try:
            return await server.generate(request)
        except asyncio.CancelledError:
            return cancelled
        finally:
            del running[request.id]

    async def generate(request: web.Request) -> web.StreamResponse:
        """Takes a list of requests and streams each completion as it finishes, in frames (`processes.channel`) of
        MessagePack."""
        requests = msgspec.msgpack.decode(await request.read(), type=list[GenerateRequest])
        counts = Counter(r.id for r in requests)
        if twice := next((id_ for id_, count in counts.items() if count > 1 or id_ in running), None):
            return web.Response(status=400, text=f"request {twice} is running already: give each one its own id")
        await server.service.until_admitted()
        response = web.StreamResponse()
        await response.prepare(request)
        tasks: list[asyncio.Task[Completion]] = []
        finished: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()
        try:
            for each in requests:
                task = asyncio.create_task(answered(each))
                task.add_done_callback(finished.put_nowait)
                tasks.append(task)
                if len(tasks) % _BEGUN_AT_ONCE == 0:
                    await asyncio.sleep(0)
            left = len(tasks)
            while left:
                # Requests of one step of vLLM end together: a write for each would take longer than the rest.
                ended = [await finished.get(), *(finished.get_nowait() for _ in range(finished.qsize()))]
                left -= len(ended)
                await response.write(b"".join(pack(encode(each.result())) for each in ended))
        except Exception:
            # The status line is sent already, so only a broken connection can tell the client of the failure.
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            for task in tasks:
                task.cancel()
        return response

    async def cancel(request: web.Request) -> web.Response:
        for id_ in msgspec.msgpack.decode(await request.read(), type=list[str]):
            if id_ in running:
                running[id_].cancel()
            else:
                cancelled_early.add(id_)
        return web.Response(body=msgspec.msgpack.encode(True))

    return [web.post("/generate", generate), web.post("/cancel", cancel)]


def _weights(server: EngineServer) -> list[web.RouteDef]:
    """Routes of weight updates, and of sleep and wake."""
    return [
        _post("/apply", server.apply, Ticket),
        _post("/verify", server.verify, Ticket),
        _post("/share", server.share, tuple[ParameterSpec, ...]),
        _post("/fence", server.fence),
        _post("/go-on", server.go_on, Version),
        _post("/leave", server.leave),
        _post("/sleep", server.sleep),
        _post("/wake", server.wake),
    ]


def _sessions(server: EngineServer) -> list[web.RouteDef]:
    """Routes of agents' sessions; their requests come to the listener of foreign clients."""

    async def open_sessions(openings: list[SessionOpening]) -> None:
        for opening in openings:
            server.sessions.open(opening)

    async def close_sessions(keys: list[str]) -> list[list[SessionTurn] | None]:
        return [server.sessions.close(key) for key in keys]

    return [
        _post("/sessions-open", open_sessions, list[SessionOpening]),
        _post("/sessions-close", close_sessions, list[str]),
    ]


def _post(path: str, call: Callable[..., Awaitable[Any]], takes: Any = None) -> web.RouteDef:
    """A route to `call`; the body is its argument, if it takes one; the answer is its result, or true."""

    async def handler(request: web.Request) -> web.Response:
        arguments = () if takes is None else (msgspec.msgpack.decode(await request.read(), type=takes),)
        found = await call(*arguments)
        return web.Response(body=msgspec.msgpack.encode(True if found is None else found))

    return web.post(path, handler)


@web.middleware
async def errors_as_text(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer a refused or failed call with a status and one sentence; the server goes on."""
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionError):
        raise
    except OutOfService as error:
        return web.Response(status=503, text=str(error))
    except WeightsError as error:
        return web.Response(status=409, text=str(error))
    except msgspec.ValidationError as error:
        return web.Response(status=400, text=f"not a valid request: {error}")
    except Exception as error:  # noqa: BLE001 (the caller gets it and decides; the log has its traceback)
        _log.exception("%s failed", request.path)
        return web.Response(status=500, text=f"{type(error).__name__}: {error}")
