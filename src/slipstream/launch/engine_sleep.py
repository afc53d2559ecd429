"""Trainer and engine take turns on one GPU: `inference.sleep`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from slipstream.launch.engines import RunEngine
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.runlog import RunLog

_GRACE_S = 5.0


class Turns:
    """Puts the engine to sleep when a batch is made, and wakes it when new weights are there for it.

    Without `sleeps` nothing happens. The trainer hands back what its allocator only keeps before the engine wakes.
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
        """The engine's turn; called by the trainer's thread, which waits."""
        if not self._sleeps:
            return
        import torch

        with self._log.phase("wake"):
            torch.cuda.empty_cache()
            self._wait(self._engine.wake(self._timeout_s), "the engine to wake")

    def sleep(self) -> None:
        """The trainer's turn; called by its thread."""
        if self._sleeps:
            with self._log.phase("sleep"):
                self._wait(self._engine.sleep(self._timeout_s), "the engine to sleep")

    def _wait(self, work: Coroutine[Any, Any, None], waits_for: str) -> None:
        self._thread.call(work, self._timeout_s + _GRACE_S, waits_for)
