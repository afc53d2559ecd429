"""Bridges over a folder that trainer and engine both see.

`disk` has the running engine load the files in place; `restart` starts the engine anew on them. Both publish
the same way: a whole model folder for each version, under its final name only when complete, then the ticket.
The folder is the publisher's own: the first version removes what a killed process left there.
Guarantees: a folder is never changed after it was announced; the two newest versions are kept, so that a
receiver that is still reading the last one finds it, and so that a dead engine can be started on it.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec
from torch import Tensor

from slipstream.records import ApplyReport, ParameterSpec, Ticket, Version
from slipstream.weights.base import Announce, Engine, NamedWeights
from slipstream.weights.files import write_model_folder
from slipstream.weights.fingerprint import describe, digest

_KEEP = 2


class FolderPublisher:
    """Writes each version as a model folder below `folder`."""

    def __init__(self, bridge: str, folder: Path, source: Path) -> None:
        self.bridge = bridge
        self.folder = folder
        self.source = source
        self._published: list[Path] = []

    def publish(self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce) -> Ticket:
        """Write, describe, announce; then forget versions that nobody can need any more."""
        weights = self.prepare(named_weights)
        parameters = describe(weights)
        version = Version(lineage, step, digest(parameters))
        if not self._published:
            shutil.rmtree(self.folder, ignore_errors=True)
        folder = self.folder / version.name
        num_bytes = self.write(folder, weights)
        ticket = Ticket(version, self.bridge, str(folder), parameters, num_bytes, self.base())
        announce(ticket)
        if folder not in self._published:
            self._published.append(folder)
        for old in self._published[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        self._published = self._published[-_KEEP:]
        return ticket

    def close(self) -> None:
        """Nothing to give up: the newest versions stay in the run folder."""

    def prepare(self, named_weights: NamedWeights) -> list[tuple[str, Tensor]]:
        """The tensors as the engine is to hold them."""
        return list(named_weights)

    def write(self, folder: Path, weights: list[tuple[str, Tensor]]) -> int:
        """Make `folder` a version of these tensors; returns their bytes."""
        return write_model_folder(folder, weights, self.source)

    def base(self) -> tuple[ParameterSpec, ...]:
        """What the engine must hold beside the published tensors."""
        return ()


class DiskReceiver:
    """Has the running engine take what was published: a folder, or what is in its own memory already."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """In place; the engine verifies and drops its prefix cache before it answers again."""
        return await self.engine.apply(ticket, timeout_s)


class RestartReceiver:
    """Starts the engine anew on a published folder."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """The engine verifies what it loaded before it says that it is ready; asked again for the report."""
        began = time.perf_counter()
        await self.engine.restart(ticket.location, ticket.version, ticket.parameters)
        seconds = time.perf_counter() - began
        report = await self.engine.verify(ticket, timeout_s)
        return msgspec.structs.replace(report, transfer_s=seconds, num_bytes=ticket.num_bytes)
