"""`SupervisedEngine`: one engine process, restarted when it dies; `RunEngine`: the protocol of an engine.

Guarantees: a dead engine is found by the next call at the latest. It is started again on the last verified version, at
most `max_restarts` times in a run, each reported to `on_event`; after that, and whenever no verified version is
available, the call raises. Requests running at the engine's death raise too: the caller decides whether to ask
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from slipstream.engine_protocols import Generates, RecordsAgents, RequestsAddress, TakesWeights
from slipstream.errors import DeadlineError, EngineError
from slipstream.inference.addresses import ControlAddress
from slipstream.inference.client import SILENCE_S, EngineClient
from slipstream.inference.engine_process import EngineProcess
from slipstream.inference.preimport import EngineAhead
from slipstream.inference.settings import INFERENCE_SOCKET, EngineSettings
from slipstream.processes.launchers import LOCAL, Launcher
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
from slipstream.weights.bridges.single_copy import SharedWeights

OnEvent = Callable[..., None]
PARSER_FAILURES = "rollout/parser_failures"
_DYING_S, _POLL_S = 10.0, 0.1
"""An engine's process lives a little longer than vLLM's core: how long, and how often, its end is polled for."""


class RunEngine(Generates, TakesWeights, Protocol):
    """An engine, or several as one, with its lifetime: launched beside other work, stopped however the run ends."""

    @property
    def sockets(self) -> tuple[str, ...]:
        """The Unix sockets of its processes, for as long as the run lives."""
        ...

    @property
    def phases(self) -> tuple[tuple[tuple[str, float], ...], ...]:
        """For each engine its begun start-up phases, each with its time by `time.monotonic`."""
        ...

    @property
    def is_up(self) -> bool:
        """Whether all of its engines run, and none is being started again."""
        ...

    @property
    def is_in_memory_only(self) -> bool:
        """Whether one of its engines has, or had, weights in no file."""
        ...

    @property
    def wants_weights(self) -> bool:
        """Whether it lacks nothing but a version of the trainer."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics of each of several engines since the last call."""
        ...

    async def joined(self) -> int:
        """Wait until all workers run; returns how often some were replaced. New ones are in no process group yet."""
        ...

    def launch(self) -> None:
        """Begin to start; `wait_ready` waits for the end."""
        ...

    async def wait_ready(self) -> EngineHealth:
        """Wait until it is in service and return its health. Raises `EngineError` when it does not start in time."""
        ...

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """Handles of the live weights of each worker, for a trainer to write them in place."""
        ...

    async def sleep(self, timeout_s: float) -> None:
        """Free the GPU's memory until `wake`; no request may be running."""
        ...

    async def wake(self, timeout_s: float) -> None:
        """Take the memory back."""
        ...

    async def leave(self, timeout_s: float) -> None:
        """Leave the process group for new weights, if there is one. It goes on with its present ones."""
        ...

    async def stop(self) -> None:
        """Stop and remove its files."""
        ...

    def kill(self) -> None:
        """As `stop`, but at once, from any thread and without an event loop."""
        ...


class Member(RunEngine, RecordsAgents, Protocol):
    """One of several engines of a run."""

    @property
    def is_server(self) -> bool:
        """Whether the run did not start it. The trainer gives it weights again after its loss."""
        ...

    @property
    def each(self) -> Sequence[Member]:
        """See `Generates`."""
        ...

    async def replace(self) -> bool:
        """Have a dead engine back without its weights; whether it has them all the same."""
        ...


class ParserFailures:
    """Counts completions with a failure of the tool parser."""

    def __init__(self, parser: str, on_event: OnEvent) -> None:
        self._parser, self._on_event = parser, on_event
        self._number = self._untold = 0

    def count(self, completion: Completion) -> None:
        """Look at a completion. The first failure is a warning."""
        if not completion.parser_failure:
            return
        if not self._number:
            self._on_event(
                "warning",
                message=f"vLLM's tool parser {self._parser} raised ({completion.parser_failure}), so a turn may "
                f"lack calls that the model made; further ones are counted in {PARSER_FAILURES}",
            )
        self._number += 1
        self._untold += 1

    def take(self) -> dict[str, float]:
        """Failures since the last call, once there was one."""
        number, self._untold = self._untold, 0
        return {PARSER_FAILURES: float(number)} if self._number else {}


