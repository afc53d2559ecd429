"""Several engines as one: who answers what, versions for all of them, and one that dies while the others go on.

A request goes to the engine with the least work, but those of one group to the same one, whose prefix cache then serves
them, for as long as it has free places. Guarantees: from the beginning of an update until all engines have proved the
version no request begins, so that nobody's tokens go back to an older one; an engine whose update failed answers
nothing; what a dead engine was answering is asked again of another, once it is known that no answer will come; a dead
engine starts again in the background, on the version that it had proved, and after too many deaths every call raises.
Where no file holds its weights (`broadcast`) it stays out of service until the next version, which then comes whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slipstream.errors import DeadlineError, EngineError
from slipstream.inference.engine import RunEngine
from slipstream.records import (
    ApplyReport,
    Completion,
    EngineHealth,
    GenerateRequest,
    ParameterSpec,
    Ticket,
    Version,
)
from slipstream.weights.bridges.single_copy import SharedWeights

T = TypeVar("T")


class Member(RunEngine, Protocol):
    """One of several engines."""

    async def replace(self) -> None:
        """Start a dead engine again on its first weights; it must get a whole version before it is asked anything."""
        ...


@dataclass(eq=False)
class _Replica:
    number: int
    engine: Member
    is_serving: bool = True
    """Whether it may be asked; one that is dead and not yet found is."""
    coming_back: asyncio.Task[None] | None = None
    in_flight: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    _busy_since: float = field(default=0.0, repr=False)

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

    def take_metrics(self) -> dict[str, float]:
        now = time.monotonic()
        busy_s = self.busy_s + (now - self._busy_since if self.in_flight else 0.0)
        figures = {"requests": float(self.num_requests), "restarts": float(self.engine.num_restarts)}
        if busy_s:
            figures["tokens_per_s"] = self.num_tokens / busy_s
        self.num_requests, self.num_tokens, self.busy_s, self._busy_since = 0, 0, 0.0, now
        return {f"replica_{self.number}/{name}": value for name, value in figures.items()}


class EngineReplicas:
    """Engines with the same weights behind the face of one. All methods belong to one event loop, but for `kill`."""

    def __init__(self, engines: Sequence[Member], *, num_places: int, on_event: Callable[..., None]) -> None:
        """`num_places`: how many requests an engine has when its group's next one goes to another that has fewer."""
        self._replicas = [_Replica(number, engine) for number, engine in enumerate(engines)]
        self._num_places = num_places
        self._on_event = on_event
        self._homes: dict[str, _Replica] = {}
        """Who has computed the beginning of a group's requests."""
        self._updating = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._failure: Exception | None = None
        """Why an engine cannot come back."""

    @property
    def num_restarts(self) -> int:
        """Of all engines."""
        return sum(replica.engine.num_restarts for replica in self._replicas)

    @property
    def sockets(self) -> tuple[str, ...]:
        """Where each answers."""
        return tuple(socket for replica in self._replicas for socket in replica.engine.sockets)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that were started for them and run."""
        return tuple(pid for replica in self._replicas for pid in replica.engine.pids)

    @property
    def phases(self) -> tuple[tuple[tuple[str, float], ...], ...]:
        """What each engine's start has come to; see `EngineProcess.phases`."""
        return tuple(phases for replica in self._replicas for phases in replica.engine.phases)

    @property
    def is_up(self) -> bool:
        """Whether none of them is dead or just being started again."""
        return all(replica.engine.is_up for replica in self._replicas)

    @property
    def is_in_memory_only(self) -> bool:
        """Whether no file holds the weights that one of them has or had."""
        return any(replica.engine.is_in_memory_only for replica in self._replicas)

    @property
    def each(self) -> tuple[Member, ...]:
        """Those that are in service."""
        return tuple(replica.engine for replica in self._replicas if replica.is_serving)

    def launch(self) -> None:
        """Begin to start all of them."""
        for replica in self._replicas:
            replica.engine.launch()

    async def wait_ready(self) -> EngineHealth:
        """Wait until all are in service; what the first says."""
        return (await self._all(lambda engine: engine.wait_ready()))[0]

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion, by whichever engine; asked again of another when that one dies."""
        while True:
            replica = await self._place_for(request)
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

    async def _place_for(self, request: GenerateRequest) -> _Replica:
        while True:
            await self._settled.wait()
            self._raise_failure()
            replica = self._choose(request.group_id)
            if replica is not None:
                return replica
            await self._until_one_is_back()

    def _choose(self, group_id: str) -> _Replica | None:
        self._find_dead()
        able = [replica for replica in self._replicas if replica.is_serving]
        if not able:
            return None
        least = min(able, key=lambda replica: replica.in_flight)
        home = self._homes.get(group_id, least)
        is_full = home.in_flight >= self._num_places > least.in_flight
        if is_full or not home.is_serving:
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
                self._begin_back(
                    replica, knows_weights=any(other.is_serving and other.engine.is_up for other in others)
                )

    def _begin_back(self, replica: _Replica, *, knows_weights: bool) -> None:
        replica.coming_back = asyncio.create_task(self._bring_back(replica, knows_weights))

    async def _bring_back(self, replica: _Replica, knows_weights: bool) -> None:
        """Start it again; `knows_weights`: somebody else has the weights, if no file has."""
        try:
            if replica.engine.is_in_memory_only and knows_weights:
                await replica.engine.replace()
            else:
                await replica.engine.revive()
                replica.is_serving = True
        except Exception as error:  # noqa: BLE001 (raised by the next call, whoever makes it)
            self._failure = self._failure or error
            self._settled.set()  # nobody waits for an update that will not come
        finally:
            if replica.coming_back is asyncio.current_task():
                replica.coming_back = None

    def _coming_back(self) -> list[asyncio.Task[None]]:
        return [replica.coming_back for replica in self._replicas if replica.coming_back is not None]

    async def _until_one_is_back(self) -> None:
        """Every start has its deadline."""
        waits = self._coming_back()
        if not waits:
            raise EngineError("no engine is in service: the last version did not reach all of them, so use --resume")
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def revive(self) -> None:
        """Wait until one is in service; raises when a dead one may not be started again."""
        while True:
            await self._settled.wait()
            self._raise_failure()
            self._find_dead()
            if self.each:
                return
            await self._until_one_is_back()

    async def joined(self) -> int:
        """Wait until every engine runs, in service or not; how often one has been started again. Asked by a trainer,
        which has the weights."""
        self._find_dead()
        for replica in self._replicas:
            if not replica.engine.is_up and replica.coming_back is None:
                self._begin_back(replica, knows_weights=True)
        while waits := self._coming_back():
            await asyncio.wait(waits)
        self._raise_failure()
        return self.num_restarts

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Have all of them take a version. Until it is proved everywhere no request begins, and after a failure none
        is answered before a later version is."""
        async with self._updating:
            self._raise_failure()
            self._settled.clear()
            proved, has_ended = [False] * len(self._replicas), False
            try:
                reports = await self._all(lambda engine: engine.apply(ticket, timeout_s))
                proved, has_ended = [not (report.mismatched or report.unverified) for report in reports], True
            finally:
                for replica, is_proved in zip(self._replicas, proved, strict=True):
                    replica.is_serving = is_proved
                self._homes.clear()
                if has_ended or ticket.bridge != "broadcast":  # a broken collective is made again: requests wait
                    self._settled.set()
            return _worst(reports)

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """See `TakesWeights`."""
        return _worst(await self._all(lambda engine: engine.verify(ticket, timeout_s)))

    async def held(self) -> Version | None:
        """The version that all of them have verified and are serving; None when they differ."""
        await self.joined()
        versions = await self._all(lambda engine: engine.held())
        return versions[0] if all(version == versions[0] for version in versions) else None

    async def restart(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        """See `TakesWeights`."""
        await self._all(lambda engine: engine.restart(model, version, parameters))

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> tuple[SharedWeights, ...]:
        """Nothing: there are as many copies as engines."""
        raise EngineError("several engines have no single copy of the weights: use inference.replicas = 1")

    async def fence(self, timeout_s: float) -> None:
        """See `TakesWeights`."""
        await self._all(lambda engine: engine.fence(timeout_s))

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """See `TakesWeights`."""
        await self._all(lambda engine: engine.go_on(version, timeout_s))

    async def sleep(self, timeout_s: float) -> None:
        """Free the memory of all of them."""
        await self.joined()
        await self._all(lambda engine: engine.sleep(timeout_s))

    async def wake(self, timeout_s: float) -> None:
        """Take it back."""
        await self._all(lambda engine: engine.wake(timeout_s))

    def take_metrics(self) -> dict[str, float]:
        """What each has done since the last call: requests, tokens a second while it had any; and its restarts."""
        metrics: dict[str, float] = {}
        for replica in self._replicas:
            metrics |= replica.take_metrics()
        return metrics

    async def stop(self) -> None:
        """Stop all of them for good."""
        for task in self._coming_back():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(replica.engine.stop() for replica in self._replicas))

    def kill(self) -> None:
        """The same at once, from any thread and without an event loop."""
        with contextlib.ExitStack() as stack:  # all of them, whatever becomes of the first
            for replica in self._replicas:
                stack.callback(replica.engine.kill)

    async def _all(self, call: Callable[[Member], Coroutine[Any, Any, T]]) -> list[T]:
        return await _together(call(replica.engine) for replica in self._replicas)


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the others, so that none goes on waiting for somebody who is gone."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _worst(reports: Sequence[ApplyReport]) -> ApplyReport:
    """One report of all engines: everything that is wrong anywhere, and the slowest one's times."""

    def named(names: Callable[[ApplyReport], tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(f"{name} (replica {n})" for n, report in enumerate(reports) for name in names(report))

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
        memory_bytes=sum(report.memory_bytes for report in reports),
    )
