"""Atomic checkpoints: complete or absent.

A checkpoint is a folder, for example `step-000012/`:

- `weights/`: a Hugging Face folder; with LoRA an adapter in PEFT's format
- `state/`: the resume state (safetensors and JSON; no pickle)
- `fingerprints.json`: the fingerprints of the live weights
- `manifest.json`: the list of files with their digests

An older checkpoint loses its state before its weights. Guarantees: a kill at any moment leaves every complete
checkpoint unchanged. `latest` skips incomplete and damaged ones. `load` refuses files not as they were written. An
older checkpoint, or its state, is removed only when a newer one is complete. The loop defines the content of `extra`
(data position, lineage).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.errors import ConfigError, DataError, TrainingError
from slipstream.processes.files import write_whole
from slipstream.records import ParameterSpec
from slipstream.trainer.checkpoints.manifest import (
    CRITIC,
    FINGERPRINTS_FILE,
    LOOP_FILE,
    MANIFEST,
    STATE_FOLDER,
    FileFacts,
    Manifest,
    check_loop_state,
    critic_of,
    decoded,
    difference,
    facts_of,
    is_state,
    read_manifest,
)
from slipstream.weights.fingerprint import digest
from slipstream.weights.model_files import sync, told_of_the_disk
from slipstream.weights.usage import EndTokens, write_usage

if TYPE_CHECKING:
    from slipstream.trainer.checkpoints.snapshot import Snapshot
    from slipstream.trainer.critic import Critic
    from slipstream.trainer.learner import Learner

_STATE = STATE_FOLDER
_EXTRA = LOOP_FILE
_FINGERPRINTS = FINGERPRINTS_FILE
_FORMAT = 1
"""Version of the format of `state/` and `extra`; incremented when older ones cannot be resumed from."""
_STEP = re.compile(r"step-\d+(\.old)?")
_DAMAGED = "damaged-"


class DamagedCheckpoint(TrainingError):
    """A checkpoint's files are not as they were written."""


class Fingerprints(msgspec.Struct, frozen=True):
    """Fingerprints of the live weights when the checkpoint was written; with LoRA of the adapter."""

    digest: str
    parameters: tuple[ParameterSpec, ...]


