"""The choice of queued runs to start, and of their GPUs. Pure.

The order: first come, first served. A later run may start while an earlier one waits for memory or GPUs, but no run is
overtaken more than `MAX_OVERTAKEN` times. A run gets the GPUs with the most free memory, so an idle GPU comes before a
shared one. Free memory is the GPU's, less the memory of other programs and the leases of runs, used or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.plan.memory.sizes import gib
from slipstream.service.records import ACTIVE, Lease, Need, Record

MAX_OVERTAKEN = 4
CPU = "cpu"
"""The one place of a machine without GPUs; it has one run at a time."""


@dataclass(frozen=True)
class Process:
    """A program on a GPU, as the driver tells it."""

    pid: int
    bytes: int
    name: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver tells it."""

    uuid: str
    name: str
    total: int
    used: int
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Start:
    """A run to start."""

    id: str
    leases: tuple[Lease, ...]


@dataclass(frozen=True)
class Choice:
    """Runs to start, the reasons of the waiting ones, and how often each is overtaken."""

    starts: tuple[Start, ...]
    waits: Mapping[str, str]
    overtaken: Mapping[str, int]


def taken_bytes(gpu: Gpu, own_pids: Collection[int], leased: int) -> int:
    """Bytes of a GPU for no further run: leased or used by our runs, and held by other programs. In a container the
    driver may show no processes: then others hold all memory above the leases."""
    if not gpu.processes:
        return max(leased, gpu.used)
    own = sum(each.bytes for each in gpu.processes if each.pid in own_pids)
    return max(leased, own) + max(0, gpu.used - own)


def leased_bytes(records: Iterable[Record]) -> dict[str, int]:
    """Leased bytes of each place; the CPU counts 1."""
    found: dict[str, int] = {}
    for record in records:
        for lease in record.leases if record.state in ACTIVE else ():
            found[lease.place] = found.get(lease.place, 0) + max(1, lease.bytes)
    return found


def free_bytes(gpus: Sequence[Gpu], records: Sequence[Record], own_pids: Collection[int]) -> dict[str, int]:
    """Bytes of each place for another run. Without GPUs the CPU is a place while no run has it."""
    leased = leased_bytes(records)
    if not gpus:
        return {} if CPU in leased else {CPU: 0}
    return {gpu.uuid: max(0, gpu.total - taken_bytes(gpu, own_pids, leased.get(gpu.uuid, 0))) for gpu in gpus}


def place(need: Need, free: Mapping[str, int]) -> tuple[Lease, ...]:
    """Leases of the GPUs with the most free memory; empty if too few have enough."""
    if not need.gpus:
        return (Lease(CPU),) if CPU in free else ()
    fitting = sorted((uuid for uuid in free if uuid != CPU and free[uuid] >= need.least_bytes), key=lambda u: -free[u])
    chosen = fitting[: need.gpus]
    if len(chosen) < need.gpus:
        return ()
    return tuple(Lease(uuid, min(free[uuid], need.full_bytes), free[uuid]) for uuid in chosen)


def choose(queued: Sequence[Record], free: Mapping[str, int], now: float) -> Choice:
    """Runs to start now, of `queued` in the order of submission."""
    left, starts = dict(free), list[Start]()
    waiting: list[Record] = []
    overtaken: dict[str, int] = {}
    waits: dict[str, str] = {}
    for record in sorted(queued, key=lambda each: (each.submitted, each.id)):
        if record.not_before > now:  # it waits by itself, so the others do not wait for it
            waits[record.id] = f"waits {record.not_before - now:.0f} s before a retry"
            continue
        full = next((each for each in waiting if each.overtaken + overtaken.get(each.id, 0) >= MAX_OVERTAKEN), None)
        leases = () if full else place(record.need, left)
        if not leases:
            waits[record.id] = f"waits for {full.id}, overtaken {MAX_OVERTAKEN} times" if full else ""
            waiting.append(record)
            continue
        starts.append(Start(record.id, leases))
        overtaken |= {each.id: overtaken.get(each.id, 0) + 1 for each in waiting}
        for lease in leases:
            if lease.place == CPU:
                del left[CPU]
            else:
                left[lease.place] -= lease.bytes
    return Choice(tuple(starts), {name: text or _why(name, waiting, left) for name, text in waits.items()}, overtaken)


def _why(name: str, waiting: Sequence[Record], left: Mapping[str, int]) -> str:
    names = [each.id for each in waiting]
    need, before = waiting[names.index(name)].need, names.index(name)
    text = "waits for the CPU"
    if need.gpus:
        free = ", ".join(gib(size) for size in left.values())
        text = f"waits for {need.gpus} x {gib(need.least_bytes)} of GPU memory; free: {free}"
    return f"{text}; {before} before it" if before else text
