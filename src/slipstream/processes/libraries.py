"""Libraries of torch's compile cache. A killed compiler leaves an unfinished one, and torch takes it for whole."""

from __future__ import annotations

import contextlib
import fcntl
import struct
from pathlib import Path

_HEADER = 64
"""Bytes of an ELF header of 64 bits. The table of sections, at the end of the file, is written last."""
_MAGIC = b"\x7fELF\x02"


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished libraries from this cache, except those of a compiler at work. It holds a lock."""
    for path in folder.glob("*/*.so"):
        with contextlib.suppress(OSError):
            if is_whole(path):
                continue
            with (folder / "locks" / f"{path.name.partition('.')[0]}.lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_whole(path):
                    path.unlink()


def is_whole(path: Path) -> bool:
    """Whether this is a whole library, or no ELF file of 64 bits. Raises `OSError`."""
    with path.open("rb") as file:
        header = file.read(_HEADER)
    if len(header) < _HEADER or not any(header):
        return False
    if not header.startswith(_MAGIC):
        return True
    (begin,) = struct.unpack_from("=Q", header, 0x28)
    size, number = struct.unpack_from("=HH", header, 0x3A)
    return path.stat().st_size >= begin + size * number > 0
