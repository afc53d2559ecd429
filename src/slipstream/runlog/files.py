"""File primitives of the run folder: the lock and append-only line files.

Everything is created for its owner only, and handles are not inherited by child processes. Nothing is written through a
link or into another user's file, and only regular files are read: a folder may come from somebody else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
import time
import tomllib
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.errors import ConfigError, DataError, SlipstreamError
from slipstream.processes.files import UNDECODABLE, cannot_write, disk_errors, open_own
from slipstream.regular_files import lines_of, open_regular, read_regular

T = TypeVar("T")
Row = dict[str, Any]
"""A line of the run folder: an event, the metrics of a step, a sample."""
Rows = list[Row]
STATE_VARIABLE, LINKS = "SLIPSTREAM_STATE", "runs"
"""Environment variable: the state folder; default: `slipstream` in XDG_STATE_HOME. Its folder of links."""
LOCK_FILE = "run.lock"
SERVICE_FOLDER = "service"
"""Files of a run in the queue (`slipstream.service`), which exist before the run."""
# A reader that checks whether a run is alive holds the lock for an instant: a writer tries so often, for a second.
# Tries are counted, not seconds: while the whole process is stopped there are none.
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.02
_BLOCK_BYTES = 1 << 16
_UNUSABLE = (errno.EINVAL, errno.EFBIG, errno.EISDIR)
"""Error numbers of a file that this program did not write."""


def state_folder() -> Path:
    """The user's state folder; it has a link to the folder of each submitted run."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(os.environ.get(STATE_VARIABLE) or Path(base) / "slipstream").absolute()


def folder_of_run(name: str) -> Path | None:
    """The folder of a submitted run by its name, if it is here. `name` has been checked: it is no path."""
    folder = link_target(state_folder() / LINKS / name)
    return folder if folder is not None and folder.is_dir() else None


def link_target(link: Path) -> Path | None:
    """The path in a link; None without one."""
    try:
        return Path(os.readlink(link))
    except OSError:
        return None


def require_own(folder: Path) -> None:
    """Raise `ConfigError` for a folder of another user, who could replace its files by anything."""
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        with tempfile.TemporaryFile(dir=folder) as file:  # see `open_own`
            if os.fstat(file.fileno()).st_uid != owner:
                raise ConfigError(f"{folder} belongs to another user (uid {owner}): name a folder of your own")


class FolderLock:
    """A flock on `run.lock`; the operating system releases it when the process dies."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` that names the process holding the folder."""
        require_own(folder)
        self._handle = open_own(folder / LOCK_FILE, os.O_RDWR)
        num_tries = 0
        while not try_lock(self._handle, fcntl.LOCK_EX):
            num_tries += 1
            if num_tries > _LOCK_TRIES:
                error = _in_use(folder, self._handle)
                self.release()
                raise error
            time.sleep(_LOCK_PAUSE_S)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        # A forked child shares the lock and would hold it after this process has died.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (lock := reference()) and lock.release())

    def release(self) -> None:
        """Closes the handle; the lock is released with the last handle that shares it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class LineFile:
    """Appends whole lines; a line that does not fit on the disk is rolled back."""

    def __init__(self, path: Path) -> None:
        """Opens the file at its end and cuts off a line that a killed process left unfinished."""
        self._path = path
        self._handle = open_own(path, os.O_RDWR | os.O_APPEND)
        os.ftruncate(self._handle, _end_of_lines(self._handle))

    def append(self, line: bytes) -> None:
        """Writes the line; raises `SlipstreamError` if the disk is full or the file is gone."""
        if self._handle < 0:
            raise ValueError(f"{self._path} was closed: nothing can be written to it any more")
        size_bytes = self._size_bytes()
        num_written, reason = 0, "the disk is full"
        try:
            num_written = os.write(self._handle, line + b"\n")
        except OSError as error:
            reason = error.strerror or str(error)
        if num_written != len(line) + 1:
            os.ftruncate(self._handle, size_bytes)
            raise cannot_write(self._path, reason)

    def _size_bytes(self) -> int:
        ours = os.fstat(self._handle)
        with disk_errors(self._path):
            if not os.path.samestat(ours, os.stat(self._path)):
                raise SlipstreamError(f"{self._path} was replaced by another file during the run: start a new run")
        return ours.st_size

    def close(self) -> None:
        """Closes the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def is_running(folder: str | Path) -> bool:
    """Whether a running process writes to the folder."""
    return _holder(Path(folder)) is not None