class CheckpointStore:
    """The checkpoints of one run in `folder`. Keeps the newest `keep` with their resume state, and the weights of the
    newest `keep_weights`. One writer at a time. `ends`: the end tokens to note in `weights/`. `on_whole` is called
    after each checkpoint, before older ones are removed."""

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        keep_weights: int = 1,
        ends: EndTokens | None = None,
        on_whole: Callable[[], object] = lambda: None,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}: a run without its last checkpoint cannot resume, keep 1 or more")
        self.folder = folder
        self._ends, self._on_whole = ends, on_whole
        self.keep = keep
        self.keep_weights = max(keep, keep_weights)
        self.best_step: int | None = None
        """The step of the link `best`; its weights are always kept."""
        self.candidate_step: int | None = None
        """A step under evaluation, possibly the next best; its weights are kept too."""

    def save(
        self,
        step: int,
        learner: Learner | Snapshot,
        source: Path,
        extra: dict[str, Any],
        critic: Critic | Snapshot | None = None,
        *,
        best: bool = False,
    ) -> Path:
        """Write checkpoint `step` and return its folder. `extra` must be JSON-serializable. A checkpoint of the same
        step is replaced. `best`: point the link `best` to it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._unfinished():
            _remove(leftover)
        temporary = self.folder / f".unfinished-{step:06d}-{os.getpid()}"
        final = self._path(step)
        with told_of_the_disk(final, temporary):
            parameters = learner.write_weights(temporary / "weights", source)
            if self._ends is not None:
                write_usage(temporary / "weights", source, self._ends)
            proof = Fingerprints(digest(parameters), parameters)
            (temporary / _FINGERPRINTS).write_bytes(msgspec.json.encode(proof))
            learner.save(temporary / _STATE)
            if critic is not None:
                critic.save(temporary / _STATE / CRITIC)
            (temporary / _STATE / _EXTRA).write_text(json.dumps(extra), encoding="utf-8")
            _write_manifest(temporary, step)
            self._step_aside(final)
            temporary.rename(final)
            sync(self.folder)
            if best:
                self.link_best(step)
            self._on_whole()
            self._remove_old(final)
        return final

    def unfinished_bytes(self) -> int:
        """Bytes of unfinished checkpoints so far; files vanishing meanwhile are skipped."""
        num_bytes = 0
        for folder in self._unfinished():
            for file in folder.rglob("*"):
                with contextlib.suppress(OSError):
                    num_bytes += file.lstat().st_size
        return num_bytes

    def _unfinished(self) -> list[Path]:
        return list(self.folder.glob(".unfinished-*"))

    def link_best(self, step: int) -> None:
        """Point the link `best` to the checkpoint of `step`, atomically."""
        self.best_step = step
        temporary = self.folder / f".unfinished-best-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self._path(step).name)
        temporary.replace(self.folder / "best")
        sync(self.folder)

    def holds(self, step: int) -> bool:
        """Whether there is a complete checkpoint of `step`."""
        return damage(self._path(step)) is None

    def best(self) -> Path | None:
        """The target of the link `best`, if it exists and is complete."""
        path = self.folder / "best"
        return path.resolve() if path.is_symlink() and damage(path) is None else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def latest(self, *, resumable: bool = True, until: int | None = None) -> Path | None:
        """The newest complete checkpoint to resume from; with `resumable` false, the newest with weights. `until`: of
        this step or before. None if there is none."""
        for path in reversed(self.named()):
            if until is not None and _step_of(path) > until:
                continue
            if damage(path) is None and (has_state(path) or not resumable):
                return path
        return None

    def resumable_steps(self) -> list[int]:
        """The steps of all checkpoints with their resume state, whole or not, in order; any thread may ask."""
        found: set[int] = set()
        for path in self.named():
            with contextlib.suppress(DataError):  # it may be being removed
                if has_state(path):
                    found.add(_step_of(path))
        return sorted(found)

    def why_none(self) -> str:
        """Why the newest checkpoint cannot be resumed from; empty if there is no checkpoint."""
        named = self.named()
        return f"{named[-1].name}: {damage(named[-1]) or 'only its weights are kept'}" if named else ""

    def load(self, path: Path, learner: Learner, critic: Critic | None = None) -> dict[str, Any]:
        """Load the checkpoint's state into `learner` and return its `extra`. Raises `DamagedCheckpoint` before anything
        is loaded, `TrainingError` if it has only weights left, and as `check_format` and `critic_of` do."""
        reason = damage(path, whole="")
        if reason is not None:
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {reason}")
        if not has_state(path):
            raise TrainingError(f"checkpoint {path} has only its weights: resume from the newest, or start a new run")
        self.check_format(path)
        if critic is not None:
            critic.load(critic_of(path))
        learner.load(path / _STATE)
        return self.read_extra(path)

    def set_aside(self, path: Path) -> Path | None:
        """Rename a damaged checkpoint, to hide it from the store, and return its new folder. Without an earlier one to
        resume from, nothing is changed, and None is returned."""
        if self.latest(until=_step_of(path) - 1) is None:
            return None
        final = path.with_name(f"{_DAMAGED}{path.name}")
        if os.path.lexists(final):
            _remove(final)
        return path.rename(final)

    @staticmethod
    def read_extra(path: Path) -> dict[str, Any]:
        """The `extra` of the complete checkpoint in `path`. Raises `DataError` if it is damaged."""
        return decoded(path / _STATE / _EXTRA, dict[str, Any])

    @classmethod
    def read_loop_state(cls, path: Path) -> dict[str, Any]:
        """The `extra` of a loop's checkpoint. Raises `DataError` too if the loop cannot resume from it."""
        extra = cls.read_extra(path)
        check_loop_state(extra, path / _STATE / _EXTRA, read_manifest(path).step)
        return extra

    @staticmethod
    def check_format(path: Path) -> None:
        """Raise `ConfigError` if the state has the format of another version of Slipstream."""
        found = read_manifest(path).format
        if found != _FORMAT:
            raise ConfigError(
                f"checkpoint {path} has state of format {found} and this Slipstream reads {_FORMAT}: resume with the "
                f"version that wrote it, or start a new run from {path / 'weights'}"
            )

    @staticmethod
    def read_fingerprints(path: Path) -> Fingerprints:
        """The recorded fingerprints of the weights of the checkpoint in `path`. Raises `DataError` when they are
        missing or damaged."""
        return decoded(path / _FINGERPRINTS, Fingerprints)

    def _step_aside(self, final: Path) -> None:
        """Free the name of a checkpoint before it is written again. Folders cannot be replaced atomically: a complete
        one stays valid as `.old` until the new one is in place."""
        if not os.path.lexists(final):
            return
        if damage(final) is not None:
            final.rename(final.with_name(f".unfinished-{final.name}"))
            return
        replaced = final.with_name(f"{final.name}.old")
        if os.path.lexists(replaced):
            _remove(replaced)
        final.rename(replaced)

    def named(self) -> list[Path]:
        """Folders named like checkpoints, oldest step first, a replaced one before its replacement."""
        found = {path: _STEP.fullmatch(path.name) for path in self.folder.glob("step-*")}
        return sorted(
            (path for path, match in found.items() if match and path.is_dir()),
            key=lambda path: (_step_of(path), -len(path.name)),
        )

    def _remove_old(self, newest: Path) -> None:
        """Remove old checkpoints, or their state, once `newest` is complete. Damaged ones do not count as kept."""
        others = [path for path in self.named() if path != newest and damage(path) is None]
        resumable = [path for path in others if has_state(path)]
        with_state = {newest, *resumable[max(0, len(resumable) - self.keep + 1) :]}
        kept = with_state | {*others[max(0, len(others) - self.keep_weights + 1) :]}
        kept |= {self._path(step) for step in (self.best_step, self.candidate_step) if step is not None}
        for path in self.named():
            if path not in kept or path.suffix == ".old":
                # Renamed first: after an interrupted removal the rest must not look like a checkpoint.
                doomed = path.with_name(f".unfinished-{path.name}")
                path.rename(doomed)
                _remove(doomed)
            elif path not in with_state:
                _remove_state(path)


