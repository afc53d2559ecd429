"""The HTTP face of the engine's server: bodies are MessagePack records, errors one sentence of text."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from slipstream.errors import WeightsError
from slipstream.records import Completion, GenerateRequest, ParameterSpec, Ticket, Version, encode

if TYPE_CHECKING:
    from slipstream.inference.plugin.server import EngineServer


class OutOfService(Exception):
    """The engine may not answer now; the text says why."""


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


def _generation(server: EngineServer) -> list[web.RouteDef]:
    """Requests, each to its end or until it is cancelled."""
    running: dict[str, asyncio.Task[Completion]] = {}
    standing: set[str] = set()
    """Requests that have come, and wait for the engine to be in service."""

    async def generate(request: web.Request) -> web.StreamResponse:
        """Many requests in, each completion out as soon as it is there: frames of length and MessagePack."""
        requests = msgspec.msgpack.decode(await request.read(), type=list[GenerateRequest])
        names = {r.id for r in requests}
        standing.update(names)
        try:
            await server.until_in_service(max(r.timeout_s for r in requests))
            response = web.StreamResponse()
            await response.prepare(request)
            tasks = {r.id: asyncio.create_task(server.generate(r)) for r in requests if r.id in standing}
        finally:
            standing.difference_update(names)
        running.update(tasks)
        try:
            for finished in asyncio.as_completed(list(tasks.values())):
                try:
                    frame = encode(await finished)
                except asyncio.CancelledError:
                    if (ours := asyncio.current_task()) is not None and ours.cancelling():
                        raise  # the client is gone, and with it go all of its requests
                    continue  # by /cancel: its client no longer waits for it
                await response.write(len(frame).to_bytes(4, "big") + frame)
        except Exception:
            # The status is sent already: what tells the client that nothing more will come is the connection's end.
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            for id_, task in tasks.items():
                task.cancel()
                running.pop(id_, None)
        return response

    async def cancel(request: web.Request) -> web.Response:
        for id_ in msgspec.msgpack.decode(await request.read(), type=list[str]):
            standing.discard(id_)
            if id_ in running:
                running[id_].cancel()
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
    except OutOfService as error:
        return web.Response(status=503, text=str(error))
    except WeightsError as error:
        return web.Response(status=409, text=str(error))
    except msgspec.ValidationError as error:
        return web.Response(status=400, text=f"not a valid request: {error}")
    except Exception as error:  # noqa: BLE001 (the caller gets it and decides)
        return web.Response(status=500, text=f"{type(error).__name__}: {error}")