def refuse_in_use(folder: Path) -> None:
    """Raise `ConfigError` that names the process holding the folder, if any."""
    if (error := _holder(folder)) is not None:
        raise error


def _holder(folder: Path) -> ConfigError | None:
    try:
        with open_regular(folder / LOCK_FILE, follow_links=False) as file:
            return None if try_lock(file.fileno(), fcntl.LOCK_SH) else _in_use(folder, file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, *_UNUSABLE):
            return None
        raise


def _in_use(folder: Path, handle: int) -> ConfigError:
    holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
    return ConfigError(f"{folder} is in use by {holder}: wait until it ends, stop it, or use another folder")


def _end_of_lines(handle: int) -> int:
    """Byte offset after the last whole line; reads from the end."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        if (found := os.pread(handle, end - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Iterates over the whole lines that a file has now, with their numbers, one in memory at a time; skips what
    follows the last newline (being written, or torn). What another process appends meanwhile is left: the kernel may
    show a reader zeros there for a moment."""
    try:
        with usable(path), open_regular(path) as file:
            left = os.fstat(file.fileno()).st_size
            for number, line in enumerate(lines_of(file, path), start=1):
                left -= len(line)
                if left < 0:
                    return
                if line.endswith(b"\n"):
                    yield number, line
    except FileNotFoundError:
        return


def read_lines(
    path: Path,
    damage: list[str] | None = None,
    words: Sequence[bytes] = (),
    without: str = "",
    why_none: Callable[[Row], str] = lambda row: "",
) -> Rows:
    """The whole lines of a file, optionally only those that contain one of `words`, without the fields `without`.
    Raises `DataError` for a line that is not a JSON object, or of which `why_none` has something to say; with `damage`
    such lines are skipped and reported there."""
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw] if without else Row)
    rows: Rows = []
    lines = whole_lines(path) if damage is None else _readable(whole_lines(path), damage)
    for number, line in lines:
        if words and not any(word in line for word in words):
            continue
        try:
            row = decoder.decode(line)
            if without:
                row = {name: msgspec.json.decode(value) for name, value in row.items() if name != without}
            if problem := why_none(row):
                raise msgspec.ValidationError(problem)
            rows.append(row)
        except UNDECODABLE as error:
            sentence = f"{path}, line {number} is damaged ({error}): remove that line"
            if damage is None:
                raise DataError(sentence) from error
            damage.append(sentence)
    return rows


def _readable(lines: Iterator[tuple[int, bytes]], damage: list[str]) -> Iterator[tuple[int, bytes]]:
    try:
        yield from lines
    except DataError as error:
        damage.append(str(error))


@contextlib.contextmanager
def usable(path: Path) -> Generator[None]:
    """Context manager for reading `path`: a `DataError` where it is no regular file, or is too large."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        raise DataError(f"{path} cannot be read ({error.strerror}): remove it") from error


def read_record(path: Path, kind: type[T]) -> T | None:
    """The record in a JSON file, None if there is no file; raises `DataError` if it is damaged."""
    try:
        with usable(path):
            return msgspec.json.decode(read_regular(path), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UNDECODABLE as error:
        raise DataError(f"{path} is damaged ({error}): remove it") from error


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, empty if there is no file; raises `DataError` if it is damaged."""
    try:
        with usable(path):
            return tomllib.loads(read_regular(path).decode())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:  # of an integer of thousands of digits, too
        raise DataError(f"{path} is damaged ({error}): rewrite or remove it") from error


def try_lock(handle: int, kind: int) -> bool:
    """Whether the flock (`fcntl.LOCK_EX` or `LOCK_SH`) could be had at once."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    return False
