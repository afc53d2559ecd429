"""`inference.sleep`: the engine frees its GPU memory while the trainer works, and takes it back for an update."""

from __future__ import annotations

from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import Caller
from slipstream.runlog import RunLog

_GRACE_S = 5.0


class SleepWake:
    """Puts the engine to sleep when a batch is complete, and wakes it before new weights are published.

    Does nothing unless `sleeps`. Both methods are called by the trainer's thread, which waits.
    """

    def __init__(self, caller: Caller, log: RunLog, *, sleeps: bool, timeout_s: float) -> None:
        self._caller = caller
        self._log = log
        self._sleeps = sleeps
        self._timeout_s = timeout_s

    def wake(self) -> None:
        """Return the trainer's cached but unused GPU memory, and wake the engine."""
        if not self._sleeps:
            return
        import torch

        with self._log.phase("wake"):
            torch.cuda.empty_cache()
            self._wait(commands.Wake(self._timeout_s), "the engine to wake")

    def sleep(self) -> None:
        """Put the engine to sleep."""
        if self._sleeps:
            with self._log.phase("sleep"):
                self._wait(commands.Sleep(self._timeout_s), "the engine to sleep")

    def _wait(self, command: commands.AnyCommand, waits_for: str) -> None:
        self._caller.call(command, commands.Done, self._timeout_s + _GRACE_S, waits_for)
