"""`inference.sleep`: the engine frees its GPU memory while the trainer works, and takes it back for an update."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import Caller
from slipstream.runlog import RunLog

_GRACE_S = 5.0


@dataclass
class SleepWake:
    """Puts the engine to sleep when a batch is complete, and wakes it before new weights are published.

    Does nothing unless `sleeps`. Both methods are called by the trainer's thread, which waits.
    """

    caller: Caller
    log: RunLog
    sleeps: bool
    timeout_s: float

    def wake(self) -> None:
        """Return the trainer's cached but unused GPU memory, and wake the engine."""
        if not self.sleeps:
            return
        import torch

        with self.log.phase("wake"):
            torch.cuda.empty_cache()
            self._wait(commands.Wake(self.timeout_s), "the engine to wake")

    def sleep(self) -> None:
        """Put the engine to sleep."""
        if self.sleeps:
            with self.log.phase("sleep"):
                self._wait(commands.Sleep(self.timeout_s), "the engine to sleep")

    def _wait(self, command: commands.AnyCommand, waits_for: str) -> None:
        self.caller.call(command, commands.Done, self.timeout_s + _GRACE_S, waits_for)
