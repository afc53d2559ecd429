"""The GPUs of this machine, by nvidia-smi."""

from __future__ import annotations

import os
from collections.abc import Collection

from slipstream.plan.machine import query_gpus
from slipstream.service.allocation import Gpu, Process

_GPUS, _PROCESSES = "gpu=uuid,memory.total,memory.used,name", "compute-apps=gpu_uuid,pid,used_memory,process_name"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine in CUDA_VISIBLE_DEVICES, by nvidia-smi; empty without any."""
    answers = query_gpus(_GPUS, _PROCESSES)
    if not answers:
        return ()
    processes = _processes(answers[1])
    gpus = [
        Gpu(uuid, name, int(total) << 20, int(used) << 20, tuple(processes.get(uuid, ())))
        for uuid, total, used, name in _rows(answers[0], 4)
        if total.isdecimal() and used.isdecimal()
    ]
    asked = os.environ.get(_VISIBLE)
    if asked is None:
        return tuple(gpus)
    named = [part.strip() for part in asked.split(",") if part.strip()]
    return tuple(gpu for index, gpu in enumerate(gpus) if any(_names(part, index, gpu.uuid) for part in named))


def held_bytes(pids: Collection[int]) -> int:
    """Bytes of these processes on the GPU where they hold most; 0 where the driver shows none of them."""
    processes = _processes("".join(query_gpus(_PROCESSES)))
    return max((sum(each.bytes for each in own if each.pid in pids) for own in processes.values()), default=0)


def _processes(text: str) -> dict[str, list[Process]]:
    """The processes of each GPU, by its UUID."""
    found: dict[str, list[Process]] = {}
    for uuid, pid, size, name in _rows(text, 4):
        if pid.isdecimal():
            used = int(size) << 20 if size.isdecimal() else 0
            found.setdefault(uuid, []).append(Process(int(pid), used, name.rpartition("/")[2]))
    return found


def _names(part: str, index: int, uuid: str) -> bool:
    return part == str(index) or (part.startswith("GPU-") and uuid.startswith(part))


def _rows(text: str, num: int) -> list[list[str]]:
    rows = [[part.strip() for part in line.split(",", num - 1)] for line in text.splitlines()]
    return [row for row in rows if len(row) == num]


def ask_driver() -> tuple[str, int]:
    """Name and major compute capability of the first GPU."""
    rows = _rows((query_gpus("gpu=name,compute_cap") or [""])[0], 2)
    major = rows[0][1].partition(".")[0] if rows else ""
    return (rows[0][0] if rows else ""), (int(major) if major.isdecimal() else 0)
