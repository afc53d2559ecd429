"""`EngineReplicas`: several engines behind the interface of one, with routing, updates of all, and restarts.

A request goes to the engine with the fewest requests. All requests of a group go to the same one while it has free
places: its prefix cache serves them. Guarantees: from the start of an update until all engines have verified the
version no request begins, and no completion mixes in an older one; an engine with a failed update answers nothing; a
dead engine's requests are sent to another once no answer can come; a dead engine starts again in
the background on its last verified version, and after too many deaths every call raises. If no file holds its
weights (`broadcast`) it stays out of service until the next version, which then comes whole. During an update this also
holds for the last one: the trainer has the weights, and requests wait until it has repeated the update. A
server is always blank after its return, unless files have its version; with none left in service, requests wait for an
update (`wants_weights`).

`aside` lends one engine, on its present version: it gets no other requests and no updates. When given back, it takes
the missed versions, proves the newest, and serves again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.engine_protocols import RequestsAddress
from slipstream.errors import DeadlineError, EngineError
from slipstream.inference.engine import PARSER_FAILURES, Member
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

T = TypeVar("T")


@dataclass(eq=False)
class _Replica:
    number: int
    engine: Member
    is_serving: bool = True
    """Whether requests are routed to it; True also for a dead engine until its death is noticed."""
    is_blank: bool = False
    """Whether it was started without its last weights, and waits for a version."""
    is_aside: bool = False
    """Whether it is lent: no request is routed to it, and it takes no version."""
    missed: list[Ticket] = field(default_factory=list[Ticket])
    """Tickets not taken while it was aside: a whole version, if there was one, and the deltas after it."""
    restarting: asyncio.Task[None] | None = None
    in_flight: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    _busy_since: float = field(default=0.0, repr=False)
    _taken_at: float = field(default_factory=time.monotonic, repr=False)
    """When metrics were taken last."""

    def begin(self) -> None:
        if not self.in_flight:
            self._busy_since = time.monotonic()
        self.in_flight += 1

    def end(self, completion: Completion | None) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.busy_s += time.monotonic() - self._busy_since
        if completion is not None:
            self.num_requests += 1
            self.num_tokens += len(completion.token_ids)

    def miss(self, ticket: Ticket) -> None:
        if ticket.delta is None:
            self.missed.clear()
        self.missed.append(ticket)

    def take_metrics(self) -> dict[str, float]:
        now = time.monotonic()
        busy_s = self.busy_s + (now - self._busy_since if self.in_flight else 0.0)
        figures = {"requests": float(self.num_requests), "restarts": float(self.engine.num_restarts)}
        figures["idle_s"] = max(0.0, now - self._taken_at - busy_s)
        if busy_s:
            figures["tokens_per_s"] = self.num_tokens / busy_s
        self.num_requests, self.num_tokens, self.busy_s, self._busy_since = 0, 0, 0.0, now
        self._taken_at = now
        return {f"replica_{self.number}/{name}": value for name, value in figures.items()}


class EngineReplicas:
    """Engines with the same weights. All methods belong to one event loop, except `kill`."""

    def __init__(
        self,
        engines: Sequence[Member],
        *,
        num_places: int,
        on_event: Callable[..., None],
        asked_by_others: bool = False,
    ) -> None:
        """`num_places`: from this many requests on, an engine's groups overflow to an engine with fewer.
        `asked_by_others`: their clients cannot be sent to another engine, so each needs a version after its return."""
        self._replicas = [_Replica(number, engine) for number, engine in enumerate(engines)]
        self._num_places = num_places
        self._on_event = on_event
        self._asked_by_others = asked_by_others
        self._homes: dict[str, _Replica] = {}
        """By group id, the engine with its prompt in the prefix cache."""
        self._sessions: dict[str, _Replica] = {}
        """By the key of an agent's session, its engine."""
        self._updating = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._given = asyncio.Event()
        """Set at the end of an update."""
        self._failure: Exception | None = None
        """Why an engine cannot be started again."""

    @property
    def num_restarts(self) -> int:
        """See `Generates`; the sum."""
        return sum([replica.engine.num_restarts for replica in self._replicas])

    @property
    def sockets(self) -> tuple[str, ...]:
        """See `RunEngine`."""
        return tuple(socket for replica in self._replicas for socket in replica.engine.sockets)

    @property
    def phases(self) -> tuple[tuple[tuple[str, float], ...], ...]:
        """See `RunEngine`."""
        return tuple(phases for replica in self._replicas for phases in replica.engine.phases)

    @property
    def is_up(self) -> bool:
        """See `RunEngine`; False too while one waits for a version after its death."""
        return all(replica.engine.is_up and not replica.is_blank for replica in self._replicas)

    @property
    def is_in_memory_only(self) -> bool:
        """See `RunEngine`."""
        return any(replica.engine.is_in_memory_only for replica in self._replicas)

    @property
    def each(self) -> tuple[Member, ...]:
        """The engines in service, without one aside."""
        return tuple(replica.engine for replica in self._in_use() if replica.is_serving)

    def _in_use(self) -> list[_Replica]:
        return [replica for replica in self._replicas if not replica.is_aside]

    def launch(self) -> None:
        """Begin to start all of them."""
        for replica in self._replicas:
            replica.engine.launch()

    async def wait_ready(self) -> EngineHealth:
        """Wait until all are in service; the health of the first."""
        return (await self._all(lambda engine: engine.wait_ready()))[0]

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion from any engine; sent to another if the engine dies."""
        while True:
            replica = await self._place_for(request.group_id)
            engine, completion = replica.engine, None
            num_restarts = engine.num_restarts
            replica.begin()
            try:
                completion = await engine.generate(request)
            except DeadlineError:
                raise
            except EngineError:
                if engine.is_up and engine.num_restarts == num_restarts:
                    raise
                self._find_dead()
            else:
                return completion
            finally:
                replica.end(completion)

    async def open_session(self, opening: SessionOpening, group_id: str) -> RequestsAddress:
        """See `RecordsAgents`: a session stays on its engine, and counts as a request of it."""
        while True:
            replica = await self._place_for(group_id)
            engine, num_restarts = replica.engine, replica.engine.num_restarts
            replica.begin()
            try:
                address = await engine.open_session(opening, group_id)
            except EngineError:
                replica.end(None)
                if engine.is_up and engine.num_restarts == num_restarts:
                    raise
                self._find_dead()
            except BaseException:
                replica.end(None)
                raise
            else:
                self._sessions[opening.key] = replica
                return address

    async def close_session(self, key: str) -> list[SessionTurn]:
        """See `RecordsAgents`."""
        replica = self._sessions.pop(key)
        try:
            turns = await replica.engine.close_session(key)
        except EngineError:
            self._find_dead()
            raise
        finally:
            replica.end(None)
        replica.num_requests += len(turns)
        replica.num_tokens += sum(len(turn.completion.token_ids) for turn in turns)
        return turns

    async def _place_for(self, group_id: str) -> _Replica:
        while True:
            await self._settled.wait()
            self._raise_failure()
            replica = self._choose(group_id)
            if replica is not None:
                return replica
            await self._wait_for_any_restart()

    def _choose(self, group_id: str) -> _Replica | None:
        self._find_dead()
        able = [replica for replica in self._replicas if replica.is_serving and not replica.is_aside]
        if not able:
            return None
        least = min(able, key=lambda each: each.in_flight)
        home = self._homes.get(group_id, least)
        is_full = home.in_flight >= self._num_places > least.in_flight
        if is_full or home not in able:
            home = least
        if group_id:
            self._homes[group_id] = home
        return home

    def _find_dead(self) -> None:
        for replica in self._replicas:
            if replica.is_serving and not replica.engine.is_up:
                replica.is_serving = False
                self._on_event("replica_lost", replica=replica.number, num_requests=replica.in_flight)
                others = (other for other in self._replicas if other is not replica)
                is_updating = not self._settled.is_set()  # then the trainer has them
                have_weights = is_updating or any(each.is_serving and each.engine.is_up for each in others)
                replica.restarting = asyncio.create_task(self._restarted(replica, others_have_weights=have_weights))

    async def _restarted(self, replica: _Replica, *, others_have_weights: bool) -> None:
        """Start a dead engine again; `others_have_weights`: another engine or the trainer holds them, and it may
        start without."""
        try:
            if replica.engine.is_server or (replica.engine.is_in_memory_only and others_have_weights):
                replica.is_blank = True
                replica.is_blank = not await replica.engine.replace()
                replica.is_serving = not replica.is_blank and (replica.is_aside or not replica.missed)
            else:
                await replica.engine.revive()
                replica.is_serving = replica.is_aside or not replica.missed
        except Exception as error:  # noqa: BLE001 (raised by the next call)
            self._failure = self._failure or error
            self._settled.set()  # no update will come for the waiting ones
        finally:
            if replica.restarting is asyncio.current_task():
                replica.restarting = None

    def _restarts(self) -> list[asyncio.Task[None]]:
        return [replica.restarting for replica in self._replicas if replica.restarting is not None]

    @property
    def wants_weights(self) -> bool:
        """Whether nothing but a version of the trainer is missing: lost servers are back."""
        blank = [replica for replica in self._replicas if replica.is_blank and replica.engine.is_server]
        is_needed = bool(blank) and (self._asked_by_others or not self.each)
        return is_needed and self._settled.is_set() and not self._restarts()

    async def _wait_for_any_restart(self) -> None:
        """Bounded by the start timeout."""
        waits = self._restarts()
        if not waits and self.wants_weights:
            # No deadline: the trainer gives them while it waits for these requests.
            self._given.clear()
            await self._given.wait()
            return
        if not waits:
            raise EngineError("no engine is in service: the last version did not reach all of them, so use --resume")
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def revive(self) -> None:
        """Wait until an engine is in service. Raises `EngineError` when a dead one may not be started again."""
        while True:
            await self._settled.wait()
            self._raise_failure()
            self._find_dead()
            if self.each:
                return
            await self._wait_for_any_restart()

    async def joined(self) -> int:
        """Wait until every engine runs, in service or not, except one aside; returns the number of restarts.
        The trainer, holder of the weights, calls it."""
        self._find_dead()
        for replica in self._in_use():
            if not replica.engine.is_up and replica.restarting is None:
                replica.restarting = asyncio.create_task(self._restarted(replica, others_have_weights=True))
        while waits := [task for each in self._in_use() if (task := each.restarting) is not None]:
            await asyncio.wait(waits)
        self._raise_failure()
        return self.num_restarts

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Load and verify a version in all engines except one aside. No request begins until all have verified it;
        failed engines answer nothing until a later version succeeds."""
        async with self._updating:
            self._raise_failure()
            self._settled.clear()
            taking = self._in_use()
            proved, has_ended = [False] * len(taking), False
            try:
                reports = await _together(replica.engine.apply(ticket, timeout_s) for replica in taking)
                proved, has_ended = [not (report.mismatched or report.unverified) for report in reports], True
            finally:
                for replica in self._replicas:
                    if replica not in taking:
                        replica.miss(ticket)
                        replica.is_serving = replica.is_serving and replica.is_aside
                for replica, is_proved in zip(taking, proved, strict=True):
                    replica.is_serving = is_proved
                    if is_proved:
                        replica.is_blank = False
                        replica.missed.clear()
                self._homes.clear()
                self._given.set()
                if has_ended or ticket.bridge != "broadcast":  # a broken collective is repeated: requests wait
                    self._settled.set()
            return worst_report(reports, numbers=[replica.number for replica in taking])

    @contextlib.asynccontextmanager
    async def aside(self, timeout_s: float) -> AsyncGenerator[Member]:
        """One engine for the caller alone, on its present version, until the block ends: the one with least to do.
        Its running requests go on. A missed version is taken within `timeout_s`, and proved; if this or the block
        fails, the engine answers nothing until a later version succeeds. Nothing waits before the block
        begins. Raises `EngineError` if no engine can be spared."""
        replica = min(self._in_use(), key=lambda each: (not each.is_serving, each.in_flight, -each.number))
        if len(self._in_use()) < 2 or replica.engine.is_in_memory_only:
            raise EngineError(
                f"none of {len(self._in_use())} engines can stay on its version while others take newer ones: use "
                "evaluation.beside = false"
            )
        replica.is_aside = True
        self._on_event("replica_aside", replica=replica.number)
        try:
            yield replica.engine
            await self._catch_up(replica, timeout_s)
        finally:
            replica.is_aside, replica.is_serving = False, replica.is_serving and not replica.missed

    async def _catch_up(self, replica: _Replica, timeout_s: float) -> None:
        """Have an engine take its missed versions. An update meanwhile waits."""
        async with self._updating:
            while replica.missed:
                ticket = replica.missed[0]
                check_report(await replica.engine.apply(ticket, timeout_s), ticket)
                del replica.missed[0]
                replica.is_serving = True
            replica.is_aside = False

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `TakesWeights`."""
        return worst_report(await self._all(lambda engine: engine.verify(ticket, timeout_s)))

    async def held(self) -> Version | None:
        """The version verified and served by all engines, except one aside; None if they differ."""
        await self.joined()
        versions = await _together(replica.engine.held() for replica in self._in_use())
        return versions[0] if all(version == versions[0] for version in versions) else None

    async def restart(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        """See `TakesWeights`."""
        await self._all(lambda engine: engine.restart(model, version, parameters))

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """Raises `EngineError`: there are as many copies as engines."""
        raise EngineError("several engines have no single copy of the weights: use inference.replicas = 1")

    async def fence(self, timeout_s: float) -> None:
        """See `TakesWeights`."""
        await self._all(lambda engine: engine.fence(timeout_s))

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """See `TakesWeights`."""
        await self._all(lambda engine: engine.go_on(version, timeout_s))

    async def sleep(self, timeout_s: float) -> None:
        """See `RunEngine`."""
        await self.joined()
        await self._all(lambda engine: engine.sleep(timeout_s))

    async def wake(self, timeout_s: float) -> None:
        """See `RunEngine`."""
        await self._all(lambda engine: engine.wake(timeout_s))

    async def leave(self, timeout_s: float) -> None:
        """See `RunEngine`."""
        await self._all(lambda engine: engine.leave(timeout_s))

    def take_metrics(self) -> dict[str, float]:
        """For each engine since the last call: requests, seconds without any, tokens per second of the others; and
        restarts in all. Failures of the tool parser are summed over all engines."""
        metrics: dict[str, float] = {}
        for replica in self._replicas:
            metrics |= replica.take_metrics()
        failures = [replica.engine.take_metrics().get(PARSER_FAILURES) for replica in self._replicas]
        known = [number for number in failures if number is not None]
        return metrics | ({PARSER_FAILURES: sum(known)} if known else {})

    async def stop(self) -> None:
        """See `RunEngine`."""
        for task in self._restarts():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(replica.engine.stop() for replica in self._replicas))

    def kill(self) -> None:
        """See `RunEngine`."""
        with contextlib.ExitStack() as stack:  # all of them, also when the first raises
            for replica in self._replicas:
                stack.callback(replica.engine.kill)

    async def _all(self, call: Callable[[Member], Coroutine[Any, Any, T]]) -> list[T]:
        return await _together(call(replica.engine) for replica in self._replicas)


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the others: they may wait for the failed engine."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def worst_report(
    reports: Sequence[ApplyReport], of: str = "replica", numbers: Sequence[int] | None = None
) -> ApplyReport:
    """One report of all engines: all mismatches, and the largest times. `of`: the source of a report, with `numbers` if
    not from 0."""

    def named(names: Callable[[ApplyReport], tuple[str, ...]]) -> tuple[str, ...]:
        each = zip(numbers or range(len(reports)), reports, strict=True)
        return tuple(f"{name} ({of} {n})" for n, report in each for name in names(report))

    return ApplyReport(
        version=next(
            (report.version for report in reports if report.version != reports[0].version), reports[0].version
        ),
        mismatched=named(lambda report: report.mismatched),
        unverified=named(lambda report: report.unverified),
        transfer_s=max(report.transfer_s for report in reports),
        verify_s=max(report.verify_s for report in reports),
        num_bytes=max(report.num_bytes for report in reports),
        stall_s=max(report.stall_s for report in reports),
        memory_bytes=max(report.memory_bytes for report in reports),
    )
