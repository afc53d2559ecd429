"""vLLM's own OpenAI-compatible server: in this process's place (`become_server`), or as a child (`ServerChild`).

Run as `__main__`, this module is that child.

Guarantees: a server with a key answers nothing but `/health` without it, on any path, and no argument list holds the
key. A server without one refuses requests by a foreign host name (DNS rebinding). A child ends with the process that
started it, and its shared memory goes with the temporary folder of its log.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import runpy
import signal
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slipstream.config.addresses import names_this_machine
from slipstream.errors import DeadlineError, EngineError
from slipstream.processes import exits
from slipstream.processes.launchers import LOCAL, Resources
from slipstream.processes.temporary import FOLDER_VARIABLE

KEY_VARIABLE = "VLLM_API_KEY"
_HOST_VARIABLE = "SLIPSTREAM_HOST"
"""Environment variable: the host in the server's arguments; clients may name it, too."""
_MODULE = "vllm.entrypoints.openai.api_server"
_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0
_END_S = 10.0


def become_server(arguments: Sequence[str], host: str, port: int, api_key: str) -> NoReturn:
    """Replace this process (exec) with vLLM's server. Its log is standard error."""
    exits.prepare_exec()
    os.dup2(2, 1)
    command = [sys.executable, "-P", "-m", _MODULE, *_listening(arguments, host, port, api_key)]
    os.execve(sys.executable, command, _environment(host, api_key))


class ServerChild:
    """vLLM's server as a child of this process, on a loopback port."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        port: int,
        api_key: str,
        log_path: Path,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """`folder`: its temporary folder, by default the log's. `variables`: more of its environment."""
        self._url = f"http://127.0.0.1:{port}"
        self._log_path = log_path
        environment = {**_environment("127.0.0.1", api_key), **(variables or {})}
        environment[FOLDER_VARIABLE] = str(folder or log_path.parent)
        arguments = _listening(arguments, "127.0.0.1", port, api_key)
        self._process = LOCAL.launch(__name__, arguments, environment, Resources(gpus=gpus), output=log_path)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    def ending(self) -> str:
        """How it ended, with the last error in its log."""
        return f"it {exits.ending(self._process.poll(), self._log_path)}"

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it answers. Raises `EngineError` when it ends."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineError(f"vLLM's server did not start: {self.ending()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=_HEALTH_TIMEOUT_S):
                return
            time.sleep(_POLL_S)
        raise DeadlineError(f"vLLM's server was not ready after {timeout_s:g} s (--start-timeout): {self.ending()}")

    def stop(self) -> None:
        """End it and its process group."""
        self._process.end(_END_S, signal.SIGTERM)


def _listening(arguments: Sequence[str], host: str, port: int, api_key: str) -> list[str]:
    guard = f"slipstream.inference.openai_server.{'KeyGuard' if api_key else 'HostGuard'}"
    return [*arguments, "--host", host, "--port", str(port), "--middleware", guard]


def _environment(host: str, api_key: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    environment |= {**exits.OFFLINE, **exits.SAFE_PATH, _HOST_VARIABLE: host}
    return environment | ({KEY_VARIABLE: api_key} if api_key else {})


class KeyGuard:
    """ASGI middleware: nothing but `/health` is answered without the key in `VLLM_API_KEY`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = os.environ[KEY_VARIABLE].encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass on, or answer 401."""
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            headers = [(b"www-authenticate", b"Bearer")]
            await _refuse(scope, send, 401, "Unauthorized", "the API key is missing or wrong", headers)

    def _has_key(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._wanted)


class HostGuard:
    """ASGI middleware: requests name this machine itself as their host."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._own = os.environ.get(_HOST_VARIABLE, "").lower()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass on, or answer 421."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if all(names_this_machine(host) or host.lower().partition(":")[0] == self._own != "" for host in hosts):
            return await self._app(scope, receive, send)
        text = "without an API key this server answers requests to 127.0.0.1 and localhost alone"
        return await _refuse(scope, send, 421, "Misdirected Request", text)


async def _refuse(
    scope: dict[str, Any], send: Any, status: int, kind: str, text: str, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    whole = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": whole})
    body = json.dumps({"error": {"message": text, "type": kind, "code": status}}).encode()
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Run vLLM's server until its parent ends."""
    from slipstream.processes import lifeline

    lifeline.name_shared_memory()
    lifeline.Parent()
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
