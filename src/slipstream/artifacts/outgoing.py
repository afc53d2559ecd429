"""Holds a run's new checkpoints until they are uploaded, by hard links, since training removes old ones.

Guarantees: the training process holds a checkpoint before it removes another. Adapters wait however long the store is
away. Otherwise only the newest checkpoint waits, so the disk holds at most one further copy.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from slipstream.artifacts.facts import OUTGOING, StepFacts, read_facts
from slipstream.errors import DataError, SlipstreamError
from slipstream.trainer.checkpoints.manifest import (
    FINGERPRINTS_FILE,
    LOOP_FILE,
    MANIFEST,
    STATE_FOLDER,
    Manifest,
    difference,
    is_state,
    read_manifest,
)

_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for another name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def identity_of(manifest: Manifest) -> str:
    """Distinguishes two checkpoints of one step. Stays when the state is removed."""
    named = (FINGERPRINTS_FILE, f"{STATE_FOLDER}/{LOOP_FILE}")
    facts = [manifest.files[name] for name in named if name in manifest.files]
    return "-".join((each.sha256 or each.checksum)[:32] for each in facts)


def is_adapter(manifest: Manifest) -> bool:
    """Whether the weights are an adapter."""
    return "weights/adapter_config.json" in manifest.files


def has_state(manifest: Manifest) -> bool:
    """Whether a run can resume from it."""
    return any(map(is_state, manifest.files))


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Folders of checkpoints in a folder, whole or not, in the order of steps."""
    try:
        found = {step_of(name): folder / name for name in os.listdir(folder)}
    except FileNotFoundError:
        return {}
    return dict(sorted((step, path) for step, path in found.items() if step is not None))


def newest_resumable(run: Path) -> int:
    """The step of a run folder's newest checkpoint with state; 0 without any."""
    for step, path in reversed(checkpoints_in(run / "checkpoints").items()):
        with contextlib.suppress(DataError):
            if has_state(read_manifest(path)):
                return step
    return 0


def hold_for_upload(folder: Path) -> None:
    """Hold the new checkpoints of the run in `folder`, if it has a store."""
    if (folder / OUTGOING).is_dir():
        with contextlib.suppress(SlipstreamError, OSError):  # the supervisor tries again at the end
            Outgoing(folder).take(read_facts(folder).steps)


class Outgoing:
    """The waiting checkpoints of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._checkpoints, self._own = folder / "checkpoints", folder / OUTGOING

    def make(self) -> None:
        """From here on the training process holds its checkpoints."""
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self._own.glob(".*-step-*"):  # by killed processes
            shutil.rmtree(left, ignore_errors=True)

    def waiting(self) -> dict[int, Path]:
        """Steps and folders, in order."""
        return checkpoints_in(self._own)

    def take(self, uploaded: Mapping[int, StepFacts]) -> None:
        """Hold all new whole checkpoints: every adapter, and the newest whole model."""
        waiting, last = self.waiting(), max(uploaded, default=0)
        # Earlier ones are uploaded, or another folder has continued the run since.
        found = {step: path for step, path in checkpoints_in(self._checkpoints).items() if step >= last}
        newest = max(waiting, default=0)
        for step, path in reversed(found.items()):
            with contextlib.suppress(DataError, FileNotFoundError):  # not whole yet, or being removed
                manifest = read_manifest(path)
                held = identity_of(read_manifest(waiting[step])) if step in waiting else ""
                known = (held, uploaded[step].identity if step in uploaded else "")
                if identity_of(manifest) not in known and (is_adapter(manifest) or step >= newest):
                    self._hold(step, path)
                newest = max(newest, step)

    def clear(self) -> None:
        """Let all go: another folder has continued the run."""
        for path in self.waiting().values():
            self._remove(path)

    def drop_old(self) -> None:
        """Let go what the newest replaces: earlier states, and earlier whole models."""
        for path in [*self.waiting().values()][:-1]:
            if not is_adapter(read_manifest(path)):
                self._remove(path)
                continue
            for file in (path / STATE_FOLDER).iterdir():
                if is_state(f"{STATE_FOLDER}/{file.name}"):
                    shutil.rmtree(file) if file.is_dir() else file.unlink()

    def release(self, step: int) -> None:
        """Let an uploaded checkpoint go."""
        self._remove(self._own / step_name(step))

    def _hold(self, step: int, source: Path) -> None:
        new = self._own / f".new-{step_name(step)}-{os.getpid()}"
        shutil.rmtree(new, ignore_errors=True)
        manifest = read_manifest(source)
        for name in (*manifest.files, MANIFEST):
            (new / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                os.link(source / name, new / name)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without hard links
                (new / name).symlink_to(source / name)
        if read_manifest(new) != manifest or any(
            difference(new / name, facts, whole=False) for name, facts in manifest.files.items()
        ):
            shutil.rmtree(new)
        else:
            self.release(step)
            new.rename(self._own / step_name(step))

    def _remove(self, path: Path) -> None:
        if path.exists():
            doomed = path.with_name(f".old-{path.name}-{os.getpid()}")
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed)
