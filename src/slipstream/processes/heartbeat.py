"""Heartbeats: `heartbeat.json` of a run and `logs/heartbeats/<role>-<pid>.json` of each further process, replaced every
few seconds for as long as the process lives.

Life and progress are two clocks: `time` says that the process lives, `progress_at` when it last wrote anything of its
work. The writing thread needs the interpreter for an instant only: it also beats during imports, the loading of
a model and compilation. A heartbeat also has the time limit of training on a batch. It has none for other
phases (their waits have separate deadlines), and none while Python's debugger has the main thread. A further process
says by `doing` its present work, and by `progress` its getting on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.processes.files import UNDECODABLE, write_whole
from slipstream.regular_files import read_regular

T = TypeVar("T")
FILE = "heartbeat.json"
FOLDER = "heartbeats"
"""Below the run's `logs`."""
INTERVAL_S = 5.0
SILENT_S = 3 * INTERVAL_S
"""From then on a process is taken for stopped, or its host for lost."""
REPEATED = "train"
"""The only repeated phase, and one without waits: training on a batch."""
LIMIT_FACTOR, MIN_REPEATS = 20.0, 3
"""It may take so many times as long as the longest before; so many of the longest are known."""
LEAST_LIMITS_S = (24 * 3600.0, 3600.0, 3600.0, 600.0)
"""And at least this, by the number of those before: the first compiles, and may be long on a CPU."""
_END_S = 2.0
_MAX_BYTES = 1 << 20
_PAUSE_S = 0.1
"""At least so much between two beats, however often a process begins something else."""


class Heartbeat(msgspec.Struct, frozen=True):
    """The content of `heartbeat.json`; times are Unix times."""

    time: float
    pid: int
    host: str
    lineage: int
    step: int
    phases: list[str]
    """The process's work: phases of a step, outermost first; empty between two."""
    progress_at: float
    """When it last wrote an event, a row of metrics or a sample."""
    num_phases: int = 0
    """How many outermost phases have begun."""
    limit_s: float = 0.0
    """Time limit of the outermost phase; 0 if unknown."""

    def silence(self, now: float) -> str:
        """A sentence on a process without beats; empty if it beats."""
        return _silence(now - self.time, f"process {self.pid} on {self.host}, which was at {self.place}")

    def state(self, now: float) -> str:
        """Its work and since when, as part of a sentence."""
        return _state(self.place, now - self.progress_at)

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
    """Writes the heartbeat of the run of `log`, from a thread, while the context lasts; then removes it."""

    def __init__(self, log: _Log, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="slipstream-heartbeat", daemon=True)

    def _beat(self) -> None:
        log = self._log
        while not self._ended.is_set():
            # Before the number of phases: never the limit of a later phase than the one it is for.
            limit_s = 0.0 if _is_debugged() else log.limit_s
            beat = Heartbeat(
                round(time.time(), 3),
                os.getpid(),
                socket.gethostname(),
                log.lineage,
                log.step,
                log.phases,
                round(log.progress_at, 3),
                log.num_phases,
                limit_s,
            )
            # A full disk ends the run elsewhere, with its own words.
            with contextlib.suppress(SlipstreamError, OSError):
                write_whole(log.folder / FILE, msgspec.json.encode(beat) + b"\n", durable=False)
            self._ended.wait(self._interval_s)
        self._remove()  # even if it took longer than `_END_S`

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            (self._log.folder / FILE).unlink()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Write no further heartbeat, and remove the last one."""
        self._ended.set()
        self._thread.join(_END_S)
        self._remove()


def _is_debugged() -> bool:
    """Whether Python's debugger has the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__") != "bdb":
        frame = frame.f_back
    return frame is not None


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """The last heartbeat of the run in `folder`; None if there is no readable one."""
    return _read(folder / FILE, Heartbeat)


