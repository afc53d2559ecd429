"""`ServerEngine`: an engine server, held by a lease.

Guarantees: a lost server (killed, silent, or taken by another run) is found by the next call, or within seconds. Its
return is awaited for `start_timeout_s`, at most `max_restarts` times. It then has its version again before it is asked
anything: from files here, or by the next publication. After a broken connection a request is sent again, with its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from slipstream.engine_protocols import RequestsAddress
from slipstream.errors import ConfigError, DeadlineError, EngineError, one_line
from slipstream.inference.addresses import ControlAddress
from slipstream.inference.engine import OnEvent, ParserFailures
from slipstream.inference.lending import RENEW_S, SILENT_S, Held, Terms
from slipstream.inference.server_client import CALL_S, ServerClient, Unreached
from slipstream.records import (
    ApplyReport,
    Completion,
    EngineHealth,
    GenerateRequest,
    ParameterSpec,
    SessionOpening,
    SessionTurn,
    Ticket,
    Version,
)
from slipstream.weights.base import check_report
from slipstream.weights.bridges.single_copy import SharedWeights

_PAUSE_S = 0.5
_TRIES = 3
_END_S = 2.0


class ServerEngine:
    """See the module. All methods belong to one event loop, but for `kill`."""

    is_server = True
    wants_weights = False

    def __init__(
        self,
        address: ControlAddress,
        terms: Terms,
        *,
        world_size: int,
        start_timeout_s: float,
        apply_timeout_s: float,
        max_restarts: int,
        on_event: OnEvent,
        silence_s: float,
    ) -> None:
        self.address, self._terms, self._world_size = address, terms, world_size
        self._start_timeout_s, self._apply_timeout_s = start_timeout_s, apply_timeout_s
        self._max_restarts, self._on_event = max_restarts, on_event
        self.client = ServerClient(
            address,
            terms.id,
            is_alive=lambda: not self._lost,
            describe=self.describe,
            give_up=self._give_up,
            look=self._look,
            silence_s=silence_s,
        )
        self._silence_s = silence_s
        self._failures = ParserFailures(terms.tool_parser, on_event)
        self.num_restarts = 0
        self._instance = ""
        self._lost = "it was not reached yet"
        self._connecting = asyncio.Lock()
        self._tickets: list[Ticket] = []
        """In files: a whole version, and the deltas after it."""
        self._held: Version | None = None
        """Its last version from this run."""
        self._in_memory = False
        self._keeping: asyncio.Task[None] | None = None

    @property
    def sockets(self) -> tuple[str, ...]:
        """See `RunEngine`; those of this host."""
        return (self.address.path,) if self.address.path and not self.address.token else ()

    @property
    def each(self) -> tuple[ServerEngine]:
        """See `Generates`."""
        return (self,)

    @property
    def phases(self) -> tuple[tuple[tuple[str, float], ...], ...]:
        """See `RunEngine`; it has started before."""
        return ((),)

    @property
    def is_up(self) -> bool:
        """See `RunEngine`."""
        return not self._lost and not self._connecting.locked()

    @property
    def is_in_memory_only(self) -> bool:
        """See `RunEngine`."""
        return self._in_memory

    def describe(self) -> str:
        """The server, and why it is lost."""
        name = f"the server at {self.address.url}"
        return f"{name} is lost ({self._lost})" if self._lost and self._instance else name

    def launch(self) -> None:
        """Does nothing: it runs already."""

    async def wait_ready(self) -> EngineHealth:
        """See `RunEngine`. Raises ConfigError if another run holds it."""
        async with self._connecting:
            health = await self._connect()
        self._keeping = asyncio.create_task(self._keep())
        return health

    async def _connect(self) -> EngineHealth:
        """Take the lease, and wait until the server is in service."""
        until, why, heard_at = time.monotonic() + self._start_timeout_s, "", 0.0
        at_step = f" at step {self._held.step}" if self._held is not None else ""
        with_run = ", and the run with --resume" if self.num_restarts else ""
        while time.monotonic() < until or not why:
            try:
                loan = await self.client.lend(self._terms)
                health = await self.client.known_health()
                if health.status != "starting":
                    break
                why = health.reason
            except Held as held:
                why = f"the run {held.refusal.run} holds it"
                said_at = time.monotonic() - held.refusal.silent_s
                heard_at = heard_at or said_at
                if said_at > heard_at + RENEW_S / 2:  # it lives; a killed one is silent, and loses the engine
                    raise ConfigError(
                        f"the server at {self.address.url} is not free, as {why}: end that run, or give this one "
                        "another server"
                    ) from held
            except Unreached as error:
                why = str(error)
            await asyncio.sleep(_PAUSE_S)
        else:
            raise DeadlineError(
                f"the server at {self.address.url} was not ready within {self._start_timeout_s:g} s "
                f"(inference.start_timeout_s){at_step}: {why}; start it again with slipstream engine{with_run}"
            )
        if loan.world_size != self._world_size:
            raise ConfigError(
                f"the server at {self.address.url} has {loan.world_size} workers, and had {self._world_size} when the "
                "run was planned: start it as before, or the run again"
            )
        self._instance, self._lost = loan.instance, ""
        return health

    async def _keep(self) -> None:
        """Renew the lease while the run lives."""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_S)
            if self._lost or self._connecting.locked():
                heard = time.monotonic()
                continue
            try:
                loan = await self.client.lend(self._terms, CALL_S)
            except Held as held:
                self._lose(f"the run {held.refusal.run} has taken it")
            except (Unreached, ConfigError) as error:
                is_gone = isinstance(error, Unreached) and error.is_gone
                if is_gone or time.monotonic() - heard > min(SILENT_S, self._silence_s):
                    self._lose(f"it {error.why}" if isinstance(error, Unreached) else one_line(error))
            else:
                heard = time.monotonic()
                if loan.instance != self._instance:
                    self._lose("it was started again")

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why

    async def _look(self) -> None:
        """After a broken connection: whether it is the same process."""
        try:
            health = await self.client.known_health()
        except Unreached as error:
            self._lose(f"it {error.why}")
        else:
            if health.info.get("instance", self._instance) != self._instance:
                self._lose("it was started again")

    async def _give_up(self) -> None:
        self._lose(f"it said nothing for {self._silence_s:.0f} s")

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Generates`."""
        for number in range(_TRIES):
            if self._lost:
                break
            try:
                completion = await self.client.generate(request)
            except DeadlineError:
                raise
            except EngineError:
                if self._lost or number == _TRIES - 1:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                self._failures.count(completion)
                return completion
        raise EngineError(self.describe())

    async def open_session(self, opening: SessionOpening, group_id: str) -> RequestsAddress:
        """See `RecordsAgents`; requests come over the control address."""
        if self._lost:
            raise EngineError(self.describe())
        await self.client.open_session(opening)
        return self.address.for_agents(self._terms.id)

    async def close_session(self, key: str) -> list[SessionTurn]:
        """See `RecordsAgents`."""
        return await self.client.close_session(key)

    async def revive(self) -> None:
        """See `Generates`: wait for the server, and give it its version again. Raises `EngineError` if no file has
        it: the trainer publishes it again."""
        if self._lost and not self._tickets:
            raise EngineError(f"{self.describe()}, and no file holds its weights: start it again")
        await self.replace()

    async def replace(self) -> bool:
        """Wait for a lost server; whether it has its version, perhaps by files."""
        async with self._connecting:
            if self._lost:
                await self._reconnect()
            return await self._has_version()

    async def _reconnect(self) -> EngineHealth:
        why = self.describe()
        if self.num_restarts >= self._max_restarts:
            raise EngineError(
                f"{why}, and inference.max_restarts = {self._max_restarts} allows no further loss: start it again, and "
                "the run with --resume"
            )
        self.num_restarts += 1
        self._on_event("engine_restart", number=self.num_restarts, reason=why)
        waits = f"the run waits up to {self._start_timeout_s:g} s for it (inference.start_timeout_s)"
        self._on_event("warning", message=f"{why}: {waits}; start it again with slipstream engine")
        await self.client.close()
        return await self._connect()

    async def _has_version(self) -> bool:
        health = await self.client.known_health()
        if health.status == "ready" and health.version == self._held:
            return True
        for ticket in self._tickets:
            check_report(await self.client.apply(ticket, self._apply_timeout_s), ticket)
        return bool(self._tickets)

    async def joined(self) -> int:
        """See `RunEngine`."""
        return self.num_restarts

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `TakesWeights`."""
        if self._lost:
            async with self._connecting:
                await self._reconnect()
                if ticket.delta is not None:
                    await self._has_version()
        try:
            report = await self.client.apply(ticket, timeout_s)
        except EngineError as error:
            if not self._lost or ticket.bridge == "broadcast" or isinstance(error, DeadlineError):
                raise self._named(ticket, error) from error
            await self.replace()
            report = await self.client.apply(ticket, timeout_s)
        if not (report.mismatched or report.unverified):
            self._remember(ticket)
        return report

    def _named(self, ticket: Ticket, error: EngineError) -> EngineError:
        kind = DeadlineError if isinstance(error, DeadlineError) else EngineError
        return kind(f"version {ticket.version.name} did not reach the server at {self.address.url}: {error}")

    def _remember(self, ticket: Ticket) -> None:
        self._held, self._in_memory = ticket.version, ticket.bridge == "broadcast"
        if ticket.delta is None:
            self._tickets.clear()
        if not self._in_memory:
            self._tickets.append(ticket)

    async def held(self) -> Version | None:
        """See `TakesWeights`."""
        if self._lost:
            await self.replace()
        health = await self.client.health()
        return health.version if health is not None and health.status == "ready" else None

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `TakesWeights`."""
        return await self.client.verify(ticket, timeout_s)

    async def leave(self, timeout_s: float) -> None:
        """See `RunEngine`."""
        if not self._lost:
            await self.client.leave(timeout_s)

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """Raises `EngineError`: its memory is its own."""
        raise self._not_here("weights.bridge = single_copy")

    async def fence(self, timeout_s: float) -> None:
        """Raises `EngineError`, as `share`."""
        raise self._not_here("weights.bridge = single_copy")

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """Raises `EngineError`, as `share`."""
        raise self._not_here("weights.bridge = single_copy")

    async def restart(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        """Raises `EngineError`: a run does not start it."""
        raise self._not_here("weights.bridge = restart")

    async def sleep(self, timeout_s: float) -> None:
        """Raises `EngineError`: its GPU is its own."""
        raise self._not_here("inference.sleep")

    async def wake(self, timeout_s: float) -> None:
        """Raises `EngineError`, as `sleep`."""
        raise self._not_here("inference.sleep")

    def _not_here(self, setting: str) -> EngineError:
        return EngineError(f"the server at {self.address.url} does not go with {setting}: leave it out")

    def take_metrics(self) -> dict[str, float]:
        """See `SupervisedEngine`."""
        return self._failures.take()

    async def stop(self) -> None:
        """Give the engine back. It keeps its weights."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._instance:
            with contextlib.suppress(EngineError, ConfigError, Held, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self.client.end_lease()
        await self.client.close()

    def kill(self) -> None:
        """Does nothing: the lease ends by itself."""
