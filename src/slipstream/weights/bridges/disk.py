"""The bridges `disk` and `restart`: versions are model folders, visible to trainer and engine.

With `disk` the running engine loads the files in place; with `restart` it is started again on them. Both publish a
whole model folder for each version, under its final name only when it is complete, and then the ticket. The folder
belongs to the publisher: the first version removes a killed process's leftovers there. Guarantees: the two newest
versions are kept and never changed after their announcement. So a receiver can finish reading, and a dead engine can be
started on one. Older ones are removed, or their files reused. (Checkpoints are the permanent copies.) A delta is a
folder with one file of patches; the whole version at the start of its chain, and all deltas between, are kept with it.
A whole version is published again once the deltas since the last one are as large, or `LONGEST_CHAIN` many. A version
held for an engine (`hold`) is kept with its chain, too.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from slipstream.engine_protocols import TakesWeights
from slipstream.records import ApplyReport, ParameterSpec, Ticket, Version
from slipstream.weights.base import Announce, NamedWeights
from slipstream.weights.bridges.delta import Changes
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import whole_folder, write_model_folder
from slipstream.weights.shards import held

PATCHES_FILE = "patches.safetensors"
_KEEP = 2
LONGEST_CHAIN = 50
"""Most deltas after a whole version: a restarted engine applies and verifies each."""


@dataclass(frozen=True)
class _Published:
    step: int
    folder: Path
    is_whole: bool
    num_bytes: int


class FolderPublisher:
    """Writes each version as a folder below `folder`: a whole model, or a delta."""

    def __init__(self, bridge: str, folder: Path, source: Path) -> None:
        self.bridge = bridge
        self.folder = folder
        self.source = source
        self._published: list[_Published] = []
        self._held: int | None = None
        """The step of a version held for an engine."""

    def publish(
        self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce, changes: Changes | None = None
    ) -> Ticket:
        """Write, describe, announce; then remove unneeded versions."""
        weights = self.prepare(named_weights)
        parameters = describe(weights)
        version = Version(lineage, step, digest(parameters))
        if not self._published:
            shutil.rmtree(self.folder, ignore_errors=True)
        folder = self.folder / version.name
        delta = changes.delta if changes and self._may_follow(changes) else None
        num_bytes = write_patches(folder, changes) if changes and delta else self.write(folder, weights)
        fraction = changes.fraction if changes else None
        ticket = Ticket(version, self.bridge, str(folder), parameters, num_bytes, self.base(), delta, fraction)
        announce(ticket)
        self._published = [old for old in self._published if old.folder != folder]
        self._published.append(_Published(step, folder, delta is None, num_bytes))
        self._forget()
        return ticket

    def _may_follow(self, changes: Changes) -> bool:
        """Whether this version may be a delta: it pays, and the chain stays short and small enough for a restart."""
        chain = self._published[self._newest_whole(len(self._published)) + 1 :]
        is_short = len(chain) < LONGEST_CHAIN
        return is_short and changes.pays and sum(d.num_bytes for d in chain) + changes.num_bytes <= changes.whole_bytes

    def _newest_whole(self, end: int) -> int:
        """Index of the newest whole version among the first `end`."""
        return max((place for place in range(end) if self._published[place].is_whole), default=0)

    def _forget(self) -> None:
        """Remove versions outside of the chains of the newest ones and of the held one."""
        newest = self._newest_whole(max(1, len(self._published) - _KEEP + 1))
        held = [place for place, each in enumerate(self._published) if each.step == self._held]
        chain = range(self._newest_whole(held[0] + 1), held[0] + 1) if held else ()
        for place, old in enumerate(self._published[:newest]):
            if place not in chain:
                self.discard(old.folder)
        self._published = [each for place, each in enumerate(self._published) if place in chain or place >= newest]

    def hold(self, step: int | None) -> None:
        """See `Publisher`: the files of its chain stay."""
        self._held = step

    def close(self) -> None:
        """Does nothing: the newest versions stay in the run folder."""

    def prepare(self, named_weights: NamedWeights) -> NamedWeights:
        """The tensors as the engine is to hold them; can be iterated several times."""
        return held(named_weights)

    def write(self, folder: Path, weights: NamedWeights) -> int:
        """Write a version to `folder`; returns its bytes."""
        return write_model_folder(folder, weights, self.source)

    def discard(self, folder: Path) -> None:
        """Remove a version."""
        shutil.rmtree(folder, ignore_errors=True)

    def base(self) -> tuple[ParameterSpec, ...]:
        """Further parameters of the engine, beside the published ones."""
        return ()


def write_patches(folder: Path, changes: Changes) -> int:
    """Write a delta's patches to `folder`; it appears only when complete. Returns their bytes."""
    with whole_folder(folder, durable=False) as temporary:
        # Copies: safetensors refuses tensors of one storage, such as stretches of one parameter.
        payloads = {name: payload.to("cpu", copy=True) for name, payload in changes.payloads.items()}
        save_file(payloads, temporary / PATCHES_FILE)
    return changes.num_bytes


class RestartReceiver:
    """Starts the engine again on a published folder."""

    def __init__(self, engine: TakesWeights) -> None:
        self.engine = engine

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Restart the engine: it verifies the version before it is ready. Verify once more for the report."""
        began = time.perf_counter()
        await self.engine.restart(ticket.location, ticket.version, ticket.parameters)
        seconds = time.perf_counter() - began
        report = await self.engine.verify(ticket, timeout_s)
        return msgspec.structs.replace(report, transfer_s=seconds, num_bytes=ticket.num_bytes)
