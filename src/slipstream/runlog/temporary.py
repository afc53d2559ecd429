"""Temporary folders that are removed even if their process is killed: each start removes those of dead processes.

Each folder holds a lock that the operating system releases when the process ends. Child processes do not inherit it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

_OWNER = "owner.lock"
_handles: dict[Path, int] = {}


def make_temporary(kind: str, where: Path | None = None) -> Path:
    """Creates a folder `slipstream-<kind>-...` for this user only, in the temporary folder or in `where`."""
    parent = Path(tempfile.gettempdir()) if where is None else where
    _sweep(parent)
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


def _sweep(parent: Path) -> None:
    """Removes this user's folders whose processes are dead; skips what cannot be checked or removed."""
    for path in parent.glob(f"slipstream-*/{_OWNER}"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid():
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(handle)
