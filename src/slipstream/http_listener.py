"""An HTTP server in an event loop of ours: uvicorn with limits on connections and headers.

Guarantees: a client loses its connection when it sends no request, or an endless header, or does not read its answer.
There are never more than `MAX_CONNECTIONS` connections, nor more than half of this process's limit of open files. The
last eighth of them gets the answer 503, and further ones none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket as sockets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Message, Receive
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.config.addresses import family_of
from slipstream.patience import lasting

MAX_CONNECTIONS = 4096
MAX_HEADER_BYTES = 64 << 10
HEADER_S = 10.0
"""For the headers of a request to arrive."""
UNREAD_S = 120.0
"""For a client to read on, once its connection is full."""
_IDLE_S = 75
_SHUTDOWN_S = 2
_START_S = 30.0
_Protocol: Any = AutoHTTPProtocol


class _Limited(_Protocol):
    """uvicorn's protocol, with limits before a request and after its answer."""

    max_connections = MAX_CONNECTIONS
    _header_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        if len(self.connections) > self.max_connections - self.max_connections // 8:
            self.limit_concurrency = 0  # of this connection alone: uvicorn then answers 503, and closes it
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._is_between:
            self._header_bytes += len(data)
            self._await_headers()
        super().data_received(data)
        if not self._is_between:
            self._header_bytes = 0
            self._header_timer = _cancel(self._header_timer)
        elif self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._unread_timer = _cancel(self._unread_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._header_timer = _cancel(self._header_timer)
        self._unread_timer = _cancel(self._unread_timer)
        super().connection_lost(exc)

    @property
    def _is_between(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_S, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """The process has its own handlers."""
        yield


class Listener:
    """A running server."""

    def __init__(self, server: _Server, tasks: list[asyncio.Task[None]], address: Any) -> None:
        self.address = address
        """The path of the Unix socket, or (host, port)."""
        self._server = server
        self._tasks = tasks

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.address[1])

    async def close(self) -> None:
        """Take no more requests, and end open ones after two seconds."""
        self._server.should_exit = True
        for task in self._tasks[1:]:
            task.cancel()
        await self._tasks[0]
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)


async def serve(
    app: Any, listening: sockets.socket, *, every_s: float = 0.0, beat: Callable[[], None] | None = None
) -> Listener:
    """Run an ASGI application on a bound socket. `beat`: called every `every_s` seconds."""
    config = uvicorn.Config(
        app,
        http=limited_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server, address = _Server(config), listening.getsockname()
    task = lasting(server.serve([listening]))
    async with asyncio.timeout(_START_S):
        while not server.started:
            if task.done():
                task.result()
                raise OSError(f"nobody listens on {address}")
            await asyncio.sleep(0.01)
    return Listener(server, [task, *([lasting(_beat(every_s, beat))] if beat is not None else [])], address)


async def _beat(every_s: float, beat: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(every_s)
        beat()


def unix_socket(path: str) -> sockets.socket:
    """Bound to `path`, for the same user alone."""
    made = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    made.bind(path)
    os.chmod(path, 0o600)  # nobody can connect before `listen`
    return made


def tcp_socket(host: str, port: int) -> sockets.socket:
    """Bound to a host (by default 127.0.0.1) and port. Raises OSError for a taken address."""
    made = sockets.socket(family_of(host), sockets.SOCK_STREAM)
    made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    try:
        made.bind((host or "127.0.0.1", port))
    except OSError:
        made.close()
        raise
    return made


def replaying(body: bytes, receive: Receive) -> Receive:
    """ASGI's `receive` with a body read before."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def limited_protocol() -> Any:
    """uvicorn's protocol with the limits of this process."""
    return type("Limited", (_Limited,), {"max_connections": _max_connections()})


def _max_connections() -> int:
    """The limit, after raising this process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return min(MAX_CONNECTIONS, soft // 2)
