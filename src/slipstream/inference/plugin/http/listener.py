"""`listen_inference`: the listener of foreign clients, on a Unix socket or a TCP port."""

from __future__ import annotations

import socket as sockets
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.config.addresses import is_loopback
from slipstream.errors import ConfigError
from slipstream.http_listener import Listener, tcp_socket, unix_socket
from slipstream.http_listener import serve as serve_app
from slipstream.inference.plugin.http.gate import Gate
from slipstream.inference.plugin.http.recorder import Recorder
from slipstream.inference.plugin.recording import hook_renderer
from slipstream.inference.plugin.server import EngineServer

KEEP_ALIVE_S = 5.0
"""After so long without an event, and at most twice that, a stream gets a comment."""


async def listen_inference(
    server: EngineServer,
    *,
    socket: str = "",
    host: str = "",
    port: int = 0,
    key: str = "",
    names: Sequence[str] = (),
    listening: sockets.socket | None = None,
    serves_run: Callable[[str], bool] | None = None,
) -> Listener:
    """Answer foreign clients on the Unix socket `socket` (of mode 0600), or on `host` and `port` (0: a free one), or
    on a socket of `host` that listens already.

    `names`: the model's names in requests; by default the last part of its path. `serves_run`: see `Gate`.
    Raises `ConfigError` for a host within reach of other machines without a `key`, and OSError for a taken address.
    """
    if host and not key and not is_loopback(host):
        raise ConfigError(f"{host} can be reached from other machines: give a key, or listen on 127.0.0.1")
    from slipstream.inference.plugin.http.app import create_app  # it imports vLLM's front end

    names = names or [Path(server.settings.model).name]
    app = await create_app(server, names)
    hook_renderer(server.host.vllm.renderer)
    recorder, is_local = Recorder(app, server.sessions, names[0]), bool(host) and is_loopback(host)
    gate = Gate(recorder, server, key, is_local=is_local, serves_run=serves_run)
    if listening is None:
        listening = unix_socket(socket) if socket else tcp_socket(host, port)
    listener = await serve(gate, listening)
    app.state.server = (
        listener  # vLLM's handlers set its `should_exit` when vLLM has failed: the process ends by itself
    )
    return listener


async def serve(gate: Gate, listening: sockets.socket) -> Listener:
    """Run a gate on a bound socket."""
    return await serve_app(gate, listening, every_s=KEEP_ALIVE_S, beat=gate.beat)
