"""The HTTP face of the engine's server: bodies are MessagePack records, errors one sentence of text."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import msgspec
from aiohttp import web

from slipstream.errors import WeightsError
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.service import OutOfService
from slipstream.records import Completion, GenerateRequest, ParameterSpec, Ticket, Version, encode

_MAX_BODY_BYTES = 1 << 30
_SHUTDOWN_S = 2.0
"""For calls that are being answered when the engine has died: vLLM may never answer them."""
_EARLY_S = 600.0
"""How long a cancellation is remembered whose request has not begun."""
_log = logging.getLogger("slipstream.engine")


async def listen(server: EngineServer, socket: str) -> web.AppRunner:
    """Begin to answer on a Unix socket, which its user alone may open."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[errors_as_text])
    app.add_routes(routes(server))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    os.chmod(socket, 0o600)
    return runner


def routes(server: EngineServer) -> list[web.RouteDef]:
    """The HTTP face of the engine."""

    async def health(_: web.Request) -> web.Response:
        state = server.health()
        return web.Response(
            body=msgspec.json.encode(state),
            status=200 if state.status == "ready" else 503,
            content_type="application/json",
        )

    return [web.get("/health", health), *_generation(server), *_weights(server)]


def _repeated(ids: Iterable[str]) -> list[str]:
    return [id_ for id_, count in Counter(ids).items() if count > 1]


class _Cancelled:
    """Ids of requests that were given up before they began: a cancellation has a connection of its own, and may come
    first."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def add(self, id_: str) -> None:
        now = time.monotonic()
        self._since = {known: since for known, since in self._since.items() if now - since < _EARLY_S} | {id_: now}

    def take(self, id_: str) -> bool:
        return self._since.pop(id_, None) is not None


def _generation(server: EngineServer) -> list[web.RouteDef]:
    """Requests, each to its end or until it is cancelled."""
    running: dict[str, asyncio.Task[Completion]] = {}
    early = _Cancelled()

    async def answered(request: GenerateRequest) -> Completion:
        """The completion; of one that was cancelled, which nobody waits for, that it was."""
        cancelled = Completion(request.id, [], None, "abort", error="was cancelled")
        if early.take(request.id):
            return cancelled
        running[request.id] = cast("asyncio.Task[Completion]", asyncio.current_task())
        try:
            return await server.generate(request)
        except asyncio.CancelledError:
            return cancelled
        finally:
            del running[request.id]

    async def generate(request: web.Request) -> web.StreamResponse:
        """Many requests in, each completion out as soon as it is there: frames of length and MessagePack."""
        requests = msgspec.msgpack.decode(await request.read(), type=list[GenerateRequest])
        if twice := [r.id for r in requests if r.id in running] or _repeated(r.id for r in requests):
            return web.Response(status=400, text=f"request {twice[0]} is running already: give each one its own id")
        await server.service.until_serving()
        response = web.StreamResponse()
        await response.prepare(request)
        tasks = [asyncio.create_task(answered(r)) for r in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                frame = encode(await finished)
                await response.write(len(frame).to_bytes(4, "big") + frame)
        except Exception:
            # The status is sent already: what tells the client that nothing more will come is the connection's end.
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
                early.add(id_)
        return web.Response(body=msgspec.msgpack.encode(True))

    return [web.post("/generate", generate), web.post("/cancel", cancel)]


def _weights(server: EngineServer) -> list[web.RouteDef]:
    """What happens to the weights, and to the memory that they are in."""

    async def apply(request: web.Request) -> web.Response:
        ticket = msgspec.msgpack.decode(await request.read(), type=Ticket)
        return web.Response(body=encode(await server.apply(ticket)))

    async def sleep(_: web.Request) -> web.Response:
        await server.sleep()
        return web.Response(body=msgspec.msgpack.encode(True))

    async def wake(_: web.Request) -> web.Response:
        await server.wake()
        return web.Response(body=msgspec.msgpack.encode(True))

    async def share(request: web.Request) -> web.Response:
        parameters = msgspec.msgpack.decode(await request.read(), type=tuple[ParameterSpec, ...])
        return web.Response(body=msgspec.msgpack.encode(await server.share(parameters)))

    async def fence(_: web.Request) -> web.Response:
        await server.fence()
        return web.Response(body=msgspec.msgpack.encode(True))

    async def go_on(request: web.Request) -> web.Response:
        await server.go_on(msgspec.msgpack.decode(await request.read(), type=Version))
        return web.Response(body=msgspec.msgpack.encode(True))

    async def verify(request: web.Request) -> web.Response:
        ticket = msgspec.msgpack.decode(await request.read(), type=Ticket)
        return web.Response(body=encode(await server.verify(ticket)))

    return [
        web.post("/apply", apply),
        web.post("/verify", verify),
        web.post("/share", share),
        web.post("/fence", fence),
        web.post("/go-on", go_on),
        web.post("/sleep", sleep),
        web.post("/wake", wake),
    ]


@web.middleware
async def errors_as_text(request: web.Request, handler: Any) -> web.StreamResponse:
    """A refused or failed call answers with one sentence; the server lives on, unless its engine is dead."""
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
