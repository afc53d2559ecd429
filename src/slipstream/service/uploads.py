"""The uploads of an attempt's artifacts, in a separate process.

Guarantees: one such process at a time; it ends with the supervisor; training does not wait for it. While the store is
away, passes follow one another at growing intervals, and checkpoints wait on the disk. An attempt ends after a last
pass, and a finished run's last pass writes `DONE`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import msgspec

from slipstream.artifacts.facts import read_facts
from slipstream.artifacts.outgoing import Outgoing, hold_for_upload
from slipstream.errors import DeadlineError, SlipstreamError
from slipstream.processes.files import open_own
from slipstream.processes.launchers import LOCAL, Child
from slipstream.runlog.files import SERVICE_FOLDER, try_lock
from slipstream.service.records import Record
from slipstream.service.store import record_of, update

Work = Literal["begin", "pass", "finish", "close"]
LONGEST_WAIT_S = 300.0
_LOG, _LOCK = f"{SERVICE_FOLDER}/uploads.log", f"{SERVICE_FOLDER}/uploads.lock"
_LOOK_S, _POLL_S, _LOCK_S = 1.0, 0.05, 60.0


class Uploads:
    """The uploads of the run in `folder`. Called by its supervisor."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._outgoing = Outgoing(folder)
        self._child: Child | None = None
        self._num_failed = 0
        self._next = 0.0
        self._looked = -_LOOK_S
        self.is_taken_over = False
        """Whether another run folder continues the run."""

    @property
    def pid(self) -> int | None:
        """The process under way."""
        return self._child.pid if self._child is not None else None

    def begin(self, is_stopped: Callable[[], bool]) -> bool:
        """Claim the run in the store, and bring newer files here; returns success."""
        return self._launch("begin") and self._wait(is_stopped, 0.0) == 0

    def look(self) -> None:
        """Note the end of a pass, and begin the next if checkpoints wait."""
        if self._child is not None and (code := self._child.poll()) is not None:
            self._ended(code)
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        if self._child is None:
            with contextlib.suppress(SlipstreamError, OSError):
                self._outgoing.drop_old()
        if self._child is None and now >= self._next and not self.is_taken_over and self._outgoing.waiting():
            self._launch("pass")

    def finish(self, is_stopped: Callable[[], bool], *, is_finished: bool, limit_s: float) -> None:
        """Make the last pass. It has `limit_s` after a request to stop, and if the run has not finished."""
        limit = None if is_finished else self._clock() + limit_s
        self._wait(is_stopped, limit_s, limit)
        hold_for_upload(self._folder)  # a killed process had no time for it
        if not self.is_taken_over:
            self._launch("finish" if is_finished else "close")
            self._wait(is_stopped, limit_s, limit)

    def _launch(self, work: Work) -> bool:
        try:
            arguments = [str(self._folder), work]
            self._child = LOCAL.launch("slipstream.service.uploads", arguments, output=self._folder / _LOG)
        except OSError:
            self._ended(1)
        return self._child is not None

    def _wait(self, is_stopped: Callable[[], bool], grace_s: float, limit: float | None = None) -> int:
        """Wait for the process under way; its exit code. After a request to stop it has `grace_s`."""
        if self._child is None:
            return 0
        while (code := self._child.poll()) is None:
            if is_stopped():
                limit = min(limit or float("inf"), self._clock() + grace_s)
                grace_s = float("inf")
            if limit is not None and self._clock() > limit:
                self._child.kill()
                limit = None
            time.sleep(_POLL_S)
        return self._ended(code)

    def _ended(self, code: int) -> int:
        self._child = None
        self._num_failed = 0 if code == 0 else self._num_failed + 1
        self._next = self._clock() + min(LONGEST_WAIT_S, 2.0**self._num_failed) if code else 0.0
        with contextlib.suppress(SlipstreamError):
            facts = read_facts(self._folder)
            self.is_taken_over = facts.is_taken_over
            update(self._folder, lambda record: _told(record, facts.error))
        return code


def _told(record: Record, error: str) -> Record:
    """The record with why uploads wait."""
    if record.state not in ("preparing", "running"):
        return record
    return msgspec.structs.replace(record, reason=f"uploads wait: {error}" if error else "")


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """In this context no other process uploads from the folder. Raises DeadlineError."""
    handle = open_own(folder / _LOCK, os.O_RDWR)
    try:
        until = time.monotonic() + _LOCK_S
        while not try_lock(handle, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise DeadlineError(f"{folder / _LOCK} was locked for {_LOCK_S:g} s: look for a stopped process")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def work_on(folder: Path, work: Work) -> int:
    """Do a part of the uploads; the exit code."""
    from slipstream.artifacts.store import RunStore, noted
    from slipstream.runlog import read_exit

    def carry_out() -> None:
        record = record_of(folder)
        assert record is not None
        with _alone(folder):
            store = RunStore(record.store, record.id)
            if work == "begin":
                store.claim(folder)
                store.restore(folder)
            elif work == "pass":
                store.upload(folder)
            elif work == "close":
                store.close(folder)
            else:
                report = read_exit(folder)
                store.finish(folder, report.step if report is not None else 0)

    if error := noted(folder, carry_out):
        print(error, flush=True)
    return 1 if error else 0


def main() -> None:
    """Work on the run folder of the first argument."""
    from slipstream.processes import lifeline

    lifeline.Parent()
    work: Work = sys.argv[2]  # pyright: ignore[reportAssignmentType]
    sys.exit(work_on(Path(sys.argv[1]), work))


if __name__ == "__main__":
    main()