class ProcessHeartbeat(msgspec.Struct, frozen=True):
    """The content of a file in `logs/heartbeats`; times are Unix times."""

    time: float
    pid: int
    host: str
    role: str
    doing: str
    """The process's work; empty if unknown."""
    progress_at: float
    """Its last beginning of this work, or progress in it."""

    @property
    def name(self) -> str:
        """Role and pid."""
        return f"{self.role}-{self.pid}"

    def silence(self, now: float) -> str:
        """As the one of the run's process."""
        doing = f" ({self.doing})" if self.doing else ""
        return _silence(now - self.time, f"{self.role}, process {self.pid} on {self.host}{doing}")

    def state(self, now: float) -> str:
        """Its work and since when, as part of a sentence; empty if unknown."""
        return _state(self.doing, now - self.progress_at) if self.doing else ""

    @property
    def has_ended(self) -> bool:
        """Whether the process, if it is one of this host, is there no more."""
        return self.host == socket.gethostname() and state_of(self.pid) in ("", "Z", "X")


class _Own:
    """The beating thread of this process, with its pid in its file's name."""

    def __init__(self, folder: Path, role: str) -> None:
        self.pid, self._role = os.getpid(), role
        self.path = folder / f"{role}-{self.pid}.json"
        self._is_news, self._has_ended = threading.Event(), threading.Event()
        self._doing, self._progress_at = "", time.time()
        self._thread = threading.Thread(target=self._beat, name="slipstream-heartbeat", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        self.progress()  # first: what is written of it in between began no earlier
        if what != self._doing:
            self._doing = what
            self._is_news.set()

    def progress(self) -> None:
        self._progress_at = time.time()

    def end(self) -> None:
        self._has_ended.set()
        self._is_news.set()
        self._thread.join(_END_S)
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _beat(self) -> None:
        while True:
            self._is_news.clear()
            if self._has_ended.is_set():
                return self._remove()  # even if it took longer than `_END_S`
            beat = ProcessHeartbeat(
                round(time.time(), 3),
                self.pid,
                socket.gethostname(),
                self._role,
                self._doing,
                round(self._progress_at, 3),
            )
            with contextlib.suppress(SlipstreamError, OSError):
                write_whole(self.path, msgspec.json.encode(beat) + b"\n", durable=False)
            self._has_ended.wait(_PAUSE_S)
            self._is_news.wait(INTERVAL_S)


_own: _Own | None = None


def begin(folder: Path, role: str) -> None:
    """Beat from here on in `folder` as process of this role, until it ends; nothing if the folder cannot be made.
    Files of ended (killed) processes of the role are removed."""
    global _own
    end()
    with contextlib.suppress(OSError, RuntimeError):  # no thread may be started either
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.glob(f"{role}-*.json"):
            remove_ended(path)
        _own = _Own(folder, role)
        atexit.unregister(end)
        atexit.register(end)


def end() -> None:
    """Stop beating, and remove the file."""
    global _own
    own, _own = _own, None
    if own is not None and own.pid == os.getpid():
        own.end()


def doing(what: str) -> None:
    """Note this process's work, if it beats."""
    if _own is not None and _own.pid == os.getpid():  # a fork has no thread, and perhaps a lock held for ever
        _own.doing(what)


def progress() -> None:
    """Note its progress, if it beats."""
    if _own is not None:
        _own.progress()


def remove_ended(path: Path) -> None:
    """Remove the file of an ended process."""
    beat = _read(path, ProcessHeartbeat)
    if beat is None or beat.has_ended:
        with contextlib.suppress(OSError):
            path.unlink()


def read_processes(run_folder: Path) -> list[ProcessHeartbeat]:
    """The last heartbeats of a run's further living processes, by name."""
    return read_folder(folder_of(run_folder))


def read_folder(folder: Path) -> list[ProcessHeartbeat]:
    """The same for a folder."""
    beats = [_read(path, ProcessHeartbeat) for path in sorted(folder.glob("*.json"))]
    return [beat for beat in beats if beat is not None and not beat.has_ended]


def folder_of(run_folder: Path) -> Path:
    """The folder of the heartbeats of a run's further processes."""
    return run_folder.absolute() / "logs" / FOLDER


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_regular(path, _MAX_BYTES), type=kind)
    except (OSError, *UNDECODABLE):
        return None


def state_of(pid: int) -> str:
    """The state of a process in one letter, as /proc has it; empty when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def _silence(seconds: float, who: str) -> str:
    return f"no heartbeat for {seconds:.0f} s of {who}" if seconds > SILENT_S else ""


def _state(what: str, seconds: float) -> str:
    return f"{what}, no progress for {max(0.0, seconds):.0f} s"
