"""Files that one process writes and others read: of this user alone, replaced atomically, through no link."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.regular_files import require_regular

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for a damaged file."""


def open_own(path: Path, flags: int) -> int:
    """Open a file for writing, which is made if it does not exist. Raises OSError unless it is a regular file of this
    user and no link."""
    try:
        made = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(path, (flags & ~os.O_TRUNC) | made, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link, and would be written elsewhere", str(path)) from error
    try:
        state = os.fstat(handle)
        require_regular(state, path)
        # A network file system may show another owner for all that this user makes.
        if state.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def reserve(path: Path, num_bytes: int) -> None:
    """Reserves disk space for a `write_whole` of that many bytes, for when the disk is full."""
    with disk_errors(path), _partial(path) as handle:
        os.posix_fallocate(handle, 0, num_bytes)


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces a file atomically, in the space from `reserve` if any; `durable`: on disk when this returns. Raises
    `SlipstreamError` if the disk is full."""
    with disk_errors(path):
        with _partial(path) as handle:
            rest, place = memoryview(data), 0
            while rest:
                written = os.pwrite(handle, rest, place)
                rest, place = rest[written:], place + written
            os.ftruncate(handle, len(data))
            if durable:
                os.fsync(handle)
        os.replace(_name_of_partial(path), path)
        if not durable:
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _name_of_partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


@contextlib.contextmanager
def _partial(path: Path) -> Generator[int]:
    handle = open_own(_name_of_partial(path), os.O_WRONLY)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Context manager for writing `path`: turns an OSError into a `SlipstreamError`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error.strerror or str(error)) from error


def cannot_write(path: Path, reason: str) -> SlipstreamError:
    """The error for a full disk, or a folder that was removed or is not writable."""
    return SlipstreamError(f"{path} cannot be written ({reason}): make room on its disk, or choose another folder")