class SupervisedEngine:
    """An engine process, restarted when it dies. All methods belong to one event loop, but for `kill`."""

    is_server = False
    wants_weights = False

    def __init__(
        self,
        settings: EngineSettings,
        log_path: Path,
        *,
        start_timeout_s: float,
        max_restarts: int,
        on_event: OnEvent,
        silence_s: float = SILENCE_S,
        ahead: EngineAhead | None = None,
        launcher: Launcher = LOCAL,
        node: str = "",
    ) -> None:
        """An engine silent for `silence_s` while a call waits is killed, and treated as dead. `ahead`: a
        process with vLLM imported, a possible engine. `launcher` starts it otherwise, on `node`."""
        self.process = EngineProcess(
            settings,
            log_path,
            start_timeout_s=start_timeout_s,
            silence_s=silence_s,
            ahead=ahead,
            launcher=launcher,
            node=node,
        )
        """The engine's process, for its log and pid."""
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._reviving = asyncio.Lock()
        self._in_memory_by = ""
        """The bridge of the engine's weights if no file holds them; empty if one does."""
        self.num_restarts = 0
        self._has_ended = False
        self._failures = ParserFailures(settings.tool_parser, on_event)

    @property
    def socket(self) -> str:
        """Path of its Unix socket; restarts keep it."""
        return self.process.client.socket

    @property
    def sockets(self) -> tuple[str, ...]:
        """See `RunEngine`."""
        return (self.socket,)

    @property
    def each(self) -> tuple[SupervisedEngine]:
        """See `Generates`."""
        return (self,)

    @property
    def phases(self) -> tuple[tuple[tuple[str, float], ...], ...]:
        """See `RunEngine`."""
        return (self.process.phases,)

    @property
    def is_up(self) -> bool:
        """See `RunEngine`."""
        return self.process.is_alive() and not self._reviving.locked()

    @property
    def is_in_memory_only(self) -> bool:
        """See `RunEngine`."""
        return bool(self._in_memory_by)

    def launch(self) -> None:
        """See `RunEngine`."""
        self.process.launch()

    async def wait_ready(self) -> EngineHealth:
        """See `RunEngine`. If it was killed, or stopped for too long, before it was ready, it is started again."""
        try:
            await self.process.wait_ready()
        except DeadlineError:
            raise
        except EngineError:
            if self._has_ended or not self.process.was_killed or self.num_restarts >= self._max_restarts:
                raise
            async with self._reviving:
                await self._start_again(self.process.describe())
        health = await self.process.client.health()
        if health is None:
            raise EngineError(f"the engine stopped answering right after its start: {self.process.describe()}")
        return health

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Generates`."""
        if not self.process.is_alive():
            await self.revive()
        completion = await self.process.client.generate(request)
        self._failures.count(completion)
        return completion

    async def open_session(self, opening: SessionOpening, group_id: str) -> RequestsAddress:
        """See `RecordsAgents`."""
        if not self.process.is_alive():
            await self.revive()
        await self.process.client.open_session(opening)
        return ControlAddress(f"unix:{Path(self.socket).with_name(INFERENCE_SOCKET)}")

    async def close_session(self, key: str) -> list[SessionTurn]:
        """See `RecordsAgents`."""
        return await self.process.client.close_session(key)

    async def revive(self) -> None:
        """Start a dead engine again on its last verified version (before the first, on the model's own folder). Raises
        `EngineError` when it died too often, or when no file holds its weights."""
        async with self._reviving:
            if self.process.is_alive():
                return
            why = self.process.describe()
            if self._in_memory_by:
                raise self._lost_weights(why)
            await self._start_again(why)

    def _lost_weights(self, why: str) -> EngineError:
        return EngineError(
            f"the engine died, and no file holds the weights that it had by {self._in_memory_by}: continue the run "
            f"with --resume, or use weights.bridge = disk, which can restart it: {why}"
        )

    async def replace(self) -> bool:
        """Start a dead engine again on the weights of its first start, if no file holds its last ones. It must get a
        whole version before any request: False."""
        async with self._reviving:
            if not self.process.is_alive():
                await self._start_again(self.process.describe())
        return False

    async def _start_again(self, why: str) -> None:
        if self.num_restarts >= self._max_restarts:
            raise EngineError(
                f"the engine died, and inference.max_restarts = {self._max_restarts} allows no further restart: {why}"
            )
        self.num_restarts += 1
        self._on_event("engine_restart", number=self.num_restarts, reason=why)
        await self.process.stop(0.0)
        if self.process.is_alive():
            raise EngineError(f"the engine was killed and does not end, as if a driver held it: {why}")
        await self.process.start()

    async def joined(self) -> int:
        """See `RunEngine`."""
        return self.num_restarts

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `TakesWeights`."""
        if not self.is_up:
            await self.revive()
        num_restarts = self.num_restarts
        try:
            report = await self.process.client.apply(ticket, timeout_s)
        except EngineError as error:
            has_died = not self.process.is_alive() or self.num_restarts != num_restarts
            # A new process cannot join the running collective: the trainer has to send the version again.
            if not has_died or ticket.bridge == "broadcast":
                if self._in_memory_by and not self.process.is_alive():
                    raise self._lost_weights(str(error)) from error
                raise
            await self.revive()
            report = await self.process.client.apply(ticket, timeout_s)
        if self._in_memory_by != "single_copy":
            self._in_memory_by = "broadcast" if ticket.bridge == "broadcast" else ""
        if report.mismatched or report.unverified or self._in_memory_by:
            return report
        if ticket.bridge == "lora":
            self.process.settings = msgspec.structs.replace(self.process.settings, adapter=ticket)
        elif ticket.delta is not None:
            deltas = (*self.process.settings.deltas, ticket)
            self.process.settings = msgspec.structs.replace(self.process.settings, deltas=deltas)
        else:
            self._remember(ticket.location, ticket.version, ticket.parameters)
        return report

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """See `RunEngine`; from here on the engine cannot be started again."""
        shared = await self.process.client.share(parameters, timeout_s)
        self._in_memory_by = "single_copy"
        return shared

    async def held(self) -> Version | None:
        """See `TakesWeights`."""
        if not self.process.is_alive():
            await self.revive()
        health = await self.process.client.health()
        return health.version if health is not None and health.status == "ready" else None

    async def fence(self, timeout_s: float) -> None:
        """See `TakesWeights`."""
        await self._in_memory(lambda client: client.fence(timeout_s))

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """See `TakesWeights`."""
        await self._in_memory(lambda client: client.go_on(version, timeout_s))

    async def _in_memory(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Call an engine with weights possibly in memory only; for a dead one `revive` raises the remedy."""
        if not self.process.is_alive():
            await self.revive()
        try:
            await call(self.process.client)
        except EngineError:
            if not self.process.is_alive():
                await self.revive()
            raise

    async def sleep(self, timeout_s: float) -> None:
        """See `RunEngine`; the weights move to the CPU's memory."""
        await self.process.client.sleep(timeout_s)

    async def wake(self, timeout_s: float) -> None:
        """See `RunEngine`; starts an engine again if it died asleep."""
        if not self.process.is_alive():
            await self.revive()
        await self.process.client.wake(timeout_s)

    async def leave(self, timeout_s: float) -> None:
        """See `RunEngine`; a dead one is in none."""
        if self.process.is_alive():
            await self.process.client.leave(timeout_s)

    def take_metrics(self) -> dict[str, float]:
        """Completions since the last call with an error of the tool parser, once there was one."""
        return self._failures.take()

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `TakesWeights`."""
        return await self.process.client.verify(ticket, timeout_s)

    async def restart(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        """See `TakesWeights`."""
        await self.process.stop()
        self._remember(model, version, parameters)
        await self.process.start()

    def _remember(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        self.process.settings = msgspec.structs.replace(
            self.process.settings, model=model, version=version, parameters=parameters, deltas=()
        )

    async def stop(self) -> None:
        """See `RunEngine`."""
        self._has_ended = True
        await self.process.stop()
        self.process.remove_files()

    def kill(self) -> None:
        """See `RunEngine`."""
        self._has_ended = True
        self.process.kill()
        self.process.remove_files()


def ends_soon(engine: RunEngine) -> bool:
    """Wait a little for one of the engine's processes to end, as it does after vLLM's core has died; whether one
    did."""
    deadline = time.monotonic() + _DYING_S
    while engine.is_up and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not engine.is_up
