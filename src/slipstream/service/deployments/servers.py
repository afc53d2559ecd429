"""A vLLM server of the host: started, watched, started again.

Guarantees: a server that ends, or does not answer, is started again at most `RESTARTS` times in a row; then it has
failed for good, with a reason. It ends with the host, and nothing of it is left. Nobody else knows its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from slipstream.commands.serve import free_port
from slipstream.errors import SlipstreamError
from slipstream.inference.openai_server import ServerChild
from slipstream.inference.plugin.named_adapters import VARIABLE
from slipstream.processes.temporary import make_temporary, remove_temporary
from slipstream.service.deployments.records import ServerSpec

START_S = 900.0
RESTARTS = 3
STEADY_S = 60.0
"""After so long without a fault, earlier ones are forgotten."""
_POLL_S, _PAUSE_S = 0.1, 1.0
_HEALTH_EVERY_S, _HEALTH_S, _HEALTH_TRIES = 5.0, 20.0, 2
_MAX_LOG = 16 << 20


class Server:
    """The server of a spec, with its files in `folder`. `note` is called with the reason whenever it goes down."""

    def __init__(self, spec: ServerSpec, folder: Path, note: Callable[[str], None]) -> None:
        self.spec, self.log = spec, folder / "server.log"
        self.url = self.key = ""
        self.is_up = False
        self.failed = ""
        """Why it will not start again."""
        self.starts = 0
        self.pid = 0
        self.idle_since: float | None = None
        self._was_up = False
        self._folder, self._note = folder, note
        self._child: ServerChild | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End it, whatever it does."""
        self.is_up = False
        if self._task is not None:
            self._task.cancel()
            if self._child is not None:  # a thread that waits for it ends with it
                await asyncio.to_thread(self._child.stop)
            await asyncio.wait([self._task])

    async def _keep(self) -> None:
        faults = 0
        while True:
            began = time.monotonic()
            reason = await self._live()
            was_steady = self._was_up and time.monotonic() - began > STEADY_S
            faults = 1 if was_steady else faults + 1
            if faults > RESTARTS or (not self._was_up and faults > 1):
                self.failed = reason
                return
            self._note(reason)
            await asyncio.sleep(_PAUSE_S * 2**faults)

    async def _live(self) -> str:
        """Start it, and wait for its end; how it ended."""
        temporary = make_temporary("deployed")
        self._was_up, self.starts = False, self.starts + 1
        try:
            try:
                child = self._child = self._started(temporary)
                await asyncio.to_thread(child.wait_ready, START_S)
            except (SlipstreamError, OSError) as error:
                return str(error)
            self.is_up = self._was_up = True
            return await self._watch(child)
        finally:
            self.is_up = False
            if self._child is not None:
                child, self._child = self._child, None
                await asyncio.shield(asyncio.to_thread(child.stop))
            await asyncio.to_thread(remove_temporary, temporary)

    def _started(self, temporary: Path) -> ServerChild:
        if self.log.exists() and self.log.stat().st_size > _MAX_LOG:
            self.log.unlink()
        self.key, port = secrets.token_urlsafe(32), free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        variables = {"VLLM_PLUGINS": "slipstream", "TMPDIR": str(temporary)}
        if self.spec.max_rank:
            variables |= {VARIABLE: str(self._folder / "adapters"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        child = ServerChild(
            self.spec.arguments,
            port=port,
            api_key=self.key,
            log_path=self.log,
            folder=temporary,
            variables=variables,
            gpus=self.spec.gpus,
        )
        self.pid = child.pid
        return child

    async def _watch(self, child: ServerChild) -> str:
        """Wait until it ends or hangs; how."""
        looked, misses = time.monotonic(), 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as client:
            while not child.has_ended:
                await asyncio.sleep(_POLL_S)
                if time.monotonic() - looked < _HEALTH_EVERY_S:
                    continue
                misses = 0 if await self._is_healthy(client) else misses + 1
                looked = time.monotonic()
                if misses >= _HEALTH_TRIES and not child.has_ended:
                    return f"vLLM's server did not answer /health within {_HEALTH_S:g} s: see {self.log}"
        return f"vLLM's server is gone: {child.ending()}"

    async def _is_healthy(self, client: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with client.get(f"{self.url}/health") as answer:
                return answer.status == 200
        return False
