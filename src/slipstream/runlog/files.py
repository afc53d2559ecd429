"""What makes the run folder safe: the lock, files of whole lines, and files that are replaced whole.

Everything is made for its owner only, and no handle outlives the process: children inherit none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import tomllib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import ConfigError, DataError

LOCK_FILE = "run.lock"
# A reader that asks whether a run lives holds the lock for an instant: a writer outwaits it.
_LOCK_WAIT_S = 1.0


class FolderLock:
    """An flock on `run.lock`, which the system releases when the process dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` naming the process that holds the folder."""
        path = folder / LOCK_FILE
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(self._handle, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                self.release()
                holder = path.read_text(errors="replace").strip() or "another process"
                raise ConfigError(f"{folder} is in use by {holder}: wait until it ends, stop it, or use another folder")
            time.sleep(0.02)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        # A forked child shares the lock and would hold it after this process has died.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (lock := reference()) and lock.release())

    def release(self) -> None:
        """Close the handle: the lock goes with the last handle that shares it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class LineFile:
    """Appends whole lines; one that does not fit on the disk is taken back."""

    def __init__(self, path: Path) -> None:
        """Open the file at its end, without the line that a killed process left unfinished."""
        self._path = path
        if path.is_file():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, line: bytes) -> None:
        """Write the line; raises `DataError` when the disk does not take it."""
        if self._handle < 0:
            raise ValueError(f"{self._path} was closed: nothing can be written to it any more")
        size_bytes = os.fstat(self._handle).st_size
        num_written, reason = 0, "the disk is full"
        try:
            num_written = os.write(self._handle, line + b"\n")
        except OSError as error:
            reason = str(error)
        if num_written != len(line) + 1:
            os.ftruncate(self._handle, size_bytes)
            raise DataError(
                f"a line of {len(line)} bytes cannot be written to {self._path} ({reason}): free some space"
            )

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the folder."""
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by one that is whole on the disk before it gets its name."""
    partial = path.with_name(f"{path.name}.partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)
    os.replace(partial, path)


def read_lines(path: Path, damage: list[str] | None = None, words: Sequence[bytes] = ()) -> list[dict[str, Any]]:
    """The whole lines of a file, or those that have one of `words` in them; what follows the last newline is still
    being written, or was torn.

    Raises `DataError` for any other line that is not a JSON object; with `damage` these are left out and told there.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if words and not any(word in line for word in words):
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            sentence = f"{path}, line {number} is damaged ({error}): remove that line"
            if damage is None:
                raise DataError(sentence) from error
            damage.append(sentence)
    return rows


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, none if there is no file; raises `DataError` if it is damaged."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}): write it anew or remove it") from error


def _try_lock(handle: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    return False
