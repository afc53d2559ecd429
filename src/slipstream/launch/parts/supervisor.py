"""`slipstream train` where the run is several processes (`run.streams`): it starts `slipstream trainer`, and starts it
again when it was killed, is stopped for long, or does not come to the end of a step's training.

Guarantees: the trainer ends with its supervisor (`supervised.py`); what a killed trainer had started has ended before
the next attempt begins; at most `run.max_restarts` attempts follow, each after a longer wait; where none follows,
`exit.json` says why; a signal to the supervisor is passed on to the trainer, and no restart follows it, unless it asks
for stacks (SIGUSR2); the trainer is not blamed for time in which the supervisor itself was stopped. Needs neither torch
nor vLLM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.errors import ConfigError, Interrupted, SlipstreamError, TrainerLost
from slipstream.launch.parts.watchdog import beat_of, write_end
from slipstream.launch.recovery.retry_policy import earlier_attempts, next_restart, progress_of
from slipstream.plan.machine import gpus_in_use
from slipstream.processes import exits, stacks, stalls
from slipstream.processes.guard import adopt, children_of, end_descendants, reap
from slipstream.processes.heartbeat import state_of
from slipstream.processes.launchers import LOCAL, Child
from slipstream.runlog import append_event, checkpoints_of, holds_run, read_events, read_metrics

AGAIN = 75
"""Exit code of a supervised trainer that has said in its log why it is to be started again."""
ALIVE, PASSES_ON = b".", b"t"
"""Bytes for the trainer: this process lives, and it passes a SIGTERM on."""
_ORPHANS_S = 30.0
"""How long what a killed trainer had started may take to end."""
_PAUSE_S = 0.05
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP, signal.SIGCONT)
_MEMORY = ", as the kernel does when memory is short"


class Supervisor:
    """Starts the trainer of the run in `folder` by the command `slipstream` with `arguments`, as often as needed."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, *, max_restarts: int, say: Callable[[str], None]
    ) -> None:
        """`say` tells the user something while no trainer runs."""
        self._arguments = arguments
        self._folder = folder
        self._max_restarts = max_restarts
        self._say = say
        self._child: Child | None = None
        self._stop_requested = False
        self._lineage_before = -1
        self._killed = ""
        """Why this process has killed the attempt; empty where it has not."""
        self._early: list[dict[str, Any]] = []
        """Attempts that were killed before they had opened the run folder, which stand in no event."""
        self.error: SlipstreamError | None = None
        """Why no further attempt follows one that a signal has ended."""

    def run(self, resume: Sequence[str]) -> int:
        """Run the first attempt with the options `resume`, and those that follow. Returns the run's exit code."""
        adopt()
        gpus_in_use()  # before any attempt is on them: each plans with the same
        with self._passing_signals_on(), stacks.on_stderr(self._ask_trainer):
            while True:
                self._lineage_before = _lineage_of(read_events(self._folder) if holds_run(self._folder) else [])
                code = self._attempt(resume)
                if code != AGAIN and (code >= 0 or not self._starts_again(-code)):
                    was_stopped = isinstance(self.error, Interrupted)
                    return code if code >= 0 else Interrupted.exit_code if was_stopped else 128 - code
                resume = ("--resume=auto",)

    def _attempt(self, resume: Sequence[str]) -> int:
        """Run the trainer to its end; its exit code, or minus the signal that ended it."""
        self._killed = ""
        arguments = [*self._arguments, *resume, "--supervised"]
        child = LOCAL.launch("slipstream.cli", arguments, {**os.environ, **exits.SAFE_PATH})
        try:
            self._child = child
            if self._stop_requested:  # while there was nobody to pass it on to
                self._send(signal.SIGTERM)
            return self._watch(child)
        finally:
            self._child = None
            child.socket.close()
            _end_orphans()

    def _watch(self, child: Child) -> int:
        """Wait for the trainer's end, and kill it when it stands still; its exit code."""
        found = stalls.Looks()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(stalls.POLL_S)
            self._tell(ALIVE)
            _reap_orphans(child.pid)
            if why := found.add(state_of(child.pid), beat_of(child.pid, self._folder)):
                self._kill(child, f"the trainer, process {child.pid}, {why}")
                found = stalls.Looks()

    def _tell(self, byte: bytes) -> None:
        assert self._child is not None
        with contextlib.suppress(OSError):  # the trainer does not read, or has just ended
            self._child.socket.send(byte, socket.MSG_DONTWAIT)

    def _send(self, number: int) -> None:
        """Send the trainer a signal; it takes a SIGTERM that it has had from elsewhere for the same one."""
        assert self._child is not None
        if number == signal.SIGTERM:
            self._tell(PASSES_ON)
        self._child.send_signal(number)

    def _kill(self, child: Child, why: str) -> None:
        """Kill a trainer that stands still, after all processes of the run that can have dumped their stacks."""
        self._say(f"{why}: it is killed")
        folder = stacks.folder_of(self._folder)
        told = stacks.sentence(folder, stacks.ask(folder))
        child.send_signal(signal.SIGKILL)
        self._killed = f"{why} and was killed{f' ({told})' if told else ''}"

    def _starts_again(self, number: int) -> bool:
        """Whether another attempt follows one that a signal has ended; writes why or why not, and waits."""
        name = signal.Signals(number).name
        how = self._killed or f"the trainer was ended by {name}"
        events = read_events(self._folder) if holds_run(self._folder) else []
        lineage = _lineage_of(events)
        has_opened = lineage > self._lineage_before
        attempts = earlier_attempts(events, lineage if has_opened else lineage + 1)
        metrics = read_metrics(self._folder) if holds_run(self._folder) else []
        progress = progress_of(metrics, lineage if has_opened else None, attempts)
        if self._stop_requested:
            return self._gives_up(Interrupted(f"stopped, but {how}: continue with --resume"))
        how += _MEMORY if number == signal.SIGKILL and not self._killed else ""
        found = next_restart(None, [*attempts, *self._early], self._max_restarts)
        if isinstance(found, str):
            text = f"{how}, and the run is not started again: {found}; continue with --resume"
            return self._gives_up(TrainerLost(text, exit_code=128 + number))
        checkpoints = [path.name for path in checkpoints_of(self._folder)]
        fields: dict[str, Any] = {
            "number": found.number,
            "checkpoint": checkpoints[-1] if checkpoints else None,
            "wait_s": found.wait_s,
            "signal": name,
            "outside": True,
            "reason": how,
            **progress,
        }
        if not has_opened:
            self._early.append(fields)
        else:
            try:
                append_event(self._folder, lineage, "restart", **fields)
            except ConfigError as error:  # somebody else resumes the run
                self.error = error
                return False
        after = f"from checkpoint {checkpoints[-1]}" if checkpoints else "from the beginning, as there is no checkpoint"
        which = f"restart {found.number} of run.max_restarts = {self._max_restarts}"
        self._say(f"{how}; the run starts again {after} ({which}) in {found.wait_s:g} s")
        return self._waits(found.wait_s)

    def _waits(self, seconds: float) -> bool:
        """Wait before the next attempt; False, and written into the run folder, after a request to stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop_requested:
            time.sleep(0.1)
        if self._stop_requested:
            text = "stopped before the run was started again: continue with --resume"
            return self._gives_up(Interrupted(text))
        return True

    def _gives_up(self, error: SlipstreamError) -> bool:
        """False, after it was written into the run folder, if there is one and nobody else uses it, why no further
        attempt follows."""
        self.error = error
        write_end(self._folder, error)
        return False

    def _ask_trainer(self) -> None:
        if self._child is not None:
            stacks.pass_on(self._child.pid)

    @contextlib.contextmanager
    def _passing_signals_on(self) -> Generator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The trainer has a session of its own, so that a terminal's signals come from here alone."""
        is_stop = number not in (signal.SIGTSTP, signal.SIGCONT)
        self._stop_requested |= is_stop
        if self._child is not None:
            self._send(signal.SIGSTOP if number == signal.SIGTSTP else number)
        if number == signal.SIGTSTP:  # stop as the terminal asked
            os.kill(os.getpid(), signal.SIGSTOP)


def _lineage_of(events: Sequence[dict[str, Any]]) -> int:
    return max((int(event["lineage"]) for event in events), default=-1)


def _reap_orphans(trainer: int) -> None:
    """Take note of the end of processes that the trainer's children have left to this one."""
    for pid in children_of(os.getpid()):
        if pid != trainer:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _end_orphans() -> None:
    """Wait for the end of what a trainer has left, which this process has inherited; kill what does not end in time."""
    until = time.monotonic() + _ORPHANS_S
    while reap() and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    end_descendants(_ORPHANS_S)
