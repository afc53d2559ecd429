"""Folders of this user alone: caches, and temporary ones, which are removed even if their process is killed.

Each temporary folder holds a lock that the operating system releases when the process ends. Child processes do not
inherit it. Each start removes the folders of dead processes. Only a folder that this user alone could ever write to is
trusted: by its name, its lock and its notes another user could have files of this one removed.

A folder stands for shared memory too, which stays when all processes that have it are killed. It is removed with the
folder: what is named after it (`named_after`), what processes noted in it (`note_shared`), and what vLLM's CPU workers
name after the file in it by which they meet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

PREFIX = "slipstream-"
"""Of a temporary folder's name."""
FOLDER_VARIABLE = "SLIPSTREAM_TEMPORARY"
"""Environment variable of vLLM's own server: the temporary folder with which its shared memory is removed."""
_SHARED = Path("/dev/shm")
_NOTES = "shared"
_OWNER = "owner.lock"
_PRIVATE = 0o700
_handles: dict[Path, int] = {}


def make_temporary(kind: str, where: Path | None = None) -> Path:
    """Creates a folder `slipstream-<kind>-...` for this user only, in the temporary folder or in `where`."""
    parent = Path(tempfile.gettempdir()) if where is None else where
    remove_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
    new = folder / f".{_OWNER}"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    new.rename(folder / _OWNER)  # from here on others may check whether it is locked
    _handles[folder] = handle
    return folder


def remove_temporary(folder: Path) -> None:
    """Removes the folder, its contents and its shared memory."""
    remove_shared(folder)
    shutil.rmtree(folder, ignore_errors=True)
    handle = _handles.pop(folder, None)
    if handle is not None:
        os.close(handle)


@contextlib.contextmanager
def temporary(kind: str, where: Path | None = None) -> Generator[Path]:
    """Context manager for a temporary folder."""
    folder = make_temporary(kind, where)
    try:
        yield folder
    finally:
        remove_temporary(folder)


def remove_left(parent: Path | None = None) -> None:
    """Removes this user's folders whose processes are dead; skips what cannot be checked or removed."""
    parent = parent or Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not is_private(folder):
                continue
            handle = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_shared(folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def is_private(folder: Path) -> bool:
    """Whether it is a folder, not a link to one, that belongs to this user and that nobody else may use. False if it
    does not exist."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    return is_own and not stat.S_IMODE(state.st_mode) & 0o077


def named_after(folder: Path) -> tuple[str, str]:
    """How names of shared memory begin, and those of semaphores, that are removed with a temporary folder."""
    return f"psm_{folder.name}_", f"{folder.name}-"


def note_shared(folder: Path, path: str) -> None:
    """Note a file in shared memory that has another name, to be removed with a temporary folder."""
    with contextlib.suppress(OSError), (folder / _NOTES).open("a") as notes:
        notes.write(f"{os.stat(path).st_ino} {path}\n")


def remove_shared(folder: Path) -> None:
    """Removes the shared memory of a temporary folder, of processes that have ended or are about to."""
    if not is_private(folder):
        return
    memory, semaphore = named_after(folder)
    begin = (memory, f"sem.{semaphore}", *(f"{file.name}-" for file in folder.glob("vllm_dist_*")))
    with contextlib.suppress(OSError):
        for path in [path for path in _SHARED.iterdir() if path.name.startswith(begin)]:
            _remove_segment(path)
    with contextlib.suppress(OSError):
        for line in (folder / _NOTES).read_text().splitlines():
            number, _, name = line.partition(" ")
            if number.isdecimal():
                _remove_segment(Path(name), int(number))


def _remove_segment(path: Path, number: int | None = None) -> None:
    """Removes a file of this user in shared memory; with `number` only that inode, no later file of its name."""
    with contextlib.suppress(OSError, ValueError):
        state = path.lstat()
        is_own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
        if is_own and path.parent == _SHARED and number in (None, state.st_ino):
            path.unlink()


def cache_root(environment: Mapping[str, str]) -> Path:
    """The folder of all caches, by the XDG base directory specification. Raises RuntimeError where the user has no
    home."""
    given = environment.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "slipstream"


def private_folder(folder: Path) -> Path:
    """Create `folder` and its parent where they do not exist. Raises OSError where one of them is not private to this
    user (the owner of the parent could replace the folder), or is not writable."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    for each in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=_PRIVATE)
        if not is_private(each):
            raise OSError(f"{each} is not a folder that only you may use")
    with tempfile.TemporaryFile(dir=folder):
        return folder
