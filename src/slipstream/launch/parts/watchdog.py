"""A watchdog process beside a trainer without a supervisor. It kills a trainer that hangs: stopped by SIGSTOP, without
a heartbeat, or too long in a step's training (`stalls.py`). A process cannot see these from inside.

Guarantees: before a kill, all processes of the run write their stacks, and a trainer that has continued by then lives.
Standard error and `exit.json` say why the run ended. The watchdog ends with its trainer, however that ends. It is in
the trainer's process group, so that Ctrl-Z stops both. Signals for the trainer leave it alone. It imports the run
folder's readers and writer, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from slipstream.errors import SlipstreamError, TrainerLost
from slipstream.processes import stacks, stalls
from slipstream.processes.heartbeat import Heartbeat, read_heartbeat, state_of
from slipstream.processes.launchers import LOCAL, Child, Resources
from slipstream.runlog import RunLog, holds_run, read_events, read_metrics
from slipstream.runlog.reader import last_attempt
from slipstream.runlog.writer import report_of, write_report

_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a terminal or a scheduler sends to all processes of a run."""
_END_S = 5.0
"""How long the watchdog may take to end."""
_DYING_S = 30.0
_PAUSE_S = 0.05


@contextlib.contextmanager
def watched(
    folder: Path,
    warn: Callable[[str], object] = lambda text: None,
) -> Generator[None]:
    """In this context a watchdog looks at this process, whose run is in `folder`. Only for a process that is the run's
    own, as it may be killed. If no watchdog can be started, the run continues without; if it dies, with a
    warning."""
    over = threading.Event()
    arguments, process = [str(os.getpid()), str(folder.absolute())], None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED)  # until it ignores them
    try:
        with contextlib.suppress(OSError):
            process = LOCAL.launch(__name__, arguments, resources=Resources(own_session=False))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if process is not None:
        threading.Thread(target=_missed, args=(process, over, warn), name="slipstream-watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if process is not None:
            process.socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def _missed(process: Child, over: threading.Event, warn: Callable[[str], object]) -> None:
    """Warn of a watchdog that ends before its trainer."""
    code = process.wait()
    if not over.is_set():
        warn(f"the watchdog ended with exit code {code}: the run continues, and a hang would not be noticed")


def main() -> None:
    """Look at the process and run folder of the arguments until standard input closes."""
    for number in _PASSED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED)
    trainer, folder = int(sys.argv[1]), Path(sys.argv[2])
    if why := watch(trainer, folder):
        code = 128 + signal.SIGKILL
        error = TrainerLost(f"the trainer, process {trainer}, {why}: continue with --resume", exit_code=code)
        if beat_of(trainer, folder) is not None:  # the folder is this trainer's
            tell(folder, error)
        end(trainer, error)
        write_end(folder, error)


def watch(trainer: int, folder: Path) -> str:
    """Look until the trainer hangs, and return the reason to kill it; empty where it has ended."""
    found = stalls.Looks()
    while not select.select([sys.stdin], [], [], stalls.POLL_S)[0]:
        state = state_of(trainer)
        if state in stalls.ENDED:
            return ""
        if found.add(state, beat_of(trainer, folder)):
            told = stacks.sentence(stacks.folder_of(folder), stacks.ask(stacks.folder_of(folder)))
            if why := found.add(state_of(trainer), beat_of(trainer, folder)):
                return f"{why} and was killed{f' ({told})' if told else ''}"
    return ""


def beat_of(trainer: int, folder: Path) -> Heartbeat | None:
    """The heartbeat in the run folder, if it is this trainer's."""
    beat = read_heartbeat(folder)
    return beat if beat is not None and beat.pid == trainer else None


def tell(folder: Path, error: SlipstreamError) -> None:
    """Write `exit.json` before the trainer is killed. A script that waits for the trainer reads the file at once, and
    a container whose first process is the trainer ends the watchdog with it."""
    with contextlib.suppress(OSError, SlipstreamError):
        rows = read_metrics(folder)
        attempt = last_attempt(read_events(folder), rows)
        write_report(folder, report_of(error, attempt, int(rows[-1]["step"]) if rows else 0))


def end(trainer: int, error: SlipstreamError) -> None:
    """Kill the trainer, wait for its end, and say on standard error why."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(trainer, signal.SIGKILL)
    until = time.monotonic() + _DYING_S
    while state_of(trainer) not in stalls.ENDED and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live view had hidden the cursor
    with contextlib.suppress(OSError):
        print(f"{shown}error: {error}", file=sys.stderr, flush=True)


def write_end(folder: Path, error: SlipstreamError) -> None:
    """Write into the run folder, if there is one and nobody else uses it, how the run ended whose trainer could not."""
    if holds_run(folder):
        rows = read_metrics(folder)  # the last attempt may have none
        step = int(rows[-1]["step"]) if rows else 0
        until = time.monotonic() + _END_S
        while True:
            try:
                with RunLog.create(folder, resume=True, is_over=True) as log:
                    log.exit(error, step=step)
                return
            except SlipstreamError:  # a killed process may hold the lock a little longer than its main thread lives
                if time.monotonic() > until:
                    return
                time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
