"""The end of a run that was asked to stop by SIGTERM or SIGUSR1 and has no whole checkpoint by `run.grace_s`.

The process then ends by itself, whatever its other threads do: exit.json, an event and the terminal say in one sentence
which checkpoint a resume goes on from, the children are killed, and the exit code is that of any stop. A checkpoint
that is being written keeps its unfinished name, which no resume takes.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from slipstream.errors import Interrupted
from slipstream.processes.heartbeat import Beating
from slipstream.progress import Progress
from slipstream.runlog import RunLog

END_S = 2.0
"""Seconds of `run.grace_s` that are kept for saying so and for killing the children, and each may take; at most a
quarter of it."""

_SLICE_S = 0.05
"""Time is counted in such slices: of that for which the whole process stood still one is counted at most."""

LastWords = Callable[[Interrupted], None]
"""Tells the caller of the process what would have been raised; the process ends right afterwards."""


class GraceEnd:
    """Implements `signals.Grace` for a run. `log` and `beating` are set when there is one."""

    def __init__(self, grace_s: float, progress: Progress, last_words: LastWords) -> None:
        """`grace_s`: seconds from the signal to the end of the process."""
        self.log: RunLog | None = None
        self.beating: Beating | None = None
        self._grace_s, self._progress, self._last_words = grace_s, progress, last_words

    @property
    def seconds(self) -> float:
        """See `signals.Grace`."""
        return self._grace_s - min(END_S, self._grace_s / 4)

    def say_first(self, number: int) -> None:
        """Show that the run will stop."""
        bound = "" if number == signal.SIGINT else f", after at most run.grace_s = {self._grace_s:g} s"
        self._progress.message(f"stopping at the next safe place{bound}; again to end at once")

    def end(self, number: int, at_once: Callable[[], None]) -> NoReturn:
        """See `signals.Grace`."""
        found: list[str] = []
        how = f"stopped by {signal.Signals(number).name}"
        _within(END_S / 2, lambda: found.append(self._what_is_left()))
        text = found[0] if found else f"without a whole checkpoint of it within {self._limit}: continue with --resume"
        _within(END_S, lambda: self._report(Interrupted(f"{how} {text}")))
        _within(END_S, at_once)
        os._exit(Interrupted.exit_code)

    @property
    def _limit(self) -> str:
        return f"run.grace_s = {self._grace_s:g} s"

    def _report(self, error: Interrupted) -> None:
        if self.log is not None and not self.log.has_exit:  # what has said how it ended only did not come to its end
            self.log.exit(error)
            if self.beating is not None:
                self.beating.end()
        self._progress.stop()
        self._last_words(error)

    def _what_is_left(self) -> str:
        """The end of a sentence on what the run has lost, and what to do."""
        if self.log is None:
            return "before the run had begun: start it again"
        step, doing = self.log.step, f"in phase {self.log.phases[-1]}" if self.log.phases else "between two phases"
        saved, name = self._last_checkpoint(self.log.folder / "checkpoints")
        if saved >= step:
            return (
                f"at step {step}, of which {name} is a whole checkpoint, {doing}: what was running did not end within "
                f"{self._limit}: continue with --resume"
            )
        left = f"the last whole one is {name}" if name else "there is none yet, and the run begins again"
        return (
            f"at step {step}, {doing}: no checkpoint of it could be complete within {self._limit}, and {left}: "
            "continue with --resume, and give it more time if there is any"
        )

    @staticmethod
    def _last_checkpoint(folder: Path) -> tuple[int, str]:
        """Step and name of the last whole checkpoint; (-1, "") where there is none."""
        if "slipstream.trainer.checkpoints.checkpoint" not in sys.modules:  # then nothing was resumed, nor trained
            return -1, ""
        from slipstream.trainer.checkpoints.checkpoint import CheckpointStore

        store = CheckpointStore(folder)
        latest = store.latest()
        return (int(store.read_extra(latest)["step"]), latest.name) if latest is not None else (-1, "")


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do `work`, but wait for no longer: a lock or a disk may hold it up for ever."""

    def do() -> None:
        with contextlib.suppress(Exception):  # the process ends in any case
            work()

    thread = threading.Thread(target=do, name="grace-end", daemon=True)
    thread.start()
    for _ in range(math.ceil(seconds / _SLICE_S)):
        thread.join(_SLICE_S)
        if not thread.is_alive():
            return
