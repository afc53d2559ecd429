"""An engine server: `python -m slipstream.inference.plugin.main --serve JSON`.

Guarantees: both addresses are bound before vLLM is imported, and answer 503 until the files' weights are loaded and
verified. The process ends at SIGTERM and SIGINT, or when vLLM dies or hangs.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import os
import signal
import socket as sockets
import ssl
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.addresses import is_loopback, url_of
from slipstream.errors import ConfigError
from slipstream.inference.lending import KEY_VARIABLE, TOKEN_VARIABLE, Lease, ServerFacts
from slipstream.inference.settings import EngineSettings
from slipstream.nodes.protocol import interface_of
from slipstream.processes.rendezvous import INTERFACE

ENDS = (signal.SIGTERM, signal.SIGINT)
_FURTHER_PORTS = 100
_BUSY_S = 10.0


class ServerSettings(msgspec.Struct, frozen=True):
    """Made by `slipstream engine`."""

    engine: EngineSettings
    control: str
    """`unix:/path`, or `HOST:PORT`; after a path with `/` at its end comes the port of `inference`."""
    host: str
    port: int
    name: str
    """The model's, for foreign clients."""
    data_parallel_size: int = 1
    certificate: str = ""
    private_key: str = ""


class Doors:
    """The two listening sockets of a server, with an answer during its start."""

    def __init__(self, settings: ServerSettings) -> None:
        """Binds both. Raises `ConfigError`."""
        self.settings = settings
        self.token, self.key = os.environ.pop(TOKEN_VARIABLE, ""), os.environ.pop(KEY_VARIABLE, "")
        host, _, port = settings.control.rpartition(":")
        is_unix = settings.control.startswith("unix:")
        if not is_unix:
            _check_host(host, self.token, f"--control {settings.control}", TOKEN_VARIABLE)
        _check_host(settings.host, self.key, f"--host {settings.host}", KEY_VARIABLE)
        self.tls = _tls(settings)
        self.inference = bound(settings.host, settings.port)
        if is_unix:
            own = f"{self.inference.getsockname()[1]}.sock" if settings.control.endswith("/") else ""
            self.url = settings.control + own
            self.control = _bound_unix(self.url.removeprefix("unix:"))
        else:
            self.control = bound(host, int(port))
            scheme = "https" if self.tls else "http"
            self.url = f"{scheme}://{_shown(host, self.control)}"
            _take_interface(host)

    def announce(self) -> None:
        """Print both addresses, the control address as a run file has it."""
        inference, asked = _shown(self.settings.host, self.inference), self.settings.port
        taken = f" (port {asked} is taken)" if asked not in (0, self.inference.getsockname()[1]) else ""
        lines = [f"inference at http://{inference}/v1{taken}; the lines of a run file:", "[[inference.servers]]"]
        lines.append(f'url = "{self.url}"')
        if self.token:
            lines.append(f'token_variable = "{TOKEN_VARIABLE}"')
        with contextlib.suppress(OSError):
            print("\n".join(lines), flush=True)

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Answer 503 on both sockets within the block."""
        servers = [_busy_server(self.control, self.tls), _busy_server(self.inference, None)]
        threads = [threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for server, thread in zip(servers, threads, strict=True):
                server.shutdown()
                thread.join()

    def close(self) -> None:
        """Remove the control socket's file."""
        if self.url.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(self.url.removeprefix("unix:"))

    async def open(self, server: Any, stack: contextlib.AsyncExitStack) -> None:
        """Answer on both as an engine; `stack` closes them."""
        from slipstream.inference.plugin.control import listen_control
        from slipstream.inference.plugin.http.listener import listen_inference  # it imports vLLM's front end

        lease = Lease()
        inference = url_of(self.settings.host, self.inference.getsockname()[1])
        facts = msgspec.structs.replace(_facts(self.settings), inference=inference, needs_key=bool(self.key))
        runner = await listen_control(server, facts, lease, self.control, token=self.token, tls=self.tls)
        stack.push_async_callback(runner.cleanup)
        guests = await listen_inference(
            server,
            listening=self.inference,
            host=self.settings.host,
            key=self.key,
            names=[self.settings.name],
            serves_run=lease.serves,
        )
        stack.push_async_callback(guests.close)


