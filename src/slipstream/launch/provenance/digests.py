"""Digests of files, each computed once in a run's start."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.config.user_code import Stamp, stamp_of
from slipstream.errors import DataError
from slipstream.regular_files import open_regular

_BLOCK_BYTES = 1 << 20
_FIRST_S, _NEXT_S = 1.0, 10.0
"""After so many seconds the first message about a large file, and a further one each time after that."""


class FileDigests:
    """Computes sha256 digests; of a file with the same device, inode, size and time as before it knows it. `tell` is
    called while one takes longer than a second."""

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self._known: dict[Stamp, str] = {}
        self._told_at = time.monotonic() + _FIRST_S

    def of(self, path: Path, expected: Stamp | None = None) -> str:
        """The digest of a file, which must have the stamp `expected`, if any. Raises DataError."""
        stamp = stamp_of(path)
        if expected is not None and stamp != expected:
            raise changed_meanwhile(path)
        if stamp is None or stamp not in self._known:
            digest = self._computed(path)
            if stamp is None or stamp_of(path) != stamp:
                raise changed_meanwhile(path)
            self._known[stamp] = digest
        return self._known[stamp]

    def _computed(self, path: Path) -> str:
        found, done = hashlib.sha256(), 0
        try:
            with open_regular(path) as file:
                total = max(1, path.stat().st_size)
                while block := file.read(_BLOCK_BYTES):
                    found.update(block)
                    done += len(block)
                    if time.monotonic() > self._told_at:
                        self._told_at = time.monotonic() + _NEXT_S
                        self._tell(f"computing the digest of {path}: {100 * done // total} % of {total / 1e9:.1f} GB")
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): make it readable to this user") from error
        return found.hexdigest()


def changed_meanwhile(path: Path) -> DataError:
    """The error for a file that was written between its use and its digest."""
    return DataError(f"{path} was changed while the run was starting: start it again when nothing writes to it")
