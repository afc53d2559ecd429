"""`OpenAIServer`: vLLM's own OpenAI-compatible server in a child process. Run as `__main__`, this module is that child.

Guarantees: `wait_ready` returns when the server answers, or raises with its last error; `stop` leaves no process of it
behind; it ends with the process that started it. Its shared memory goes with the temporary folder of its log. With
a key every path but `/health` needs it, also those that vLLM's own check leaves open, and the key is in no argument
list. Without one no web page is answered whose name was pointed to this machine.
"""

from __future__ import annotations

import hmac
import json
import os
import runpy
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.config.addresses import names_this_machine
from slipstream.errors import DeadlineError, EngineError
from slipstream.processes import child_process
from slipstream.processes.launchers import LOCAL, Child
from slipstream.processes.temporary import FOLDER_VARIABLE

KEY_VARIABLE = "VLLM_API_KEY"
_HOST_VARIABLE = "SLIPSTREAM_HOST"
"""Environment variable: the host that the server was asked to listen on, which clients may name, too."""
_MODULE = "vllm.entrypoints.openai.api_server"
_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0


class OpenAIServer:
    """One vLLM OpenAI server, on `host` and `port`."""

    def __init__(self, arguments: Sequence[str], *, host: str, port: int, api_key: str, log_path: Path) -> None:
        self.arguments = [*arguments, "--host", host, "--port", str(port)]
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        self._api_key = api_key
        self._host = host
        self._log_path = log_path
        self._process: Child | None = None

    def launch(self) -> None:
        """Start the process without waiting for it."""
        guard = ["--middleware", f"{__name__}.{'KeyGuard' if self._api_key else 'HostGuard'}"]
        environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
        environment |= {**child_process.OFFLINE, **child_process.SAFE_PATH, _HOST_VARIABLE: self._host}
        environment[FOLDER_VARIABLE] = str(self._log_path.parent)
        if self._api_key:
            environment[KEY_VARIABLE] = self._api_key
        self._process = LOCAL.launch(__name__, [*self.arguments, *guard], environment, output=self._log_path)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def is_healthy(self) -> bool:
        """Whether it answers now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=_HEALTH_TIMEOUT_S) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, timeout_s: float, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it answers; False when `should_stop` came first. Raises `EngineError` when it ends."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if should_stop():
                return False
            if not self.is_alive():
                raise EngineError(f"vLLM's server did not start: {self.describe()}")
            if self.is_healthy():
                return True
            time.sleep(_POLL_S)
        raise DeadlineError(f"vLLM's server was not ready after {timeout_s:g} s (--start-timeout): {self.describe()}")

    def describe(self) -> str:
        """How it is, and where its log is."""
        return f"it {child_process.ending(self._process.poll() if self._process else None, self._log_path)}"

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it and its process group: SIGTERM first, SIGKILL after `timeout_s`."""
        if self._process is not None:
            self._process.end(timeout_s, signal.SIGTERM)


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
