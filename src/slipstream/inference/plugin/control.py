"""The control listener of an engine server: the routes of a child engine, behind a token and a lease.

Guarantees: without the token nothing is answered but the status; tokens are compared in constant time. On a loopback
port without a token web pages are refused. Only the holder of the lease changes the engine, or asks it for completions.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket as sockets
import ssl
import stat
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from slipstream.config.addresses import names_this_machine
from slipstream.inference.lending import AGENTS, LEASE_HEADER, Held, Lease, ServerFacts, Sight, Terms
from slipstream.inference.plugin.agent_requests import AgentRequests
from slipstream.inference.plugin.routes import application, errors_as_text
from slipstream.inference.plugin.server import EngineServer

_FREE = frozenset(
    {"/health", "/facts", "/get_world_size", "/get_engine_type", "/lease", "/lease-end", "/sees", "/verify"}
)
"""Paths without the lease."""
_MAX_SEEN_BYTES = 4096
_SHUTDOWN_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def listen_control(
    server: EngineServer,
    facts: ServerFacts,
    lease: Lease,
    listening: sockets.socket,
    *,
    token: str = "",
    tls: ssl.SSLContext | None = None,
) -> web.AppRunner:
    """Answer a run on a listening socket."""
    guard = _guard(token, lease, is_open=not token and listening.family != sockets.AF_UNIX)
    app = application(server, [errors_as_text, guard, _proofs(server, lease)], lease.describe)
    app.add_routes(_routes(server, facts, lease))
    agents = AgentRequests(server, facts.model)
    app.router.add_route("*", AGENTS + "/v1/{path:.*}", agents.forward)
    app.on_cleanup.append(lambda _: agents.close())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    await web.SockSite(runner, listening, ssl_context=tls).start()
    return runner


def _routes(server: EngineServer, facts: ServerFacts, lease: Lease) -> list[web.RouteDef]:
    lending = asyncio.Lock()

    async def take(request: web.Request) -> web.Response:
        terms = msgspec.msgpack.decode(await request.read(), type=Terms)
        async with lending:
            if lease.take(terms):
                try:
                    await server.lend(terms)
                except BaseException:
                    lease.end(terms.id)
                    raise
        return _packed({"instance": lease.instance, "world_size": facts.world_size})

    async def end(request: web.Request) -> web.Response:
        lease.end(request.headers.get(LEASE_HEADER, ""))
        return _packed(True)

    async def sees(request: web.Request) -> web.Response:
        sight = msgspec.msgpack.decode(await request.read(), type=Sight)
        return _packed(await asyncio.to_thread(_sees, sight))

    async def world_size(_: web.Request) -> web.Response:
        return web.json_response({"world_size": facts.world_size})

    async def engine_type(_: web.Request) -> web.Response:
        return web.json_response({"engine_type": "vllm"})

    async def told(_: web.Request) -> web.Response:
        return _packed(facts)

    return [
        web.get("/facts", told),
        web.get("/get_world_size", world_size),
        web.route("*", "/get_engine_type", engine_type),
        web.post("/lease", take),
        web.post("/lease-end", end),
        web.post("/sees", sees),
    ]


def _packed(answer: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(answer))


def _sees(sight: Sight) -> bool:
    """Whether a small file has this content."""
    try:
        descriptor = os.open(sight.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return False
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        return hmac.compare_digest(hashlib.sha256(file.read(_MAX_SEEN_BYTES)).hexdigest(), sight.sha256)


def _guard(token: str, lease: Lease, *, is_open: bool) -> Any:
    """Refuses calls without the token, and of runs without the lease. `is_open`: every program of this machine may
    call, but no web page in its browser."""
    wanted = hashlib.sha256(token.encode()).digest() if token else b""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if wanted and not hmac.compare_digest(hashlib.sha256(_shown(request)).digest(), wanted):
            if request.path == "/health":
                answer = await handler(request)
                return web.json_response(
                    {"status": "ready" if answer.status == 200 else "starting"}, status=answer.status
                )
            return web.Response(
                status=401, text="the token is missing or wrong", headers={"www-authenticate": "Bearer"}
            )
        if is_open and ("origin" in request.headers or not names_this_machine(request.host)):
            return web.Response(status=421, text="without a token only programs on this machine are answered")
        try:
            if request.path not in _FREE:
                lease.check(request.headers.get(LEASE_HEADER, ""))
            return await handler(request)
        except Held as held:
            return web.Response(body=msgspec.json.encode(held.refusal), status=423)

    return guard


def _proofs(server: EngineServer, lease: Lease) -> Any:
    """Notes the origin of the weights."""

    @web.middleware
    async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.path == "/apply" and server.service.is_serving:
            lease.gave_weights()
        return answer

    return noted


def _shown(request: web.Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
