"""The transport over a folder that both processes see, also on a network file system.

`<folder>/<lineage>/<topic>/` holds one file for each record from `put` until `ack`:

    <number>.msg              waiting
    <number>.<token>.taken    taken; `<number>.<token>` is the receipt
    closed                    the reason of `close`
    lock                      held (flock) while a record is put or taken

Every operation takes effect with one rename or unlink, so a process that is killed at any moment leaves a record whole
or not at all, and its lock is released by the operating system. Files are not synchronised to the disk: they survive
the death of processes, not of the machine. Folders and files are for their owner only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.processes.files import disk_errors, open_own, write_whole
from slipstream.regular_files import read_regular
from slipstream.runlog.files import require_own, try_lock
from slipstream.transport.base import Receipt, RecordError, TransportClosed, TransportLost
from slipstream.transport.polled import Envelope, PolledTransport, Unreachable

T = TypeVar("T")

_LOCK, _CLOSED = "lock", "closed"
_WAITING, _TAKEN, _PARTIAL = ".msg", ".taken", ".partial"
_RECEIPT = re.compile(r"[0-9]{16,}\.[0-9a-f]{16}")
_RECORD = re.compile(r"[0-9]{16,}\.")
_MAX_REASON_BYTES = 1 << 20
_LOCK_WAIT_S = 1.0
_LOCK_PAUSE_S = 0.0005


@dataclass(frozen=True)
class FileStreams:
    """Queues in a folder shared by all processes of the run, for example `streams` in the run folder."""

    folder: Path
    lineage: int = 0
    """Attempt of the run, counted by resumes: records of an earlier attempt are never read."""


class FileTransport(PolledTransport[T]):
    """A bounded queue in a folder. Any number of producers and one consumer, each in any process."""

    def __init__(
        self,
        streams: FileStreams,
        topic: str,
        kind: type[T],
        capacity: int,
        producer: str,
        consumer: str,
    ) -> None:
        """Opens the queue, and makes it if there is none; see `PolledTransport`. Raises `SlipstreamError` if the folder
        cannot be made."""
        super().__init__(kind, capacity, producer, consumer)
        self._folder = streams.folder / str(streams.lineage) / topic
        with disk_errors(self._folder):
            for part in (self._folder.parent.parent, self._folder.parent, self._folder):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
                if part.is_symlink() and part != streams.folder:
                    raise OSError(errno.ELOOP, "it is a link, and would be written elsewhere")
                require_own(part)
            self._folder.chmod(0o700)
            os.close(open_own(self._folder / _LOCK, os.O_WRONLY))

    def __repr__(self) -> str:
        return f"the queue in {self._folder}"

    def __len__(self) -> int:
        """Number of occupied places."""
        with self._locked():
            return len(self._names(_WAITING, _TAKEN))

    def ack(self, receipt: Receipt) -> bool:
        """See `Transport.ack`."""
        if not _RECEIPT.fullmatch(receipt):
            return False
        try:
            (self._folder / f"{receipt}{_TAKEN}").unlink()
        except FileNotFoundError:
            return False
        return True

    def close(self, reason: str) -> None:
        """See `Transport.close`."""
        own = self._folder / f"{secrets.token_hex(8)}{_PARTIAL}"
        with disk_errors(self._folder / _CLOSED):
            try:
                write_whole(own, reason.encode(), durable=False)
                with contextlib.suppress(FileExistsError):
                    os.link(own, self._folder / _CLOSED)
            finally:
                own.unlink(missing_ok=True)

    def remove(self) -> None:
        """See `Transport.remove`; the last queue of a folder takes it along."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for folder in (self._folder.parent, self._folder.parent.parent):
            with contextlib.suppress(OSError):  # it holds other queues
                folder.rmdir()

    def _putting(self, envelope: Envelope) -> Callable[[], bool | None]:
        data = msgspec.msgpack.encode(envelope)

        def attempt() -> bool | None:
            with self._locked():
                self._refuse_closed()
                records = self._names(_WAITING, _TAKEN)
                if len(records) >= self._capacity:
                    return None
                for name in self._names(_WAITING + _PARTIAL):  # left by a process that was killed
                    with contextlib.suppress(OSError):  # a folder, which is none of ours
                        (self._folder / name).unlink()
                # Names never come again, whatever a network file system remembers of them.
                number = max([time.time_ns() // 1000, *(1 + _number(name) for name in records)])
                write_whole(self._folder / f"{number:016d}{_WAITING}", data, durable=False)
                return True

        return attempt

    def _try_take(self) -> tuple[Receipt, bytes] | None:
        with self._locked():
            self._refuse_closed()
            if not (names := self._names(_WAITING)):
                return None
            path = self._folder / min(names, key=_number)
            try:
                data = read_regular(path)
            except OSError as error:
                raise RecordError(
                    f"a record in the queue cannot be read ({path}: {error.strerror}): let nothing else write there"
                ) from error
            receipt = f"{path.stem}.{secrets.token_hex(8)}"
            path.rename(self._folder / f"{receipt}{_TAKEN}")
            return receipt, data

    def _give_back(self, receipt: Receipt) -> None:
        with contextlib.suppress(FileNotFoundError):  # it was acknowledged meanwhile
            (self._folder / f"{receipt}{_TAKEN}").rename(self._folder / f"{receipt.partition('.')[0]}{_WAITING}")

    def _names(self, *suffixes: str) -> list[str]:
        """Names of records with that end; files that a network file system puts there are left alone."""
        names = os.listdir(self._folder)
        return [name for name in names if name.endswith(suffixes) and _RECORD.match(name)]

    def _refuse_closed(self) -> None:
        try:
            reason = read_regular(self._folder / _CLOSED, _MAX_REASON_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            reason = f"{self._folder / _CLOSED} cannot be read ({error.strerror}): let nothing else write there"
        raise TransportClosed(reason)

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Context manager: holds the queue's lock, against threads too. Raises `Unreachable` if another process holds
        it for long, for example because it was stopped."""
        try:
            handle = os.open(self._folder / _LOCK, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise TransportLost(
                f"{self._folder} is gone with its records: let nothing remove it, and resume"
            ) from error
        except OSError as error:
            raise TransportLost(
                f"{self._folder / _LOCK} is no lock ({error.strerror}): let nothing else write there, and resume"
            ) from error
        try:
            deadline = time.monotonic() + _LOCK_WAIT_S
            while not try_lock(handle, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise Unreachable(
                        f"{self._folder} is locked by another process, which may have been stopped: end it"
                    )
                time.sleep(_LOCK_PAUSE_S)
            try:
                yield
            finally:  # not only closed: a forked child may have the handle too
                fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)


def _number(name: str) -> int:
    return int(name.partition(".")[0])
