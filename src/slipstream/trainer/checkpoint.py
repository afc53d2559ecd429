"""Checkpoints that are whole or absent.

`step-000012/weights/` is a Hugging Face folder (under LoRA an adapter in PEFT's format), `step-000012/state/` what
resuming needs (safetensors and JSON; no pickle), `step-000012/fingerprints.json` what the live weights were, and
`step-000012/manifest.json` says what must be there. Guarantees: a kill at any moment leaves every finished checkpoint
as it was; `latest` passes over unfinished and damaged ones; an older checkpoint is removed only when a newer one is
whole. What is in `extra` (data position, lineage) is the loop's business.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.errors import ConfigError, DataError, TrainingError
from slipstream.records import ParameterSpec
from slipstream.weights.files import sync, told_of_the_disk
from slipstream.weights.fingerprint import digest

if TYPE_CHECKING:
    from slipstream.trainer.critic import Critic
    from slipstream.trainer.learner import Learner

_MANIFEST = "manifest.json"
_EXTRA = "state.json"
_FINGERPRINTS = "fingerprints.json"
_CRITIC = "critic"
_FORMAT = 1
"""Of `state/`, and what is in `extra`: one more whenever an older one cannot be resumed from."""
_STEP = re.compile(r"step-\d+(\.old)?")
_HASHED_BYTES = 1 << 20
"""Files up to this size are proved by SHA-256; larger ones by their size, so that looking stays cheap."""


class Fingerprints(msgspec.Struct, frozen=True):
    """What the live weights were when a checkpoint was written; under LoRA the adapter's."""

    digest: str
    parameters: tuple[ParameterSpec, ...]


class CheckpointStore:
    """The checkpoints of one run in `folder`; the newest `keep` stay. One writer at a time."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}: a run without its last checkpoint cannot resume, keep 1 or more")
        self.folder = folder
        self.keep = keep
        self.best_step: int | None = None
        """The step whose checkpoint is kept beside the newest ones."""

    def save(
        self, step: int, learner: Learner, source: Path, extra: dict[str, Any], critic: Critic | None = None
    ) -> Path:
        """Write checkpoint `step` and return its folder. `extra` must be JSON. A whole one of the same
        step is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".unfinished-*"):
            leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)
        temporary = self.folder / f".unfinished-{step:06d}-{os.getpid()}"
        final = self._path(step)
        with told_of_the_disk(final, temporary):
            parameters = learner.write_weights(temporary / "weights", source)
            proof = Fingerprints(digest(parameters), parameters)
            (temporary / _FINGERPRINTS).write_bytes(msgspec.json.encode(proof))
            learner.save(temporary / "state")
            if critic is not None:
                critic.save(temporary / "state" / _CRITIC)
            (temporary / "state" / _EXTRA).write_text(json.dumps(extra), encoding="utf-8")
            _write_manifest(temporary, step)
            self._step_aside(final)
            temporary.rename(final)
            sync(self.folder)
            self._remove_old(final)
        return final

    def link_best(self) -> None:
        """Have `best` lead to the checkpoint of `best_step`, at every moment to a whole one."""
        assert self.best_step is not None
        temporary = self.folder / f".unfinished-best-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self._path(self.best_step).name)
        temporary.replace(self.folder / "best")
        sync(self.folder)

    def best(self) -> Path | None:
        """The checkpoint that `best` leads to, if there is one and it is whole."""
        path = self.folder / "best"
        return path.resolve() if path.is_symlink() and damage(path) is None else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        for path in reversed(self._named()):
            if damage(path) is None:
                return path
        return None

    def load(self, path: Path, learner: Learner, critic: Critic | None = None) -> dict[str, Any]:
        """Put the checkpoint's state into `learner` and return its `extra`. Raises `TrainingError` if it is
        damaged, and as `check_format` does."""
        reason = damage(path)
        if reason is not None:
            raise TrainingError(f"checkpoint {path} is damaged: {reason}")
        self.check_format(path)
        if critic is not None:
            critic.load(path / "state" / _CRITIC)
        learner.load(path / "state")
        return self.read_extra(path)

    @staticmethod
    def read_extra(path: Path) -> dict[str, Any]:
        """What was saved as `extra` with the whole checkpoint in `path`."""
        return json.loads((path / "state" / _EXTRA).read_text(encoding="utf-8"))

    @staticmethod
    def check_format(path: Path) -> None:
        """Raises `ConfigError` for a whole checkpoint whose state another version of Slipstream wrote."""
        found = json.loads((path / _MANIFEST).read_text(encoding="utf-8")).get("format", "none")
        if found != _FORMAT:
            raise ConfigError(
                f"checkpoint {path} has state of format {found} and this Slipstream reads {_FORMAT}: resume with the "
                f"version that wrote it, or start a new run from {path / 'weights'}"
            )

    @staticmethod
    def read_fingerprints(path: Path) -> Fingerprints | None:
        """What the weights of the checkpoint in `path` must be; None for one of a version that did not write it. Raises
        `DataError` when that is damaged."""
        file = path / _FINGERPRINTS
        try:
            return msgspec.json.decode(file.read_bytes(), type=Fingerprints)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{file} is damaged ({error}): use another checkpoint") from error

    def _step_aside(self, final: Path) -> None:
        """Free the name of a checkpoint that is made again. A folder cannot be replaced in one move, so a whole
        one stays valid as `.old` until the new one is in place."""
        if not final.exists():
            return
        if damage(final) is not None:
            final.rename(final.with_name(f".unfinished-{final.name}"))
            return
        replaced = final.with_name(f"{final.name}.old")
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)

    def _named(self) -> list[Path]:
        """Folders that look like checkpoints, oldest step first, a replaced one before its replacement."""
        found = {path: _STEP.fullmatch(path.name) for path in self.folder.glob("step-*")}
        return sorted(
            (path for path, match in found.items() if match),
            key=lambda path: (int(path.name.removeprefix("step-").removesuffix(".old")), -len(path.name)),
        )

    def _remove_old(self, newest: Path) -> None:
        """Called when `newest` is whole. Damaged ones do not count among those kept."""
        others = [path for path in self._named() if path != newest and damage(path) is None]
        kept = {newest, *others[max(0, len(others) - self.keep + 1) :]}
        if self.best_step is not None:
            kept.add(self._path(self.best_step))
        for path in self._named():
            if path not in kept or path.suffix == ".old":
                # Renamed first: a removal cut short must not leave something that looks like a checkpoint.
                doomed = path.with_name(f".unfinished-{path.name}")
                path.rename(doomed)
                shutil.rmtree(doomed)


def damage(path: Path) -> str | None:
    """Why the checkpoint in `path` cannot be used, or None: every file of its manifest is there and right."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"its manifest cannot be read ({error})"
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["size_bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {facts['size_bytes']}"
        if "sha256" in facts and _sha256(file) != facts["sha256"]:
            return f"{name} has other contents than when it was written"
    return None


def _write_manifest(folder: Path, step: int) -> None:
    """The last file of a checkpoint; after it everything inside is on the disk."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(path)
        size = path.stat().st_size
        facts: dict[str, Any] = {"size_bytes": size}
        if size <= _HASHED_BYTES:
            facts["sha256"] = _sha256(path)
        files[path.relative_to(folder).as_posix()] = facts
    (folder / _MANIFEST).write_text(
        json.dumps({"format": _FORMAT, "step": step, "files": files}, indent=1), encoding="utf-8"
    )
    sync(folder / _MANIFEST)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
