"""`listen_inference`: the listener of foreign clients, on a Unix socket or a TCP port.

Guarantees: a client loses its connection when it sends no request, or an endless header, or does not read its answer.
There are never more than `MAX_CONNECTIONS` connections, nor more than half of this process's limit of open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket as sockets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.config.addresses import is_loopback
from slipstream.errors import ConfigError
from slipstream.inference.plugin.http.gate import Gate
from slipstream.inference.plugin.recording import Recorder, hook_renderer
from slipstream.inference.plugin.server import EngineServer

MAX_CONNECTIONS = 4096
MAX_HEADER_BYTES = 64 << 10
HEADER_S = 10.0
"""For the headers of a request to arrive."""
UNREAD_S = 120.0
"""For a client to read on, once its connection is full."""
KEEP_ALIVE_S = 5.0
"""After so long without an event, and at most twice that, a stream gets a comment."""
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


class InferenceListener:
    """A running listener."""

    def __init__(self, server: _Server, task: asyncio.Task[None], beats: asyncio.Task[None], address: Any) -> None:
        self.address = address
        """The path of the Unix socket, or (host, port)."""
        self.should_exit = False
        self._server = server
        self._task = task
        self._beats = beats

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.address[1])

    async def close(self) -> None:
        """Take no more requests, and end open ones after two seconds."""
        self._server.should_exit = True
        self._beats.cancel()
        await self._task
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)


async def listen_inference(
    server: EngineServer,
    *,
    socket: str = "",
    host: str = "",
    port: int = 0,
    key: str = "",
    names: Sequence[str] = (),
    listening: sockets.socket | None = None,
) -> InferenceListener:
    """Answer foreign clients on the Unix socket `socket` (of mode 0600), or on `host` and `port` (0: a free one), or
    on a socket of `host` that listens already.

    `names`: the model's names in requests; by default the last part of its path. Raises `ConfigError` for a host within
    reach of other machines without a `key`, and OSError for a taken address.
    """
    if host and not key and not is_loopback(host):
        raise ConfigError(f"{host} can be reached from other machines: give a key, or listen on 127.0.0.1")
    from slipstream.inference.plugin.http.app import create_app  # it imports vLLM's front end

    names = names or [Path(server.settings.model).name]
    app = await create_app(server, names)
    hook_renderer(server.host.vllm.renderer)
    gate = Gate(Recorder(app, server.sessions, names[0]), server, key, is_local=bool(host) and is_loopback(host))
    if listening is None:
        listening = unix_socket(socket) if socket else tcp_socket(host, port)
    listener = await serve(gate, listening)
    app.state.server = listener  # vLLM's handlers ask it to end when vLLM has failed; so does the process
    return listener


async def serve(gate: Gate, listening: sockets.socket) -> InferenceListener:
    """Run a gate on a bound socket."""
    protocol = type("Limited", (_Limited,), {"max_connections": _max_connections()})
    config = uvicorn.Config(
        gate,  # type: ignore[arg-type]
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    runner = _Server(config)
    address = listening.getsockname()
    task = asyncio.create_task(runner.serve([listening]))
    async with asyncio.timeout(_START_S):
        while not runner.started:
            if task.done():
                task.result()
                raise OSError(f"nobody listens on {address}")
            await asyncio.sleep(0.01)
    return InferenceListener(runner, task, asyncio.create_task(_keep_alive(gate)), address)


async def _keep_alive(gate: Gate) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE_S)
        for answer in list(gate.answers):
            answer.beat()


def unix_socket(path: str) -> sockets.socket:
    """Bound to `path`, for the same user alone."""
    made = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    made.bind(path)
    os.chmod(path, 0o600)  # nobody can connect before `listen`
    return made


def tcp_socket(host: str, port: int) -> sockets.socket:
    """Bound to a host (by default 127.0.0.1) and port. Raises OSError for a taken address."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    made = sockets.socket(family, sockets.SOCK_STREAM)
    made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    try:
        made.bind((host or "127.0.0.1", port))
    except OSError:
        made.close()
        raise
    return made


def _max_connections() -> int:
    """The limit, after raising this process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return min(MAX_CONNECTIONS, soft // 2)
