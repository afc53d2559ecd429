"""Opens files that somebody else may have made: of a data set, an archive, or another user's run folder.

Guarantees: only regular files are opened, as a FIFO waits for a writer and a device may have no end. No read takes more
memory than its caller allows. Each refusal is an OSError with a reason for the user.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 1 << 30
"""A file that is read whole has no more, if its caller knows no smaller bound."""
MAX_LINE_BYTES = 1 << 28
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a file for reading. Raises OSError for all but a regular file, and with `follow_links=False` for a link."""
    # A FIFO would wait for its writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    try:
        require_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def require_regular(state: os.stat_result, path: Path) -> None:
    """Raise OSError unless `state`, that of `path`, is of a regular file."""
    kind = stat.S_IFMT(state.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'a special file')}, not a regular file", str(path))


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError for any other, and for one that is larger."""
    with open_regular(path) as file:
        data = b"" if os.fstat(file.fileno()).st_size > max_bytes else file.read(max_bytes + 1)
        if len(data) > max_bytes or os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
        return data


def lines_of(file: BinaryIO, path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines of an open file, each with its end. Raises OSError for a longer one."""
    while line := file.readline(max_bytes + 1):
        if len(line) > max_bytes:
            raise OSError(errno.EFBIG, f"it has a line of more than {max_bytes:,} bytes", str(path))
        yield line
