"""A provider of machines for runs: this machine, or a cluster with its own queue.

The queue's records, states, retries and artifacts are the same everywhere; a provider starts supervisors, and tells
whether they live. Guarantees of each: whatever it starts is stored in the record before anything waits for it, and a
second start of an attempt does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream.config import Loaded
from slipstream.service.allocation import Gpu
from slipstream.service.preflight import Preflight
from slipstream.service.records import Asked, Record


@dataclass(frozen=True)
class Capacity:
    """All GPUs, and the bytes of each place for another run."""

    gpus: tuple[Gpu, ...]
    free: dict[str, int]
    own: frozenset[int] = frozenset()
    """Processes of the queue's runs, if there are GPUs."""


class Provider(Protocol):
    """A place for runs."""

    def preflight(self, folder: Path, loaded: Loaded, asked: Asked) -> Preflight:
        """Plan the run before it is queued. Raises ConfigError if it could never start, and DataError."""
        ...

    def capacity(self, records: Sequence[Record]) -> Capacity | None:
        """GPUs and free memory beside these runs. None: a cluster, whose own queue decides."""
        ...

    def submit(self, folder: Path, record: Record) -> None:
        """Start a supervisor of the run. Here it has claimed the newest attempt when this returns, or never will. On a
        cluster it is a job: its name is stored before, and its id when this returns."""
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
