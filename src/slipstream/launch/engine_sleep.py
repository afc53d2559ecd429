"""`inference.sleep`: the engine frees its GPU memory while the trainer works, and takes it back for an update."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from slipstream.launch.engines import RunEngine
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.runlog import RunLog

_GRACE_S = 5.0


class SleepWake:
    """Puts the engine to sleep when a batch is complete, and wakes it before new weights are published.

    Does nothing unless `sleeps`. Both methods are called by the trainer's thread, which waits.
    """

    def __init__(
        self, thread: EventLoopThread, engine: RunEngine, log: RunLog, *, sleeps: bool, timeout_s: float
    ) -> None:
        self._thread = thread
        self._engine = engine
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
            self._wait(self._engine.wake(self._timeout_s), "the engine to wake")

    def sleep(self) -> None:
        """Put the engine to sleep."""
        if self._sleeps:
            with self._log.phase("sleep"):
                self._wait(self._engine.sleep(self._timeout_s), "the engine to sleep")

    def _wait(self, work: Coroutine[Any, Any, None], waits_for: str) -> None:
        self._thread.call(work, self._timeout_s + _GRACE_S, waits_for)
