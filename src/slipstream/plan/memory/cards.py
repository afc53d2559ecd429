"""GPUs to plan for without having them, and the memory of a GPU held by other processes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.config.parse.suggestions import closest
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts
from slipstream.plan.memory.sizes import GIB, gib

MEMORY_GIB = {
    "h100": 79.1,
    "h200": 139.8,
    "b200": 178.3,
    "a100-40": 39.4,
    "a100-80": 79.1,
    "l40s": 44.4,
    "l4": 22.0,
    "a10": 22.0,
    "rtx-5090": 31.3,
    "rtx-4090": 23.5,
    "rtx-3090": 23.5,
    "v100": 15.7,
    "t4": 14.5,
}
"""Torch's figures, rounded down: the driver keeps a part of a card's nominal memory."""
CAPABILITY = {"h100": 9, "h200": 9, "b200": 10, "rtx-5090": 12, "v100": 7, "t4": 7}
"""Major compute capability; of all others 8."""
HAS_BFLOAT16 = 8
"""Least compute capability for bfloat16."""
SAFE_HELD = GIB
"""With less memory in use, nobody is said to hold a GPU: it is the driver's own, and a display's."""
STATE = ("uuid", "memory.total", "memory.used", "driver_version", "temperature.gpu", "name")
"""Fields asked of nvidia-smi."""
_STEP = GIB // 4
"""Held memory is rounded up to a multiple: two plans of one start are the same."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a planned run; `memory_bytes` and `capability` as in `Facts`."""

    count: int = 0
    memory_bytes: int = 0
    capability: int = 0
    name: str = ""
    held_bytes: int = 0
    """Held by other processes, on the GPU with the least free memory."""
    holders: tuple[str, ...] = ()
    """The processes, for people, as far as visible."""
    is_here: bool = True
    """Whether they are this machine's."""


def chosen_gpus(device: str | None, memory_gib: float | None, count: int) -> Gpus | None:
    """The GPUs named by options of the command line; None if they name none."""
    if device is None and memory_gib is None:
        if count != 1:
            raise ConfigError(f"--gpus {count} needs their kind: add --device or --device-memory")
        return None
    if count < 1:
        raise ConfigError(f"--gpus {count} is no number of GPUs: use 1 or more")
    name = (device or "").strip().lower().replace("_", "-").replace(" ", "-")
    if device is not None and name not in MEMORY_GIB:
        near = closest(name, sorted(MEMORY_GIB))
        hint = f"did you mean {near}?" if near else f"use {', '.join(MEMORY_GIB)}"
        raise ConfigError(f"--device {device} is not known: {hint} (or --device-memory GIB)")
    size = MEMORY_GIB[name] if memory_gib is None else memory_gib
    if not math.isfinite(size) or size <= 0:
        raise ConfigError(f"--device-memory {size:g} is no amount of memory: use GiB of one GPU, such as 24")
    return Gpus(count, int(size * GIB), CAPABILITY.get(name, 8), name or f"GPU with {size:g} GiB", is_here=False)


def with_held(gpus: Gpus, totals: Sequence[int], used: Sequence[int], processes: Sequence[Sequence[str]] = ()) -> Gpus:
    """`gpus` with the held memory. For each: its memory, the part in use, and the processes in it."""
    free = [total - _held(amount) for total, amount in zip(totals, used, strict=True)]
    fullest = free.index(min(free))
    held = max(0, gpus.memory_bytes - free[fullest])
    holders = tuple(processes[fullest]) if held and processes else ()
    return replace(gpus, held_bytes=held, holders=holders)


def _held(used: int) -> int:
    return 0 if used < SAFE_HELD else -(-used // _STEP) * _STEP


def read_used(text: str) -> dict[str, tuple[int, int]]:
    """Bytes of each GPU, all and in use, by its UUID: rows of nvidia-smi (uuid, memory.total, memory.used in MiB)."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        uuid, *sizes = (part.strip() for part in line.split(","))
        if len(sizes) >= 2 and all(size.isdigit() for size in sizes[:2]):
            found[uuid] = (int(sizes[0]) << 20, int(sizes[1]) << 20)
    return found


def read_processes(text: str) -> dict[str, list[str]]:
    """The processes of each GPU, for people, by its UUID: rows of nvidia-smi (gpu_uuid, pid, used_memory, name)."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        uuid, pid, size, name = (*(part.strip() for part in line.split(",", 3)), "", "", "")[:4]
        if pid:
            amount = f", {gib(int(size) << 20)}" if size.isdigit() else ""
            found.setdefault(uuid, []).append(f"{name.rpartition('/')[2] or 'a process'} (process {pid}{amount})")
    return found


def read_state(used: str, processes: str) -> list[dict[str, str | int | list[str]]]:
    """Each GPU as a run records it: the rows of nvidia-smi with `STATE`, and its processes."""
    of_each, found = read_processes(processes), list[dict[str, str | int | list[str]]]()
    for line in used.splitlines():
        parts = [part.strip() for part in line.split(",", len(STATE) - 1)]
        if len(parts) == len(STATE):
            names = ("uuid", "total_mib", "used_mib", "driver", "temperature_c", "name")
            values = {name: int(part) if part.isdecimal() else part for name, part in zip(names, parts, strict=True)}
            found.append({**values, "processes": of_each.get(parts[0], [])})
    return found


def with_gpus(facts: Facts, gpus: Gpus) -> Facts:
    """`facts` of a machine with these GPUs. If they are elsewhere, its disk is unknown, and its memory is taken to be
    at least twice theirs."""
    facts = replace(
        facts,
        num_gpus=gpus.count,
        gpu_memory_bytes=gpus.memory_bytes,
        gpu_capability=gpus.capability,
        gpu_name=gpus.name,
        gpu_held_bytes=gpus.held_bytes,
        gpu_holders=gpus.holders,
    )
    if gpus.is_here:
        return facts
    memory = max(facts.memory_bytes, 2 * gpus.count * gpus.memory_bytes)
    notice = (
        f"planned for {device_of(facts)}, which this machine need not have: its main memory is taken to be "
        f"{gib(memory)}, its cores to be this machine's {facts.num_cpus}; its disk is not looked at"
    )
    return replace(facts, memory_bytes=memory, disk=None, notices=(notice, *facts.notices))


def has_bfloat16(facts: Facts) -> bool:
    """Whether the device computes in bfloat16, as far as it is known."""
    return not facts.num_gpus or not 0 < facts.gpu_capability < HAS_BFLOAT16


def device_of(facts: Facts) -> str:
    """The device of the plan, for people."""
    if not facts.num_gpus:
        return f"a CPU ({facts.num_cpus} cores, {gib(facts.memory_bytes)})"
    name = facts.gpu_name or "GPU"
    return f"{facts.num_gpus} x {name} ({gib(facts.gpu_memory_bytes)} each)"


def held_by_others(facts: Facts) -> str:
    """Part of a sentence on a GPU's memory held by others; empty without any."""
    if not facts.gpu_held_bytes:
        return ""
    shown = ", ".join(facts.gpu_holders[:3]) or "processes that cannot be seen from here"
    more = f" and {len(facts.gpu_holders) - 3} more" if len(facts.gpu_holders) > 3 else ""
    return f", of which {gib(facts.gpu_held_bytes)} are held by {shown}{more}"
