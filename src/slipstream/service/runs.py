"""The runs of this machine as commands and the service use them. `client.py` has the same over HTTP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from slipstream.artifacts.facts import STORE_VARIABLE
from slipstream.config import Loaded
from slipstream.errors import ConfigError, DataError, SlipstreamError
from slipstream.plan.times import Estimate
from slipstream.regular_files import open_regular
from slipstream.service.checkpoints import ShownCheckpoint, list_checkpoints
from slipstream.service.dispatch import tick
from slipstream.service.ending import exit_since, heartbeat_since
from slipstream.service.providers import Providers, all_providers
from slipstream.service.records import ACTIVE, NO_OPTIONS, Actual, Asked, Attempt, Need, Record
from slipstream.service.store import OUTPUT, Store, name_from
from slipstream.service.submission import submit, unix_user

MAX_CHUNK = 1 << 16
"""Most bytes of one piece of a log."""


class NoSuchRun(ConfigError):
    """There is no run of this name, or it is another user's."""


class Shown(msgspec.Struct, frozen=True):
    """A run as commands and the service show it."""

    id: str
    folder: str
    owner: str
    state: str
    reason: str
    step: int
    steps: int
    model: str
    algorithm: str
    submitted: float
    to: str
    job: str
    """The number of a cluster's job; empty without one."""
    places: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    estimate: Estimate
    estimated_s: float | None
    estimated_cost: float | None
    """By the price of a GPU-hour at the submission."""
    actual: Actual | None
    cancel_requested: bool
    store: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.state in ("done", "failed", "cancelled")

    @property
    def exit_code(self) -> int:
        """The exit code of a command after its end."""
        if self.state == "done":
            return 0
        last = self.attempts[-1].exit_code if self.attempts else None
        return 130 if self.state == "cancelled" else last or 1


class ShownPlace(msgspec.Struct, frozen=True):
    """A GPU, or the CPU."""

    place: str
    name: str
    total_gib: float
    free_gib: float
    """For another run."""
    runs: tuple[str, ...]
    others: tuple[str, ...]
    """Other programs in its memory."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a log."""

    data: bytes
    next: int
    """Offset of the next one."""


class Runs(Protocol):
    """The interface of the queue."""

    def submit(
        self,
        loaded: Loaded,
        name: str,
        *,
        resume: bool = False,
        store: str = "",
        to: str = "local",
        asked: Asked = NO_OPTIONS,
    ) -> Shown:
        """Queue a run for the provider `to`; `store` is the address of a store for its artifacts."""
        ...

    def all(self) -> list[Shown]:
        """All runs, in the order of submission, and then damaged ones: their record cannot be read."""
        ...

    def one(self, name: str) -> Shown:
        """A run. Raises NoSuchRun, and DataError for a damaged record."""
        ...

    def log(self, name: str, offset: int) -> Chunk:
        """The output from a byte on; the end of it for a negative offset."""
        ...

    def cancel(self, name: str) -> Shown:
        """Ask for a run's end."""
        ...

    def checkpoints(self, name: str) -> list[ShownCheckpoint]:
        """A run's checkpoints, here and in its store."""
        ...

    def places(self) -> list[ShownPlace]:
        """GPUs, or the CPU."""
        ...

    def keep_going(self) -> None:
        """Make a pass over the queue, if no service does."""
        ...


