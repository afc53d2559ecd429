"""Finds synchronous calls that block the event loop of an environment process, names them, and interrupts them.

After `limit_s` of blocking, a signal raises `Blocked` in the call: its episode ends, and the others go on.
Code without a return to Python, as in a C extension, cannot be interrupted so: the run kills the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

EPISODE: contextvars.ContextVar[str] = contextvars.ContextVar("EPISODE", default="")
"""The episode of the running code, also in tasks it has started."""
_INTERVAL_S = 0.25
_TOLD_S = 1.0
_SIGNAL = signal.SIGUSR2
_OURS = str(Path(__file__).resolve().parents[3])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Blocked(BaseException):
    """A synchronous call of an episode took too long. No Exception: a user's handler must not take it for its own."""


class Watch:
    """Watches the running event loop, the main thread's, from another thread until the process ends."""

    def __init__(self, limit_s: float, tell: Callable[[str, float, bool], None]) -> None:
        """`tell`, called in the other thread, gets each call blocking for more than a second: its place, the seconds so
        far, and whether the line is told the first time; after the call's end, an empty place."""
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._tell = tell
        self._num_beats = 0
        self._interrupted: tuple[int, int] | None = None
        """The code at the last interrupt: a late signal finds something else."""
        signal.signal(_SIGNAL, self._interrupt)
        self._beat()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def _beat(self) -> None:
        self._num_beats += 1
        self._loop.call_later(_INTERVAL_S, self._beat)

    def _watch(self) -> None:
        told: set[tuple[str, int | None]] = set()
        seen, num_polls, is_told = self._running(), 0, False
        pause = threading.Event()
        while not pause.wait(_INTERVAL_S):
            # Polls are counted, not seconds: while the whole process is stopped there are none.
            running = self._running()
            num_polls = num_polls + 1 if running == seen else 0
            seen, seconds = running, num_polls * _INTERVAL_S
            if is_told and not num_polls:
                is_told = False
                self._tell("", 0.0, False)
            if seconds <= min(_TOLD_S, self._limit_s):
                continue
            frame = _blocking_frame()
            if frame is not None and not is_told:
                line, is_told = (frame.filename, frame.lineno), True
                self._tell(f"{frame.name}, line {frame.lineno} of {frame.filename}", seconds, line not in told)
                told.add(line)
            if seconds > self._limit_s:
                if self._interrupted != seen:
                    faulthandler.dump_traceback(all_threads=True)
                self._interrupted = seen
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _running(self) -> tuple[int, int]:
        """Changes whenever the loop goes on: with each beat, and from one task to the next."""
        return self._num_beats, id(asyncio.current_task(self._loop))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted == self._running() and EPISODE.get():
            raise Blocked(
                f"a synchronous call blocked all episodes of the process for {self._limit_s:g} s: await there, or use "
                "asyncio.to_thread"
            )


def _blocking_frame() -> traceback.FrameSummary | None:
    """The innermost frame of the main thread outside of libraries and ours; None while it waits for events."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    users = [each for each in stack if not each.filename.startswith((_OURS, "<", *_LIBRARIES))]
    return users[-1] if users else None
