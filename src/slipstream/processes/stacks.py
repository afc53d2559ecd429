"""The stacks of all threads of a run's processes, in `logs/stacks/`: who hangs, and where.

A process that calls `register` appends the Python stacks of all its threads to `<role>-<pid>.txt` whenever it gets
SIGUSR2, also while it is inside C code or waits for the interpreter's lock. `ask` sends that signal to a run's
processes and tells which of them answered. Guarantees: SIGUSR2, which ends a process that has no handler, is sent only
to processes that hold their file open and catch it; a stopped process is named and not asked; every wait is bounded;
files are private, and cut before they grow beyond `MAX_BYTES`; empty ones are removed when the run ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import DeadlineError, RankDeadlineError, SlipstreamError
from slipstream.processes import heartbeat

FOLDER = "stacks"
"""Below the run's `logs`."""
VARIABLE = "SLIPSTREAM_STACKS"
"""Environment variable of a child: its file without `-<pid>.txt`."""
MAX_BYTES = 4 << 20
_MAX_FILES = 64
"""Files that are not empty, of processes that have ended."""
_ANSWER_S = 3.0
"""How long a process may take to begin its answer."""
_POLL_S = 0.1
_SIGNAL = signal.SIGUSR2
_own: tuple[int, Path, int] | None = None
"""Pid, file and descriptor of this process's registration."""


def prefix_of(log: Path) -> Path:
    """A child's file without `-<pid>.txt`, from the path of its log: `logs/rank-1.log` is of the role `rank-1`, and
    `logs/teacher/engine.log` of `teacher-engine`."""
    log = log.absolute()
    logs = log.parent.parent if log.parent.name == "teacher" else log.parent
    return logs / FOLDER / "-".join(log.relative_to(logs).with_suffix("").parts)


def register(prefix: Path | None = None, *, beats: bool = True) -> None:
    """Answer SIGUSR2 from here on in `<prefix>-<pid>.txt`, by default where the environment says; again in another file
    after an earlier call. Nothing is done without a prefix, or where the file cannot be made. With `beats` a thread
    writes heartbeats, too (`heartbeat.begin`)."""
    global _own
    if prefix is None:
        if not os.environ.get(VARIABLE):
            return
        prefix = Path(os.environ[VARIABLE])
    path = prefix.with_name(f"{prefix.name}-{os.getpid()}.txt")
    if _own is not None and _own[:2] == (os.getpid(), path):
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        faulthandler.register(_SIGNAL, handle, all_threads=True)
        _drop_own()
        _own = os.getpid(), path, handle
        if beats:
            heartbeat.begin(path.parent.parent / heartbeat.FOLDER, prefix.name)


