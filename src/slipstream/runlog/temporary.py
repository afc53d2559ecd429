"""Temporary folders that do not outlive their process for long: the next start removes those of dead ones.

Each holds a lock of its process, which the system releases however that ends. Children inherit no handle of it.
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
    """A new folder `slipstream-<kind>-...`, for this user alone, in the temporary folder or in `where`."""
    parent = Path(tempfile.gettempdir()) if where is None else where
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"slipstream-{kind}-", dir=parent))
    new = folder / f".{_OWNER}"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    new.rename(folder / _OWNER)  # only now may others ask whether it is held
    _handles[folder] = handle
    return folder


def remove_temporary(folder: Path) -> None:
    """Remove it and what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    handle = _handles.pop(folder, None)
    if handle is not None:
        os.close(handle)


@contextlib.contextmanager
def temporary(kind: str, where: Path | None = None) -> Generator[Path]:
    """The same for the length of a block."""
    folder = make_temporary(kind, where)
    try:
        yield folder
    finally:
        remove_temporary(folder)


def _sweep(parent: Path) -> None:
    """Remove this user's folders whose owners have died; what cannot be asked or removed stays."""
    for path in parent.glob(f"slipstream-*/{_OWNER}"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid():
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(handle)
