"""The common part of providers of clusters: each run is a job, and the cluster's own queue decides on its start.

Guarantees: a job's name is stored before the job is submitted, and looked up before another is: a pass that was killed
between loses no job and makes no second run. The run folder tells the end of a job without a trace in the cluster.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.config import Loaded, RunConfig
from slipstream.plan.memory.cards import MEMORY_GIB, Gpus, chosen_gpus
from slipstream.runlog.files import SERVICE_FOLDER
from slipstream.service import preflight
from slipstream.service.ending import conclude
from slipstream.service.preflight import Preflight
from slipstream.service.provider import Capacity
from slipstream.service.records import ACTIVE, Asked, Job, Record, cancelled
from slipstream.service.store import record_of, update

LOG = f"{SERVICE_FOLDER}/supervisor.log"
_SETTLED_S, _LOOK_AGAIN_S = 30.0, 2.0
_LATE_S = 300.0
"""After a request to cancel and `run.grace_s`, before the job itself is ended."""


@dataclass(frozen=True)
class Seen:
    """A job as its cluster shows it."""

    id: str
    state: str
    """In the cluster's words."""
    has_ended: bool
    """Whether it will not run again."""
    was_cancelled: bool = False
    was_lost: bool = False
    """Whether the cluster itself has ended it, as with a node."""


@dataclass(frozen=True)
class Shape:
    """The smallest node of a cluster."""

    cpus: int
    gpus: int
    kind: str = ""
    """The GPUs' kind, as the cluster names it."""


class Cluster(ABC):
    """See `Provider`."""

    name: str
    title: str
    fresh_s: float
    """How long a list of jobs is good."""

    def __init__(self, *, plans_apart: bool = False) -> None:
        """`plans_apart`: a plan is made in a process of its own, as it imports the user's code."""
        self._plans_apart = plans_apart
        self._jobs: dict[str, Seen] = {}
        self._listed = float("-inf")

    @abstractmethod
    def preflight(self, folder: Path, loaded: Loaded, asked: Asked) -> Preflight:
        """See `Provider`."""

    @abstractmethod
    def list_jobs(self, record: Record) -> dict[str, Seen]:
        """All jobs of this user on the record's cluster, by name. Raises ConfigError."""

    @abstractmethod
    def submit_job(self, folder: Path, record: Record, name: str) -> str:
        """Submit a job, and return the cluster's id of it. Raises ConfigError."""

    @abstractmethod
    def end_job(self, record: Record, seen: Seen) -> None:
        """Have the cluster end a job. Raises ConfigError."""

    def accounted(self, job: Job) -> Seen | None:
        """A job by the cluster's accounting."""
        return None

    def capacity(self, records: Sequence[Record]) -> Capacity | None:
        """See `Provider`: the cluster's own queue decides."""
        return None

    def submit(self, folder: Path, record: Record) -> None:
        """See `Provider`."""
        record = update(folder, lambda now: _with_job(folder, now))
        job = record.job
        if record.state != "queued" or job is None or job.id:
            return
        found = self._list(record).get(job.name)
        number = found.id if found is not None else self.submit_job(folder, record, job.name)
        update(folder, lambda now: _numbered(now, job.name, number))

    def poll(self, folder: Path, record: Record) -> bool:
        """See `Provider`."""
        seen = self._seen(record, record.job) if record.job is not None else None
        return seen is not None and not seen.has_ended

    def cancel(self, folder: Path) -> Record:
        """See `Provider`. A started run saves a checkpoint first: its supervisor sees the request."""
        before = record_of(folder)
        record = update(folder, lambda record: cancelled(record, time.time()))
        has_changed = before is not None and not before.has_ended and record.has_ended
        if has_changed and record.job is not None and not record.job.is_over:
            seen = self._list(record).get(record.job.name)
            if seen is not None and not seen.has_ended:
                self.end_job(record, seen)
        return record

    def sweep(self, folder: Path, record: Record) -> Record:
        """See `Provider`."""
        job = record.job
        if job is None or job.is_over or record.has_ended:
            return record
        seen = self._seen(record, job)
        if seen is not None and not seen.has_ended:
            return self._watched(folder, record, seen)
        if seen is None and (not job.id or time.time() - job.submitted < _SETTLED_S):
            return record  # not submitted so far, or too new for the list
        if seen is not None:  # before another start a job may look ended for a moment
            time.sleep(_LOOK_AGAIN_S)
            self._list(record)
            seen = self._seen(record, job)
            if seen is not None and not seen.has_ended:
                return record
        if record.state in ACTIVE:
            if seen is not None and seen.was_cancelled:
                update(folder, lambda now: cancelled(now, time.time()))
            forgotten = f"job {job.id} was stopped" if seen is None else ""
            conclude(folder, record.launches, None, stopped=forgotten)
        return update(folder, lambda now: self._judged(now, job.name, seen))

    def _watched(self, folder: Path, record: Record, seen: Seen) -> Record:
        """The record of a living job, with why it waits."""
        if record.cancel_requested and time.time() - record.cancel_requested > record.grace_s + _LATE_S:
            self.end_job(record, seen)
        reason = f"job {seen.id} of {self.title}: {seen.state}"
        if record.state != "queued" or (record.reason == reason and record.job is not None and record.job.id):
            return record

        def change(now: Record) -> Record:
            now = _numbered(now, record.job.name if record.job is not None else "", seen.id)
            return msgspec.structs.replace(now, reason=reason) if now.state == "queued" else now

        return update(folder, change)

    def _judged(self, record: Record, name: str, seen: Seen | None) -> Record:
        """A queued run after the end of its job: another job follows, or nothing."""
        job = record.job
        if record.state != "queued" or job is None or job.name != name:
            return record
        has_begun = bool(record.attempts) and record.attempts[-1].started >= job.submitted
        was_stopped = has_begun and record.attempts[-1].kind == "stopped"
        if seen.was_cancelled if seen is not None else was_stopped:
            record = msgspec.structs.replace(record, cancel_requested=record.cancel_requested or time.time())
            return cancelled(record, time.time())
        if has_begun or (seen is not None and seen.was_lost):
            return msgspec.structs.replace(record, job=msgspec.structs.replace(job, is_over=True))
        if seen is None:
            reason = f"{self.title} no longer knows job {job.id}, and it had not started: submit it again"
        else:
            reason = f"job {job.id} ended ({seen.state}) before it started the run: look at {LOG} in the run folder"
        return msgspec.structs.replace(record, state="failed", reason=reason)

    def _list(self, record: Record) -> dict[str, Seen]:
        self._jobs, self._listed = self.list_jobs(record), time.monotonic()
        return self._jobs

    def _seen(self, record: Record, job: Job) -> Seen | None:
        """A job as it is now; None if the cluster does not know it."""
        if time.monotonic() - self._listed > self.fresh_s:
            self._list(record)
        found = self._jobs.get(job.name)
        return self.accounted(job) if found is None and job.id else found

    def planned(self, folder: Path, loaded: Loaded, asked: Asked, kind: str) -> Preflight:
        """The plan for a node with GPUs of a kind, or without any. No plan for an unknown kind."""
        gpus, kind = asked.gpus_per_node or 0, kind.lower().replace("_", "-")
        if gpus and kind not in MEMORY_GIB:
            why = f"{self.title} calls the GPUs {kind!r}, an unknown kind"
            found = preflight.unplanned(loaded, why, gpus * loaded.config.cluster.nodes)
        else:
            cards: Gpus | None = chosen_gpus(kind, None, gpus) if gpus else None
            apart = self._plans_apart
            found = preflight.ask(folder, self.name, cards) if apart else preflight.plan_for(loaded, cards)
        return msgspec.structs.replace(found, asked=asked)


