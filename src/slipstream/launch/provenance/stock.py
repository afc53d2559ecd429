"""Takes stock of what a run is made with before it starts, and compares it with what its checkpoint was made with.

A resume with another environment, reward, tool, data file or tokenizer is refused unless `run.allow_changes` names it;
other versions of packages are a warning. Two starts are not refused, and warn: one without a checkpoint, which begins
the run again, and an automatic restart, since somebody who edits a file must not end a run that nobody watches. It goes
on with the files as they are. A run that is to keep its environment names it by digest (`envs.store`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.launch.prepare import Prepared
from slipstream.launch.provenance.collect import sources_of
from slipstream.launch.provenance.digests import FileDigests
from slipstream.launch.provenance.record import (
    Attempt,
    Change,
    Source,
    changes_between,
    read_attempts,
    told,
    write_attempts,
)
from slipstream.launch.recovery.resume import changed_settings, identity_of
from slipstream.progress import Progress
from slipstream.runlog import RunLog, read_events, versions
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.checkpoints.manifest import Identity
from slipstream.trainer.model.loading import resolve_folder

TRAINING_ITEMS = "training items"
"""As `recovery.resume.identity_of` calls their digest."""


@dataclass(frozen=True)
class Stock:
    """Sources and versions of a run about to start."""

    sources: tuple[Source, ...]
    versions: dict[str, str]
    earlier: tuple[Attempt, ...] = ()
    changes: tuple[Change, ...] = ()
    """Since the checkpoint; all of them may be."""
    warnings: tuple[str, ...] = ()

    @property
    def may_differ(self) -> frozenset[str]:
        """Digests of the checkpoint that follow from what may have changed."""
        makes_tasks = any(change.kind in ("environment", "data") for change in self.changes)
        return frozenset({TRAINING_ITEMS} if makes_tasks else ())

    def record(self, log: RunLog) -> None:
        """Write the record of this attempt, and the warnings."""
        changed = tuple(change.sentence for change in self.changes)
        attempt = Attempt(log.lineage, round(time.time(), 3), self.sources, self.versions, changed)
        write_attempts(log.folder, (*self.earlier, attempt))
        for text in self.warnings:
            log.warning(text)


def take_stock(prepared: Prepared, folder: Path, progress: Progress, *, resume: bool) -> Stock:
    """Compute the digests of everything the run is made with. Raises ConfigError, before anything is changed, where a
    resume would go on with something else that is not allowed to change."""
    found = Stock(sources_of(prepared, FileDigests(progress.message)), versions())
    if not resume:
        return found
    checkpoint = CheckpointStore(folder / "checkpoints").latest()
    stock = _compared(found, prepared, folder, checkpoint)
    if checkpoint is not None:
        model = resolve_folder(prepared.config.model.path, prepared.config.model.revision)
        digests = identity_of(prepared.config, prepared.train_tasks, prepared.conversations, model)
        identity = Identity(prepared.num_items, digests, stock.may_differ)
        identity.check(CheckpointStore.read_loop_state(checkpoint))
    return stock


def _compared(found: Stock, prepared: Prepared, folder: Path, checkpoint: Path | None) -> Stock:
    """`found` with its changes since the checkpoint. Raises ConfigError for one that is not allowed."""
    earlier, events = read_attempts(folder), read_events(folder)
    before = _made_by(earlier, events, checkpoint)
    if before is None:
        return Stock(found.sources, found.versions, earlier)
    changes = changes_between(before.sources, found.sources)
    is_restart = bool(events) and events[-1].get("kind") == "restart"
    warnings: list[str] = []
    if changes:
        kinds = _listed({change.kind for change in changes})
        if checkpoint is None:
            warnings.append(f"the run begins again with another {kinds} than before: {told(changes)}")
        elif is_restart:
            warnings.append(
                f"the run goes on by itself with the {kinds} as it is now, not as its checkpoint was made with: "
                f"{told(changes)}"
            )
        else:
            _refuse(folder, changes, prepared.config.run.allow_changes)
            warnings.append(f"resumed with another {kinds}, as run.allow_changes says: {told(changes)}")
    if other := changed_settings(before.versions, found.versions, missing="none"):
        warnings.append(f"resumed with other versions than before: {'; '.join(other)}")
    return Stock(found.sources, found.versions, earlier, tuple(changes), tuple(warnings))


def _made_by(
    attempts: Sequence[Attempt], events: Sequence[Mapping[str, Any]], checkpoint: Path | None
) -> Attempt | None:
    """The attempt that made the checkpoint, or without one the last; None where that was not recorded."""
    if checkpoint is None:
        return attempts[-1] if attempts else None
    made = [event for event in events if Path(str(event.get("path", ""))).name == checkpoint.name]
    lineage = next((event.get("lineage") for event in reversed(made) if event.get("kind") == "checkpoint"), None)
    if lineage is None:  # killed before it could write the event
        return attempts[-1] if attempts else None
    return next((attempt for attempt in attempts if attempt.lineage == lineage), None)


def _refuse(folder: Path, changes: Sequence[Change], allowed: Collection[str]) -> None:
    refused = [change for change in changes if change.kind not in allowed]
    if not refused:
        return
    kinds = sorted({change.kind for change in refused})
    listed = ", ".join(f'"{kind}"' for kind in sorted({*kinds, *allowed}))
    raise ConfigError(
        f"run {folder} cannot be resumed with another {_listed(kinds)}: {told(refused)}: put that back, or allow it "
        f"with --run.allow_changes '[{listed}]'"
    )


def _listed(kinds: Collection[str]) -> str:
    *first, last = sorted(kinds)
    return f"{', '.join(first)} and {last}" if first else last
