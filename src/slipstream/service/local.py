"""The provider of this machine: its GPUs, or its CPU as one place.

A provider measures (`capacity`), starts an attempt (`submit`), sees whether its supervisor lives (`poll`), asks for its
end (`cancel`) and concludes attempts without a supervisor (`sweep`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from slipstream.plan.machine import query_gpus
from slipstream.processes.identity import is_alive
from slipstream.processes.launchers import LOCAL, Child
from slipstream.runlog import is_running
from slipstream.runlog.files import SERVICE_FOLDER
from slipstream.service.allocation import Gpu, Process, free_bytes
from slipstream.service.ending import conclude
from slipstream.service.records import ACTIVE, Record, cancelled
from slipstream.service.store import record_of, update

_GPUS, _PROCESSES = "gpu=uuid,memory.total,memory.used,name", "compute-apps=gpu_uuid,pid,used_memory,process_name"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CLAIM_S, _PAUSE_S = 60.0, 0.02
_LOG = f"{SERVICE_FOLDER}/supervisor.log"


@dataclass(frozen=True)
class Capacity:
    """All GPUs, and the bytes of each place for another run."""

    gpus: tuple[Gpu, ...]
    free: dict[str, int]


class Provider(Protocol):
    """A place for runs."""

    def capacity(self, records: Sequence[Record]) -> Capacity:
        """GPUs and free memory beside these runs."""
        ...

    def submit(self, folder: Path, record: Record) -> None:
        """Start the newest attempt. Its supervisor has stored its handle when this returns, or never will."""
        ...

    def poll(self, folder: Path, record: Record) -> bool:
        """Whether the attempt goes on."""
        ...

    def cancel(self, folder: Path) -> Record:
        """Ask for the end of a run, in any state."""
        ...

    def sweep(self, folder: Path, record: Record) -> Record:
        """The record, after a lost attempt was concluded."""
        ...

    def pids(self, records: Sequence[Record]) -> frozenset[int]:
        """Processes of these runs."""
        ...


class Local:
    """See `Provider`."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def capacity(self, records: Sequence[Record]) -> Capacity:
        """See `Provider`."""
        gpus = read_gpus()
        return Capacity(gpus, free_bytes(gpus, records, self.pids(records) if gpus else frozenset()))

    def submit(self, folder: Path, record: Record) -> None:
        """See `Provider`."""
        arguments = [str(folder), str(record.launches)]
        child = LOCAL.launch("slipstream.service.supervisor", arguments, output=folder / _LOG)
        self._children = [each for each in self._children if each.poll() is None]
        self._children.append(child)
        until = time.monotonic() + _CLAIM_S
        while time.monotonic() < until and child.poll() is None:
            now = record_of(folder)
            if now is None or now.handle is not None or now.launches != record.launches or now.state != "preparing":
                return
            time.sleep(_PAUSE_S)

    def poll(self, folder: Path, record: Record) -> bool:
        """See `Provider`."""
        for child in self._children:  # an ended child is a zombie until somebody asks
            child.poll()
        if record.handle is not None and is_alive(record.handle):
            return True
        return is_running(folder) or (record.worker is not None and is_alive(record.worker))

    def cancel(self, folder: Path) -> Record:
        """See `Provider`."""
        return update(folder, lambda record: cancelled(record, time.time()))

    def sweep(self, folder: Path, record: Record) -> Record:
        """See `Provider`. A worker without a supervisor is about to end by itself, and is killed all the same."""
        if record.state not in ACTIVE or (record.handle is not None and is_alive(record.handle)):
            return record
        if record.handle is None:
            return update(folder, lambda now: _unclaimed(now, record.launches))
        if record.worker is not None and is_alive(record.worker):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(record.worker.pid, signal.SIGKILL)
        if self.poll(folder, record):
            return record  # the next pass looks again
        return conclude(folder, record.launches, None)

    def pids(self, records: Sequence[Record]) -> frozenset[int]:
        """See `Provider`."""
        found: set[int] = set()
        for record in records:
            if record.handle is not None and is_alive(record.handle):
                with contextlib.suppress(psutil.Error):
                    found |= {each.pid for each in psutil.Process(record.handle.pid).children(recursive=True)}
        return frozenset(found)


def _unclaimed(record: Record, launch: int) -> Record:
    """An attempt without a supervisor did not begin."""
    if record.launches != launch or record.state != "preparing" or record.handle is not None:
        return record
    return msgspec.structs.replace(record, state="queued", attempts=record.attempts[:-1])


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine in CUDA_VISIBLE_DEVICES, by nvidia-smi; empty without any."""
    answers = query_gpus(_GPUS, _PROCESSES)
    if not answers:
        return ()
    processes: dict[str, list[Process]] = {}
    for uuid, pid, size, name in _rows(answers[1], 4):
        if pid.isdecimal():
            used = int(size) << 20 if size.isdecimal() else 0
            processes.setdefault(uuid, []).append(Process(int(pid), used, name.rpartition("/")[2]))
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
