"""The record of a submitted run, and its states. Pure.

    queued -> preparing -> running -> finalising -> done | failed | cancelled

A retry leads from finalising back to queued. A run whose job never started fails from queued. `step` alone allows or
refuses a change.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from slipstream.errors import ConfigError
from slipstream.plan.times import Estimate
from slipstream.processes.identity import Handle

State = Literal["queued", "preparing", "running", "finalising", "done", "failed", "cancelled"]
Kind = Literal["finished", "infrastructure", "memory", "user", "stopped"]
"""How an attempt ended, as the retry policy sees it; `stopped`: by its cluster, as before a time limit."""
TERMINAL = frozenset({"done", "failed", "cancelled"})
ACTIVE = frozenset({"preparing", "running", "finalising"})
"""States with leases."""
NEXT: dict[State, frozenset[State]] = {
    "queued": frozenset({"preparing", "failed", "cancelled"}),
    "preparing": frozenset({"queued", "running", "finalising", "cancelled"}),
    "running": frozenset({"finalising"}),
    "finalising": frozenset({"queued", "done", "failed", "cancelled"}),
    "done": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


class Need(msgspec.Struct, frozen=True):
    """The smallest set of GPUs for the plan; 0 GPUs: the CPU."""

    gpus: int
    full_bytes: int = 0
    """Bytes of each GPU, as planned for an empty one."""
    least_bytes: int = 0
    """The least for any plan."""


class Lease(msgspec.Struct, frozen=True):
    """A run's part of a place."""

    place: str
    """UUID of a GPU, or `cpu`."""
    bytes: int = 0
    granted_bytes: int = 0
    """Free memory at the start: the run plans with it."""


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of `slipstream submit` for a cluster."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    """Cores on each node."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()
    """Of sbatch."""
    address: str = ""
    """Of a Ray cluster."""
    kind: str = ""
    """Of GPUs that SkyPilot looks for."""
    infra: str = ""
    """A cloud as SkyPilot names it."""


NO_OPTIONS = Asked()
_OF_NODES = ("nodes", "gpus_per_node", "cpus_per_task")
_OPTIONS = {
    "local": (),
    "slurm": (*_OF_NODES, "time", "partition", "account", "options"),
    "ray": (*_OF_NODES, "address"),
    "sky": ("gpus_per_node", "kind", "infra"),
}
_FLAGS = {"options": "sbatch-options", "address": "ray-address", "kind": "accelerator"}


def refuse_others(to: str, asked: Asked) -> None:
    """Raises ConfigError for options of another provider."""
    for name in asked.__struct_fields__:
        if name not in _OPTIONS[to] and getattr(asked, name):
            flag = _FLAGS.get(name, name.replace("_", "-"))
            raise ConfigError(f"--{flag} does not go with --to {to}: leave it out")


class Job(msgspec.Struct, frozen=True):
    """A run's newest job on a cluster. Its name follows from the run and the job's number. It is stored before the job
    is submitted, and a second job of this name does nothing."""

    name: str
    number: int
    submitted: float
    id: str = ""
    """The cluster's, once it is known."""
    is_over: bool = False
    """Whether it will not start the run again."""


class Attempt(msgspec.Struct, frozen=True):
    """One start of a run."""

    number: int
    started: float
    places: tuple[str, ...] = ()
    ended: float = 0.0
    exit_code: int | None = None
    kind: Kind | None = None
    failure_class: str = ""
    message: str = ""
    decision: str = ""
    """The retry policy's, stored before it is acted on."""
    saved: int = 0
    """Step of the newest checkpoint at its end."""


class Actual(msgspec.Struct, frozen=True):
    """Measured figures of a run, beside its `Estimate`."""

    steps: int = 0
    step_s: float | None = None
    """Median."""
    rest_s: float | None = None
    """All but the steps."""
    seconds: float = 0.0
    """All attempts."""
    gpu_hours: float = 0.0
    memory_gib: float | None = None
    """Peak on a GPU: of the whole run, or of the trainer where the driver does not show its processes."""
    queued_s: float = 0.0
    """Before the first attempt."""
    start_s: dict[str, float] = {}
    """Seconds by the stages of all starts. Some overlap."""
    parts_s: dict[str, float] = {}
    """Seconds by the parts of all steps. `generate` overlaps the others."""
    uploads_s: float = 0.0
    """After the last training process, until all artifacts were in the store."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    generated_per_s: float | None = None
    """Tokens a second while generating."""
    trained_per_s: float | None = None
    """Tokens a second while training."""
    peaks_gib: dict[str, float] = {}
    """Peaks of memory: `trainer`, `engine` and the whole run (`gpu`) on a GPU, `host` of the largest process."""
    cost: float | None = None
    """By `Record.price`."""
    wandb_url: str = ""
    consoles: dict[str, str] = {}
    """Process, and the file of its output below the run folder."""


class Record(msgspec.Struct, frozen=True):
    """A submitted run. Times are Unix times."""

    id: str
    owner: str
    host: str
    submitted: float
    cwd: str
    model: str
    algorithm: str
    steps: int
    grace_s: float
    need: Need
    estimate: Estimate
    state: State = "queued"
    to: str = "local"
    """The provider's name."""
    asked: Asked = NO_OPTIONS
    job: Job | None = None
    store: str = ""
    """Address of the store for its artifacts."""
    price: float | None = None
    """Of a GPU-hour."""
    reason: str = ""
    """Why it waits, or has ended."""
    changed: float = 0.0
    cancel_requested: float = 0.0
    launches: int = 0
    """How many supervisors were started; the last one alone may claim the attempt."""
    handle: Handle | None = None
    """The supervisor."""
    worker: Handle | None = None
    """The training process."""
    leases: tuple[Lease, ...] = ()
    not_before: float = 0.0
    overtaken: int = 0
    """How many later runs were started before it."""
    attempts: tuple[Attempt, ...] = ()
    actual: Actual | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.state in TERMINAL


def step(old: Record, new: Record, now: float) -> Record:
    """The record after a change from `old` to `new`: `old` if its state was terminal, cancelled after a request."""
    if old.has_ended:
        return old
    if new.cancel_requested and new.state in ("queued", "done", "failed"):
        new = msgspec.structs.replace(new, state="cancelled", reason="cancelled")
    if new.state != old.state and new.state not in NEXT[old.state]:
        raise ValueError(f"no transition from {old.state} to {new.state}")
    if new.state not in ACTIVE:
        new = msgspec.structs.replace(new, leases=(), handle=None, worker=None)
    return msgspec.structs.replace(new, changed=now) if new.state != old.state else new


def cancelled(record: Record, now: float) -> Record:
    """`record` after a request to cancel: at once if no supervisor has claimed it."""
    record = msgspec.structs.replace(record, cancel_requested=record.cancel_requested or now)
    if record.state == "preparing" and record.handle is None:
        return msgspec.structs.replace(record, state="cancelled", reason="cancelled")
    return record
