"""Folders of this user alone: caches, and temporary ones, which are removed even if their process is killed.

Each temporary folder holds a lock that the operating system releases when the process ends. Child processes do not
inherit it. Each start removes the folders of dead processes.
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

_OWNER = "owner.lock"
_PRIVATE = 0o700
_handles: dict[Path, int] = {}


def make_temporary(kind: str, where: Path | None = None) -> Path:
    """Creates a folder `slipstream-<kind>-...` for this user only, in the temporary folder or in `where`."""
    parent = Path(tempfile.gettempdir()) if where is None else where
    remove_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"slipstream-{kind}-", dir=parent))
    new = folder / f".{_OWNER}"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    new.rename(folder / _OWNER)  # from here on others may check whether it is locked
    _handles[folder] = handle
    return folder


def remove_temporary(folder: Path) -> None:
    """Removes the folder and its contents."""
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
    for path in parent.glob(f"slipstream-*/{_OWNER}"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid():
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(handle)


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
        state = each.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise OSError(f"{each} is not a folder that only you may use")
    with tempfile.TemporaryFile(dir=folder):
        return folder
