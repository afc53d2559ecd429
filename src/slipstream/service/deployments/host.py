"""The host: the parent of all vLLM servers of deployments, and their address. A process of its own, without a parent.

Guarantees: one host per state folder, by a lock. Its servers end with it. It removes an undeployed adapter after its
last request. A server without deployments ends after `IDLE_S`, and so does the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time

import aiohttp

from slipstream.config.addresses import is_loopback
from slipstream.errors import SlipstreamError
from slipstream.http_listener import Listener, serve, tcp_socket
from slipstream.processes.identity import own_handle
from slipstream.service.access import Access
from slipstream.service.deployments.gateway import MAX_BODY_BYTES, Gateway
from slipstream.service.deployments.records import Deployment, State, stated
from slipstream.service.deployments.registry import Listening, Registry
from slipstream.service.deployments.servers import Server
from slipstream.service.store import Store
from slipstream.service.submission import unix_user

IDLE_S = 30.0
DRAIN_S = 600.0
"""For the last requests of an undeployed name."""
_POLL_S = 0.2


class Host:
    """See the module."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store, self._registry = store, registry
        self._servers: dict[str, Server] = {}
        self._gateway = Gateway(registry, self._servers, unix_user())
        self._smokes: dict[str, asyncio.Task[None]] = {}
        self._idle_since: float | None = None

    async def run(self, lock: int) -> None:
        """Serve until a signal, or until there is nothing to serve."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        listener = await self._listen()
        if listener is None:
            return
        try:
            while not stop.is_set():
                await self._pass()
                if self._is_over(lock):
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _POLL_S)
        finally:
            await listener.close()
            for task in self._smokes.values():
                task.cancel()
            await asyncio.gather(*(server.stop() for server in self._servers.values()))
            await self._gateway.close()

    async def _listen(self) -> Listener | None:
        asked = self._registry.listening()
        try:
            listening = tcp_socket(asked.host, asked.port or 0)
        except OSError as error:
            reason = f"nothing can listen on port {asked.port} of {asked.host} ({error.strerror}): undeploy it, and use"
            for record in self._registry.all():
                self._state(record, "failed", f"{reason} --port 0 for a free one")
            return None
        port = int(listening.getsockname()[1])
        access = Access(
            self._gateway,
            self._store,
            unix_user(),
            not is_loopback(asked.host),
            key=self._registry.key(),
            max_body=MAX_BODY_BYTES,
        )
        listener = await serve(access, listening)
        self._registry.put_listening(Listening(asked.host, port, own_handle()))
        return listener

    async def _pass(self) -> None:
        records = self._registry.all()
        for record in records:
            if record.state == "undeploying":
                await self._end(record)
        active = [each for each in records if each.state in ("deploying", "ready")]
        for key in {each.server for each in active}:
            await self._provide(key)
        for key, server in [*self._servers.items()]:
            await self._look(key, server, [each for each in active if each.server == key])
        self._smokes = {name: task for name, task in self._smokes.items() if not task.done()}

    async def _end(self, record: Deployment) -> None:
        """Remove an undeployed one, once nobody uses it."""
        if self._gateway.running[record.served] and time.time() - record.changed < DRAIN_S:
            return

        def remove() -> None:
            with self._registry.locked():
                now = self._registry.one(record.name)
                if now is not None and now.state == "undeploying":
                    self._registry.remove(now)

        await asyncio.to_thread(remove)

    async def _provide(self, key: str) -> None:
        """Start a server that is needed, or start it anew with another spec, or after a new deployment."""
        spec, server = self._registry.spec(key), self._servers.get(key)
        if spec is None or (server is not None and server.spec == spec and not server.failed):
            return
        if server is not None:
            await server.stop()
        server = self._servers[key] = Server(spec, self._registry.server(key), lambda why: self._down(key, why))
        server.start()

    async def _look(self, key: str, server: Server, active: list[Deployment]) -> None:
        if not active:
            server.idle_since = server.idle_since or time.monotonic()
            if time.monotonic() - server.idle_since > IDLE_S:
                del self._servers[key]
                await server.stop()
                await asyncio.to_thread(self._clear, key)
            return
        server.idle_since = None
        if server.failed:
            for record in active:
                self._state(record, "failed", server.failed)
        elif server.is_up:
            for record in active:
                if record.state == "deploying" and record.name not in self._smokes:
                    self._smokes[record.name] = asyncio.create_task(self._try(record, server))

    async def _try(self, record: Deployment, server: Server) -> None:
        """The first answer of a deployment, before others may ask."""
        start = server.starts
        try:
            fault = await self._gateway.smoke(record)
        except (aiohttp.ClientError, OSError) as error:
            if not server.is_up or server.starts != start:  # it is started again, and so is this
                return
            fault = f"its server gave no answer ({type(error).__name__}): see {server.log}"
        except (ValueError, LookupError, AttributeError) as error:
            fault = f"its server's answer cannot be read ({error}): see {server.log}"
        if server.is_up and server.starts == start:
            self._state(record, "failed" if fault else "ready", fault)

    def _down(self, key: str, why: str) -> None:
        for record in self._registry.all():
            if record.server == key and record.state in ("deploying", "ready"):
                self._state(record, "deploying", f"its server starts again: {why}")

    def _state(self, record: Deployment, state: State, reason: str) -> None:
        """Store a state, unless the record is of another checkpoint by now."""

        def change(now: Deployment) -> Deployment:
            same = now.served == record.served and now.created == record.created
            return stated(now, state, reason, time.time()) if same else now

        with contextlib.suppress(SlipstreamError):
            self._registry.change(record.name, change)

    def _clear(self, key: str) -> None:
        """Remove the folder of a server without any deployment."""
        with self._registry.locked():
            if all(each.server != key for each in self._registry.all()):
                shutil.rmtree(self._registry.server(key), ignore_errors=True)

    def _is_over(self, lock: int) -> bool:
        """Whether nothing is left to do; then the lock is given up while nobody can make a new record."""
        if self._servers:
            self._idle_since = None
            return False
        self._idle_since = self._idle_since or time.monotonic()
        if time.monotonic() - self._idle_since < 1.0:
            return False
        with self._registry.locked():
            if any(each.state != "failed" for each in self._registry.all()):
                return False
            self._registry.put_listening(Listening())  # the next one may find its port taken
            os.close(lock)
        return True


def main() -> None:
    """Be the host, unless there is one."""
    store = Store()
    registry = Registry(store)
    with registry.locked():
        lock = registry.claim_host()
    if lock is None:
        return
    os.environ["PYTHONUNBUFFERED"] = "1"
    try:
        asyncio.run(Host(store, registry).run(lock))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
