"""The provider of this machine: its GPUs, or its CPU as one place."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from slipstream.config import Loaded
from slipstream.errors import ConfigError
from slipstream.processes.identity import is_alive
from slipstream.processes.launchers import LOCAL, Child
from slipstream.runlog import is_running
from slipstream.runlog.files import SERVICE_FOLDER
from slipstream.service import preflight
from slipstream.service.allocation import free_bytes
from slipstream.service.ending import conclude
from slipstream.service.gpus import read_gpus
from slipstream.service.preflight import Preflight
from slipstream.service.provider import Capacity
from slipstream.service.records import ACTIVE, Asked, Record, cancelled, refuse_others
from slipstream.service.store import record_of, update

_CLAIM_S, _PAUSE_S = 60.0, 0.02
_LOG = f"{SERVICE_FOLDER}/supervisor.log"


class Local:
    """See `Provider`."""

    def __init__(self, *, plans_apart: bool = False) -> None:
        """`plans_apart`: a plan is made in a process of its own, as it imports the user's code."""
        self._plans_apart = plans_apart
        self._children: list[Child] = []

    def preflight(self, folder: Path, loaded: Loaded, asked: Asked) -> Preflight:
        """See `Provider`."""
        if loaded.config.cluster.nodes > 1:
            raise ConfigError(f"cluster.nodes = {loaded.config.cluster.nodes} needs a cluster: add --to slurm")
        refuse_others("local", asked)
        return preflight.ask(folder) if self._plans_apart else preflight.plan_ahead(loaded)

    def capacity(self, records: Sequence[Record]) -> Capacity:
        """See `Provider`."""
        gpus = read_gpus()
        own = _pids(records) if gpus else frozenset[int]()
        return Capacity(gpus, free_bytes(gpus, records, own), own)

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


def _pids(records: Sequence[Record]) -> frozenset[int]:
    """Processes of these runs."""
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