@contextlib.contextmanager
def on_stderr(also: Callable[[], None] = lambda: None) -> Generator[None]:
    """In this context, of a command that writes no run folder, SIGUSR2 shows the stacks on standard error and calls
    `also`."""
    before = signal.signal(_SIGNAL, lambda number, frame: also())
    with contextlib.suppress(ValueError, OSError, AttributeError):  # no standard error
        faulthandler.register(_SIGNAL, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(_SIGNAL)
        signal.signal(_SIGNAL, before)


def pass_on(pid: int) -> None:
    """Have a child of this process dump its stacks, if it can."""
    if _catching_state(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)


def unregister() -> None:
    """Undo `register`: SIGUSR2 does again what it did before. The file is removed if it is empty."""
    faulthandler.unregister(_SIGNAL)
    _drop_own()


def _drop_own() -> None:
    global _own
    if _own is not None:
        pid, path, handle = _own
        _own = None
        os.close(handle)
        if pid == os.getpid():  # otherwise a fork has it from its parent
            _remove_empty(path)


@contextlib.contextmanager
def kept_in(run_folder: Path) -> Generator[None]:
    """In this context the process of a run answers. Files of processes that have ended are removed, before and
    afterwards, but for the newest that hold stacks."""
    folder = folder_of(run_folder)
    _sweep(folder)
    beats = heartbeat.folder_of(run_folder)
    register(folder / "run", beats=False)  # it has `heartbeat.json`
    try:
        yield
    finally:
        unregister()
        _sweep(folder)
        for path in beats.glob("*"):
            heartbeat.remove_ended(path)
        for empty in (folder, beats, folder.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()


def folder_of(run_folder: Path) -> Path:
    """The folder of a run's stacks."""
    return run_folder.absolute() / "logs" / FOLDER


@dataclass(frozen=True)
class Answer:
    """What came of asking one process."""

    name: str
    """Role and pid."""
    missing: str = ""
    """Why there are no stacks; empty if there are."""
    state: str = ""
    """What it was at, and since when there was no progress, by its last heartbeat; empty if it did not say."""


def ask(folder: Path, only_group: int | None = None) -> list[Answer]:
    """Have the processes that write into `folder` dump their stacks, or those of one process group, and wait for them,
    `_ANSWER_S` each at most and all at once. Processes that have ended are left out."""
    asked: dict[Path, int] = {}
    answers: list[Answer] = []
    states = _states(folder.parent)
    for path in sorted(folder.glob("*.txt")):
        pid = _pid_of(path)
        state = _registered_state(pid, path) if pid is not None else ""
        if pid is None or path.is_symlink() or not state or (only_group is not None and _group_of(pid) != only_group):
            continue
        if state in "Tt":
            answers.append(Answer(path.stem, f"is stopped (state {state})", states.get(path.stem, "")))
            continue
        with contextlib.suppress(OSError):  # it has just ended
            size = path.stat().st_size
            if size > MAX_BYTES:
                os.truncate(path, size := 0)
            os.kill(pid, _SIGNAL)
            asked[path] = size
    grown = _wait_for_growth(asked)
    for path in asked:
        if path in grown:
            answers.append(Answer(path.stem, "", states.get(path.stem, "")))
        elif state := _registered_state(_pid_of(path) or 0, path):
            answers.append(Answer(path.stem, f"does not answer (state {state})", states.get(path.stem, "")))
    return answers


def _states(logs: Path) -> dict[str, str]:
    """Of a run's processes, by role and pid, what they are at and since when."""
    now, beat = time.time(), heartbeat.read_heartbeat(logs.parent)
    states = {f"run-{beat.pid}": beat.state(now)} if beat is not None else {}
    return states | {each.name: each.state(now) for each in heartbeat.read_folder(logs / heartbeat.FOLDER)}


def sentence(folder: Path, answers: Sequence[Answer]) -> str:
    """Where the stacks are, which processes gave none, and what each was at; empty if nobody was asked."""
    given = [answer.name for answer in answers if not answer.missing]
    texts = [f"{_joined(given)} wrote the stacks of all threads into {folder}"] if given else []
    texts += [f"{answer.name} {answer.missing}" for answer in answers if answer.missing]
    texts += [f"{answer.name}: {answer.state}" for answer in answers if answer.state]
    return "; ".join(texts)


class _Log(Protocol):
    folder: Path

    def event(self, kind: str, **fields: Any) -> None: ...


@contextlib.contextmanager
def asked_at_deadlines(log: _Log) -> Generator[None]:
    """Have all processes of the run dump their stacks when a wait of the trainer runs out in the block, while they
    still live, and name the folder in the error and in an event `stacks`."""
    try:
        yield
    except (DeadlineError, RankDeadlineError) as error:
        folder = folder_of(log.folder)
        answers = ask(folder)
        text = sentence(folder, answers)
        if not text:
            raise
        with contextlib.suppress(SlipstreamError):  # a full disk: the error that ended the run is worth more
            missing = {answer.name: answer.missing for answer in answers if answer.missing}
            states = {answer.name: answer.state for answer in answers if answer.state}
            asked = [answer.name for answer in answers]
            log.event("stacks", folder=str(folder), asked=asked, missing=missing, states=states)
        raise type(error)(f"{error} ({text})") from error


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _wait_for_growth(asked: dict[Path, int]) -> set[Path]:
    """Files that have grown beyond the given sizes and, as far as the time allows, grow no more."""
    sizes, until = dict(asked), time.monotonic() + _ANSWER_S
    while asked:
        time.sleep(_POLL_S)
        now = {path: _size_of(path) for path in asked}
        is_still, sizes = now == sizes, now
        grown = {path for path, size in now.items() if size > asked[path]}
        if time.monotonic() > until or (is_still and len(grown) == len(asked)):
            return grown
    return set()


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _pid_of(path: Path) -> int | None:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _registered_state(pid: int, path: Path) -> str:
    """The state of process `pid` in one letter, as /proc has it, if it holds `path` open and catches the signal; else
    empty. A later process of the same number does neither."""
    state = _catching_state(pid)
    try:
        ours = path.stat()
        return state if state and any(_is_same(file, ours) for file in Path(f"/proc/{pid}/fd").iterdir()) else ""
    except OSError:
        return ""


def _catching_state(pid: int) -> str:
    """The state of process `pid` if it catches the signal; else empty."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return status["State"][0] if int(status["SigCgt"], 16) >> (_SIGNAL - 1) & 1 else ""
    except (OSError, KeyError, ValueError):
        return ""


def _is_same(file: Path, ours: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), ours)
    except OSError:  # closed meanwhile
        return False


def _sweep(folder: Path) -> None:
    """Remove empty files of processes that have ended, and the oldest of more than `_MAX_FILES` others."""
    ended = [path for path in folder.glob("*.txt") if not _registered_state(_pid_of(path) or 0, path)]
    kept: list[tuple[float, Path]] = []
    for path in ended:
        with contextlib.suppress(OSError):
            kept += [(found.st_mtime, path)] if (found := path.stat()).st_size else []
        _remove_empty(path)
    for _, path in sorted(kept)[:-_MAX_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if not path.stat().st_size:
            path.unlink()