class LocalRuns:
    """See `Runs`. With `owner` one user's alone."""

    def __init__(
        self,
        store: Store,
        owner: str = "",
        *,
        records: Callable[[], Sequence[tuple[Path, Record]]] | None = None,
        providers: Providers | None = None,
        folder: Path = Path("runs"),
        is_service: bool = False,
    ) -> None:
        self._store, self._owner = store, owner
        self._records = records or store.records
        self._providers = providers or all_providers(plans_apart=is_service)
        self._folder, self._is_service = folder, is_service

    def submit(
        self,
        loaded: Loaded,
        name: str,
        *,
        resume: bool = False,
        store: str = "",
        to: str = "local",
        asked: Asked = NO_OPTIONS,
    ) -> Shown:
        """See `Runs`. A service has the plan made in another process, and its own store."""
        if self._is_service and loaded.config.run.folder is not None:
            raise ConfigError("run.folder is chosen by the service: leave it out")

        address = os.environ.get(STORE_VARIABLE, "") if self._is_service else store
        folder, record = submit(
            self._store,
            loaded,
            name,
            self._providers[to].preflight,
            to=to,
            asked=asked,
            owner=self._owner,
            runs=self._folder.absolute(),
            resume=resume,
            address=address,
        )
        self.keep_going()
        return shown(folder, self._store.find(record.id)[1])

    def all(self) -> list[Shown]:
        """See `Runs`."""
        records = self._records()
        found = [shown(*each) for each in records if not self._owner or each[1].owner == self._owner]
        if self._sees_damage:
            found += [_damaged(*each) for each in self._store.damaged({record.id for _, record in records})]
        return found

    def one(self, name: str) -> Shown:
        """See `Runs`."""
        return shown(*self._find(name))

    def folder_of(self, name: str) -> Path:
        """The folder of a run. Raises NoSuchRun."""
        return self._find(name)[0]

    def log(self, name: str, offset: int) -> Chunk:
        """See `Runs`."""
        folder, _ = self._find(name)
        try:
            with open_regular(folder / OUTPUT) as file:
                size = os.fstat(file.fileno()).st_size
                start = max(0, size - MAX_CHUNK) if offset < 0 else min(offset, size)
                file.seek(start)
                data = file.read(MAX_CHUNK)
                return Chunk(data, start + len(data))
        except FileNotFoundError:
            return Chunk(b"", 0)

    def cancel(self, name: str) -> Shown:
        """See `Runs`."""
        folder, record = self._find(name)
        record = self._providers[record.to].cancel(folder)
        self.keep_going()
        return shown(folder, record)

    def checkpoints(self, name: str) -> list[ShownCheckpoint]:
        """See `Runs`. A run without a folder here may be in the store."""
        try:
            folder, record = self._find(name)
        except NoSuchRun:
            address = os.environ.get(STORE_VARIABLE, "")
            found = list_checkpoints(None, address, name) if name_from(name) == name and not self._is_service else []
            if not found:
                raise
            return found
        return list_checkpoints(folder, record.store, record.id)

    def places(self) -> list[ShownPlace]:
        """See `Runs`."""
        records = [record for _, record in self._records() if record.state in ACTIVE]
        capacity = self._providers["local"].capacity(records)
        assert capacity is not None
        using = {place: [r.id for r in records if any(each.place == place for each in r.leases)]
                 for place in (*(gpu.uuid for gpu in capacity.gpus), "cpu")}  # fmt: skip
        if not capacity.gpus:
            from slipstream.plan.machine import free_memory_bytes, usable_cpus, usable_memory_bytes

            total, free = usable_memory_bytes() / (1 << 30), free_memory_bytes() / (1 << 30)
            return [ShownPlace("cpu", f"{usable_cpus()} cores", round(total, 2), round(free, 2), (*using["cpu"],), ())]
        return [
            ShownPlace(
                gpu.uuid,
                gpu.name,
                round(gpu.total / (1 << 30), 2),
                round(capacity.free.get(gpu.uuid, 0) / (1 << 30), 2),
                tuple(using[gpu.uuid]),
                tuple(f"{p.name} (process {p.pid})" for p in gpu.processes if p.pid not in capacity.own),
            )
            for gpu in capacity.gpus
        ]

    def keep_going(self) -> None:
        """See `Runs`."""
        tick(self._store, self._providers)

    def _find(self, name: str) -> tuple[Path, Record]:
        with contextlib.suppress(ConfigError, OSError, ValueError):  # a long name, a zero byte
            # A service takes no paths: a folder could be anybody's.
            if not self._is_service or self._store.folder_of(name) is not None:
                try:
                    folder, record = self._store.find(name)
                except DataError:
                    if self._sees_damage:
                        raise
                else:
                    if not self._owner or record.owner == self._owner:
                        return folder, record
        raise NoSuchRun(f"there is no run {name!r} in the queue: slipstream status lists them")

    @property
    def _sees_damage(self) -> bool:
        """A damaged record has no owner, so this Unix user alone sees it."""
        return self._owner in ("", unix_user())


def _places(record: Record) -> tuple[str, ...]:
    """GPUs of this machine, or nodes of a cluster."""
    if record.state not in ACTIVE or record.leases:
        return tuple(lease.place for lease in record.leases)
    return record.attempts[-1].places


def _damaged(name: str, folder: Path, damage: DataError) -> Shown:
    """A run without a readable record."""
    record = Record(name, "", "", 0.0, "", "", "", 0, 0.0, Need(0), Estimate("", 0, 0.0), reason=str(damage))
    return msgspec.structs.replace(shown(folder, record), state="damaged", to="")


def shown(folder: Path, record: Record) -> Shown:
    """A run for people. The step of a running one comes from this attempt's heartbeat, and then from its end."""
    step = record.actual.steps if record.actual is not None else 0
    if record.state in ACTIVE:
        with contextlib.suppress(SlipstreamError):  # a damaged file says nothing
            found = (read(folder, record.attempts[-1].started) for read in (heartbeat_since, exit_since))
            step = max((each.step for each in found if each is not None), default=step)
    hours = record.estimate.gpu_hours
    return Shown(
        id=record.id,
        folder=str(folder),
        owner=record.owner,
        state=record.state,
        reason=record.reason,
        step=step,
        steps=record.steps,
        model=record.model,
        algorithm=record.algorithm,
        submitted=record.submitted,
        to=record.to,
        job=record.job.id if record.job is not None else "",
        places=_places(record),
        attempts=record.attempts,
        estimate=record.estimate,
        estimated_s=record.estimate.seconds,
        estimated_cost=None if record.price is None or hours is None else round(record.price * hours, 2),
        actual=record.actual,
        cancel_requested=record.cancel_requested > 0,
        store=record.store,
    )
