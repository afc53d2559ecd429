"""The heartbeat of a run's process: `heartbeat.json`, replaced every few seconds for as long as the process lives.

Life and progress are two clocks: `time` says that the process lives, `progress_at` when it last wrote anything of its
work. The thread that writes needs the interpreter for an instant only, so it also beats during imports, the loading of
a model and compilation. Of a phase that is repeated, which is training on a batch, it tells how long it may take at
most; of others, whose waits have deadlines of their own, it does not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.runlog.files import write_whole

FILE = "heartbeat.json"
INTERVAL_S = 5.0
SILENT_S = 3 * INTERVAL_S
"""From then on a process is taken for stopped, or its host for lost."""
LEAST_LIMIT_S, LIMIT_FACTOR, MIN_REPEATS = 600.0, 20.0, 3
"""A phase that has been repeated so often may take so many times as long as the longest before, and at least this."""
_END_S = 2.0


class Heartbeat(msgspec.Struct, frozen=True):
    """The content of `heartbeat.json`; times are Unix times."""

    time: float
    pid: int
    host: str
    lineage: int
    step: int
    phases: list[str]
    """What the process is doing: phases of a step, outermost first; empty between two."""
    progress_at: float
    """When it last wrote an event, a row of metrics or a sample."""
    num_phases: int = 0
    """How many outermost phases have begun."""
    limit_s: float = 0.0
    """How long the outermost phase may take; 0 where nobody can say."""

    def silence(self, now: float) -> str:
        """A sentence on a process that has stopped beating; empty for one that beats."""
        seconds = now - self.time
        if seconds <= SILENT_S:
            return ""
        return f"no heartbeat for {seconds:.0f} s of process {self.pid} on {self.host}, which was at {self.place}"

    @property
    def place(self) -> str:
        """Step and phase."""
        return f"step {self.step} in {self.phases[-1]}" if self.phases else f"step {self.step}"


class _Log(Protocol):
    folder: Path
    lineage: int

    @property
    def step(self) -> int: ...
    @property
    def phases(self) -> list[str]: ...
    @property
    def progress_at(self) -> float: ...
    @property
    def num_phases(self) -> int: ...
    @property
    def limit_s(self) -> float: ...


class Beating:
    """Writes the heartbeat of the run whose `log` it is, from a thread, while the context lasts; then removes it."""

    def __init__(self, log: _Log, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="slipstream-heartbeat", daemon=True)

    def _beat(self) -> None:
        log = self._log
        while not self._ended.is_set():
            beat = Heartbeat(
                round(time.time(), 3),
                os.getpid(),
                socket.gethostname(),
                log.lineage,
                log.step,
                log.phases,
                round(log.progress_at, 3),
                log.num_phases,
                log.limit_s,
            )
            # A full disk ends the run elsewhere, with its own words.
            with contextlib.suppress(SlipstreamError, OSError):
                write_whole(log.folder / FILE, msgspec.json.encode(beat) + b"\n", durable=False)
            self._ended.wait(self._interval_s)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_END_S)
        with contextlib.suppress(OSError):
            (self._log.folder / FILE).unlink()


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """The last heartbeat of the run in `folder`; None where there is none that can be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Heartbeat)
    except (OSError, msgspec.DecodeError):
        return None