def bound(host: str, port: int) -> sockets.socket:
    """A listening socket at this port of a host, or at one of the next if it is taken."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    last: OSError | None = None
    for each in range(port, min(65_536, port + _FURTHER_PORTS)) if port else (0,):
        made = sockets.socket(family, sockets.SOCK_STREAM)
        made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            made.bind((host, each))
            made.listen(1024)
        except OSError as error:
            made.close()
            last = error
            if error.errno != errno.EADDRINUSE:
                break
        else:
            return made
    reason = last.strerror if last is not None else "no port is left"
    raise ConfigError(f"nothing can listen at {host}:{port} ({reason}): give an address of this host")


def _bound_unix(path: str) -> sockets.socket:
    """The socket of a path, of mode 0600; a dead one is replaced."""
    with contextlib.suppress(OSError), sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(1.0)
        probe.connect(path)
        raise ConfigError(f"another engine answers at unix:{path}: give another --control")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    made, mask = sockets.socket(sockets.AF_UNIX), os.umask(0o177)
    try:
        made.bind(path)
    except OSError as error:
        raise ConfigError(f"--control unix:{path} is not possible ({error}): give another path") from error
    finally:
        os.umask(mask)
    made.listen(1024)
    return made


def _check_host(host: str, secret: str, option: str, variable: str) -> None:
    if not secret and not is_loopback(host):
        raise ConfigError(f"{option} can be reached from other machines: put a secret into {variable}")


def _take_interface(host: str) -> None:
    """Weights come over the interface of the control address."""
    if os.environ.get(INTERFACE):
        return
    if interface := interface_of(host):
        os.environ[INTERFACE] = interface
    else:
        raise ConfigError(
            f"no network interface has the address {host} for weights: give --control this host's "
            f"address, or set {INTERFACE}"
        )


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    if not settings.certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.certificate, settings.private_key or None)
    except OSError as error:
        raise ConfigError(f"--tls-cert {settings.certificate} cannot be used ({error}): give a PEM file") from error
    return context


def _shown(host: str, listening: sockets.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{listening.getsockname()[1]}"


class _Busy(http.server.BaseHTTPRequestHandler):
    timeout = _BUSY_S

    def _answer(self) -> None:
        body = json.dumps({"status": "starting", "reason": "loading weights"}).encode()
        self.send_response(503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_HEAD = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def address_string(self) -> str:
        """A Unix socket has none."""
        return ""


class _BusyServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        """See `socketserver`; a handshake must not hold up the others."""
        connection, address = self.socket.accept()
        connection.settimeout(_BUSY_S)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: it is the client's matter."""


def _busy_server(listening: sockets.socket, tls: ssl.SSLContext | None) -> _BusyServer:
    server = _BusyServer(("", 0), _Busy, bind_and_activate=False)
    server.socket.close()
    server.socket = listening.dup() if tls is None else tls.wrap_socket(listening.dup(), server_side=True)
    return server


def with_digests(settings: EngineSettings) -> EngineSettings:
    """The settings with the version of the files, to be verified once they are loaded."""
    import torch

    from slipstream.records import Version
    from slipstream.weights.fingerprint import describe, digest
    from slipstream.weights.model_files import HEAD, has_own_head, read_model_folder

    dtype, folder = getattr(torch, settings.dtype), Path(settings.model)
    whole = json.loads((folder / "config.json").read_text())
    is_tied = whole.get("tie_word_embeddings", whole.get("text_config", {}).get("tie_word_embeddings", False))
    left_out = HEAD if is_tied and not has_own_head(folder) else ""
    stored = (
        (name, tensor) for name, tensor in read_model_folder(folder) if tensor.is_floating_point() and name != left_out
    )
    parameters = tuple(spec for name, tensor in stored for spec in describe([(name, tensor.to(dtype))]))
    return msgspec.structs.replace(settings, version=Version(0, 0, digest(parameters)), parameters=parameters)


def _facts(settings: ServerSettings) -> ServerFacts:
    from vllm.platforms import current_platform

    engine, on_gpu = settings.engine, not current_platform.is_cpu()
    world_size = engine.tensor_parallel_size * settings.data_parallel_size
    gpus: tuple[str, ...] = ()
    if on_gpu:  # by NVML: this process has no use for a CUDA context
        with contextlib.suppress(Exception):
            gpus = tuple(str(current_platform.get_device_uuid(each)) for each in range(world_size))
    return ServerFacts(
        model=settings.name,
        config=json.loads((Path(engine.model) / "config.json").read_text()),
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_bytes=engine.kv_cache_bytes or 0,
        world_size=world_size,
        on_gpu=on_gpu,
        gpus=gpus,
        enforce_eager=engine.enforce_eager,
        fp32_head=engine.fp32_head,
        fp32_residual=engine.fp32_residual,
        shared_kernels=engine.shared_kernels,
        replay_experts=engine.replay_experts,
        lora_rank=engine.lora_rank or 0,
    )
