"""The manifest of a checkpoint, and the part of its `state.json` for the loop.

Guarantees: a file of another shape, or a damaged one, is one sentence and no other exception.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from slipstream.errors import ConfigError, DataError
from slipstream.regular_files import read_regular

MANIFEST = "manifest.json"
STATE_FOLDER, LOOP_FILE, FINGERPRINTS_FILE = "state", "state.json", "fingerprints.json"
CRITIC = "critic"
HASHED_BYTES = 1 << 20
"""Files up to this size are checked by SHA-256 whenever a checkpoint is looked at; the checksum of a larger one is
compared only when it is loaded, exported or verified."""
_PIECE_BYTES = 64 << 20
_THREADS = 8

T = TypeVar("T")


class FileFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a checkpoint as it was written."""

    size_bytes: int
    sha256: str = ""
    """SHA-256 of a file of up to `HASHED_BYTES`."""
    checksum: str = ""
    """`checksum_of` a larger file; empty in checkpoints of older versions."""


class Manifest(msgspec.Struct, frozen=True):
    """The files of a checkpoint by name, and the format of its state."""

    files: dict[str, FileFacts]
    step: int = 0
    format: int | str = "none"

    def __post_init__(self) -> None:
        for name in self.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"it names {name!r:.80}, a path outside of the checkpoint")


@dataclass(frozen=True)
class Identity:
    """Properties of a run; a resume must not change them."""

    num_items: int = 0
    """Size of the training set: it determines the order of the data."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of tasks, data, code and model, by name."""
    may_differ: frozenset[str] = frozenset()
    """Names of digests with permission to change in a resume."""

    def check(self, extra: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless a checkpoint with these fields is of the same run."""
        if int(extra["num_items"]) != self.num_items and "training items" not in self.may_differ:
            raise ConfigError(
                f"the checkpoint was made with {extra['num_items']} training items, now there are {self.num_items}: "
                "resume with the same data, or start a new run from the checkpoint's weights"
            )
        before: dict[str, str] = extra["identity"]
        for name in before.keys() & self.digests.keys():
            if before[name] != self.digests[name] and name not in self.may_differ:
                raise ConfigError(
                    f"the checkpoint was made with other {name} than there are now: resume with the same ones, or "
                    "start a new run from the checkpoint's weights"
                )


def critic_of(checkpoint: Path) -> Path:
    """The folder of its critic. Raises ConfigError if it has none."""
    folder = checkpoint / STATE_FOLDER / CRITIC
    if not folder.is_dir():
        raise ConfigError(
            f"checkpoint {checkpoint} has no critic, and this run's advantages need one: resume with the algorithm "
            "that it was made with, or start a new run from the checkpoint's weights"
        )
    return folder


class _EarlyStop(msgspec.Struct):
    last: float | None
    best: float | None
    best_step: int | None
    num_worse: int


class _LoopState(msgspec.Struct):
    """The fields of `state.json` for every resume."""

    step: int
    lineage: int
    trained_steps: int
    quiet_steps: int
    num_items: int
    identity: dict[str, str]
    evaluated_step: int
    early_stop: _EarlyStop


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises `DataError` for a missing or damaged one."""
    return decoded(folder / MANIFEST, Manifest)


def is_state(name: str) -> bool:
    """Whether the file is needed only to resume; the loop's own file stays with the weights."""
    return name.startswith(f"{STATE_FOLDER}/") and name != f"{STATE_FOLDER}/{LOOP_FILE}"


def check_loop_state(extra: dict[str, Any], file: Path, step: int) -> None:
    """Raise `DataError` unless the loop can resume from `extra`, the content of `file`, at the manifest's `step`."""
    try:
        found = msgspec.convert(extra, _LoopState).step
    except msgspec.ValidationError as error:
        raise _damaged(file, error) from error
    if step and found != step:
        raise DataError(f"{file} is of step {found}, and {MANIFEST} of step {step}: use another checkpoint")


def decoded(file: Path, kind: type[T]) -> T:
    """The content of a JSON file of a checkpoint. Raises `DataError` if it cannot be read as `kind`."""
    try:
        return msgspec.json.decode(read_regular(file), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> DataError:
    return DataError(f"{file} is damaged ({error}): use another checkpoint")


def facts_of(file: Path) -> FileFacts:
    """Size and digest of a file."""
    size = file.stat().st_size
    if size <= HASHED_BYTES:
        return FileFacts(size, sha256=_sha256(file))
    return FileFacts(size, checksum=checksum_of(file))


def difference(file: Path, facts: FileFacts, *, whole: bool) -> str:
    """How `file` differs from its written form; empty if it does not. `whole`: the content of a larger one is
    read too."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != facts.size_bytes:
        return f"has {size} bytes, not {facts.size_bytes}"
    found, written = "", facts.sha256
    if facts.sha256:
        found = _sha256(file)
    elif whole and facts.checksum:
        found, written = checksum_of(file), facts.checksum
    if found and found != written:
        return f"has other contents than when it was written (digest {found:.12}, not {written:.12})"
    return ""


def checksum_of(file: Path) -> str:
    """The digest of the CRC-32 of each 64 MiB of a file. It finds damage, not an attack, and takes a fraction of the
    time of reading it from the disk: pieces are read by several threads."""
    size = file.stat().st_size
    handle = os.open(file, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            sums = pool.map(lambda start: _crc32(handle, start), range(0, size, _PIECE_BYTES))
            text = b"".join(each.to_bytes(4, "big") for each in sums)
    finally:
        os.close(handle)
    return hashlib.sha256(text).hexdigest()


def _crc32(handle: int, start: int) -> int:
    found = 0
    for place in range(start, start + _PIECE_BYTES, HASHED_BYTES):
        found = zlib.crc32(os.pread(handle, HASHED_BYTES, place), found)
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