def _remove(path: Path) -> None:
    """Remove a folder, a file, or a link; the link's folder stays: its owner put it there."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").removesuffix(".old"))


def damage(path: Path, *, whole: str | None = None) -> str | None:
    """Why the checkpoint in `path` cannot be used; None if every file of its manifest exists and is intact. `whole`:
    files are read to their end if their names begin with this. Else larger ones are checked by size only: a look is
    cheap."""
    try:
        files = read_manifest(path).files
    except DataError as error:
        return f"its manifest cannot be read ({error.__cause__})"
    for name, facts in files.items():
        if found := difference(path / name, facts, whole=whole is not None and name.startswith(whole)):
            return f"{name} {found}"
    reads = {_FINGERPRINTS: CheckpointStore.read_fingerprints, f"{_STATE}/{_EXTRA}": CheckpointStore.read_extra}
    for name, read in reads.items():
        if name not in files:
            return f"its manifest does not name {name}"
        try:
            read(path)
        except DataError as error:
            return f"{name} cannot be read ({error.__cause__})"
    return None


def has_state(path: Path) -> bool:
    """Whether the complete checkpoint in `path` has its resume state."""
    return any(map(is_state, read_manifest(path).files))


def _remove_state(path: Path) -> None:
    """Remove the resume state of the checkpoint in `path`. The checkpoint stays complete at every moment."""
    manifest = read_manifest(path)
    kept = {name: facts for name, facts in manifest.files.items() if not is_state(name)}
    _replace_manifest(path, msgspec.structs.replace(manifest, files=kept))
    # Also the rest of an interrupted removal.
    for file in (path / _STATE).iterdir():
        if file.name != _EXTRA:
            _remove(file)


def _write_manifest(folder: Path, step: int) -> None:
    """Write the last file of a checkpoint, and sync everything in it to disk."""
    files: dict[str, FileFacts] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(path)
        files[path.relative_to(folder).as_posix()] = facts_of(path)
    _replace_manifest(folder, Manifest(files, step, _FORMAT))
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def _replace_manifest(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
