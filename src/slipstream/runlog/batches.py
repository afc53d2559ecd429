"""The kept batches of a run, `batches/<step>.msg`: what `slipstream replay` trains on again.

Kept are the newest ones, and those from which a replay starts: of each step that follows a checkpoint with resume
state, or the start model. Guarantees: a batch is kept as it was before training, which changes it; training waits for
its encoding only, never for the disk; what cannot be kept is one warning and never ends the run; a file is whole or
absent, and its digest tells any changed byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from slipstream import records
from slipstream.errors import DataError, SlipstreamError
from slipstream.processes.files import UNDECODABLE, disk_errors, write_whole
from slipstream.regular_files import read_regular
from slipstream.runlog.writer import versions

FOLDER = "batches"
_MAX_BYTES = 1 << 34
_SUFFIX = ".msg"
_CLOSE_S = 30.0
"""How long the end of a run waits for the disk."""


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a file."""

    digest: str
    made_by: str
    batch: msgspec.Raw
    """A `records.Batch`, as `records.encode` has it."""


def made_by(device: str) -> str:
    """What decides how this process rounds: the versions of Slipstream and torch, the kind of device, the machine."""
    found = versions()
    return f"slipstream {found.get('slipstream')}, torch {found.get('torch')}, {device} of {socket.gethostname()}"


def kept_steps(run: Path) -> list[int]:
    """The steps of the kept batches in the folder of a run, in order."""
    stems = [path.stem for path in (run / FOLDER).glob(f"*{_SUFFIX}")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_batch(run: Path, step: int) -> tuple[records.Batch, str]:
    """The kept batch of `step`, and what it was `made_by`. Raises `DataError` for a file that is missing, damaged or of
    another version."""
    path = _path(run / FOLDER, step)
    other_step, other_version = "replay another step", "use the version of Slipstream that wrote it"
    try:
        kept = msgspec.msgpack.decode(read_regular(path, _MAX_BYTES), type=_Kept)
        if kept.digest != _digest(kept.made_by, bytes(kept.batch)):
            raise DataError(f"{path} has other contents than when it was written: {other_step}")
        return records.decode(bytes(kept.batch), records.Batch), kept.made_by
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {other_step}") from error
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is no batch that this Slipstream reads ({error}): {other_version}") from error
    except UNDECODABLE as error:
        raise DataError(f"{path} is damaged ({error}): {other_step}") from error


class BatchKeeper:
    """Keeps batches of the run in `folder`; `keep` and `close` are called by the training thread. `device`: where it
    trains."""

    def __init__(
        self,
        folder: Path,
        number: int,
        device: str,
        starts: Callable[[], Collection[int]],
        warn: Callable[[str], None],
    ) -> None:
        """`number`: how many of the newest are kept. `starts`: the steps of which batches are kept beside these; called
        from any thread."""
        self._folder, self._number, self._starts, self._warn = folder / FOLDER, number, starts, warn
        self._made_by = made_by(device)
        self._waiting: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._is_closing = self._is_done = self._has_warned = False
        self._thread: threading.Thread | None = None

    def keep(self, batch: records.Batch) -> None:
        """Keep `batch`, the next that is trained on; kept ones of its step and of later ones are superseded."""
        try:
            data = records.encode(batch)
        except (TypeError, ValueError, OverflowError) as error:  # such as text that is not Unicode
            self._tell(f"it cannot be encoded ({error})", batch.step)
            return
        with self._changed:
            self._waiting[batch.step] = data
            if len(self._waiting) > self._number:  # the disk does not keep up
                with contextlib.suppress(Exception):  # the thread that writes tells of it
                    kept = self._kept(self._waiting)
                    self._waiting = {step: each for step, each in self._waiting.items() if step in kept}
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="batches", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait until everything is written, or for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            while self._thread is not None and not self._is_done and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._thread is not None and not self._is_done:
                self._tell(f"the disk took nothing for {timeout_s:g} s", min(self._waiting, default=None))
                self._waiting.clear()

    def _kept(self, steps: Collection[int]) -> set[int]:
        newest, starts = max(steps, default=0), self._starts()
        return {step for step in steps if step > newest - self._number or step in starts}

    def _write_all(self) -> None:
        step = 0
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                data = None
                if self._waiting:
                    step = min(self._waiting)
                    data = self._waiting.pop(step)
            try:
                if data is not None:
                    self._write(step, data)
                self._remove_old(step)  # at the end once more, after the last checkpoint
            except Exception as error:  # noqa: BLE001 (no run ends for its replay; `close` waits for this thread)
                self._tell(str(error) or type(error).__name__, step)
            if data is None:
                with self._changed:
                    self._is_done = True
                    self._changed.notify_all()
                return

    def _write(self, step: int, data: bytes) -> None:
        with disk_errors(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
        kept = _Kept(_digest(self._made_by, data), self._made_by, msgspec.Raw(data))
        try:
            # Not synced: what a power failure leaves of it, the digest tells.
            write_whole(_path(self._folder, step), msgspec.msgpack.encode(kept), durable=False)
        finally:
            for leftover in self._folder.glob("*.partial"):
                leftover.unlink(missing_ok=True)

    def _remove_old(self, newest: int) -> None:
        """Remove what is not kept beside the batch of step `newest`; later ones are of an earlier attempt."""
        there = kept_steps(self._folder.parent)
        wanted = self._kept([step for step in there if step <= newest])
        for step in there:
            if step not in wanted:
                _path(self._folder, step).unlink(missing_ok=True)

    def _tell(self, reason: str, step: int | None) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        which = "a batch" if step is None else f"the batch of step {step}"
        with contextlib.suppress(SlipstreamError):  # a full disk, which takes no warning either
            self._warn(
                f"{which} is not kept for slipstream replay ({reason}); the run goes on, and does not say it again"
            )


def _path(folder: Path, step: int) -> Path:
    return folder / f"{step:06d}{_SUFFIX}"


def _digest(maker: str, batch: bytes) -> str:
    return hashlib.sha256(maker.encode() + b"\0" + batch).hexdigest()