def _with_job(folder: Path, record: Record) -> Record:
    """The record with the name of a next job, if it needs one."""
    job = record.job
    if record.state != "queued" or (job is not None and not job.is_over):
        return record
    number = job.number + 1 if job is not None else 1
    # No other run's, nor that of another submission of this folder.
    digest = hashlib.sha256(f"{folder.absolute()} {record.submitted}".encode()).hexdigest()[:10]
    return msgspec.structs.replace(record, job=Job(f"{record.id}-{digest}-{number}", number, time.time()))


def _numbered(record: Record, name: str, number: str) -> Record:
    job = record.job
    if job is None or job.name != name or job.id:
        return record
    return msgspec.structs.replace(record, job=msgspec.structs.replace(job, id=number))


def filled_in(config: RunConfig, asked: Asked, shape: Shape | None) -> Asked:
    """The options with nodes, and GPUs and cores of each: by default the GPUs that the run uses, if the cluster has
    any, and their share of the cores. `shape` is None without a cluster here."""
    from slipstream.config.traits import engine_workers, shares_weights, starts_engines, starts_teacher

    nodes, gpus, cpus = config.cluster.nodes, asked.gpus_per_node, asked.cpus_per_task
    if gpus is None and isinstance(config.cluster.gpus_per_node, int):
        gpus = config.cluster.gpus_per_node
    if gpus is None:
        beside = starts_engines(config) and not shares_weights(config) and config.run.placement != "shared"
        whole = config.training.ranks + (engine_workers(config) if beside else 0) + starts_teacher(config)
        gpus = max(-(-whole // nodes), config.inference.tensor_parallel_size if beside else 1)
        gpus = 0 if shape is not None and not shape.gpus else gpus
    if cpus is None and isinstance(config.run.threads, int):
        cpus = config.run.threads
    elif cpus is None and shape is not None:
        cpus = max(1, shape.cpus * min(gpus, shape.gpus) // shape.gpus) if gpus and shape.gpus else shape.cpus
    return msgspec.structs.replace(asked, nodes=nodes, gpus_per_node=gpus, cpus_per_task=cpus)
