"""Finds synchronous calls blocking an event loop, and names their code."""

from __future__ import annotations

import asyncio
import inspect
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import FrameSummary

from slipstream.envs.base import Environment

_INTERVAL_S = 0.25
_BLOCKED_S = 1.0
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class LoopWatch:
    """Watches an event loop from another thread until `end`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        on_blocked: Callable[[Sequence[FrameSummary], float], None],
    ) -> None:
        """`on_blocked` is called once for each line of code blocking the loop for more than a second, with the
        stack, outermost frame first, and the seconds so far; `thread` runs the loop."""
        self._loop = loop
        self._thread = thread
        self._on_blocked = on_blocked
        self._num_beats = 0
        self._ended = threading.Event()
        loop.call_soon_threadsafe(self._beat)
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _beat(self) -> None:
        self._num_beats += 1
        if not self._ended.is_set():
            self._loop.call_later(_INTERVAL_S, self._beat)

    def _watch(self) -> None:
        reported: set[tuple[str, int | None]] = set()
        seen = num_polls = 0
        while not self._ended.wait(_INTERVAL_S):
            # Polls are counted, not seconds: while the whole process is stopped there are none.
            num_polls = num_polls + 1 if self._num_beats == seen else 0
            seen = self._num_beats
            if num_polls * _INTERVAL_S <= _BLOCKED_S:
                continue
            stack = self._stack()
            if stack and (line := (stack[-1].filename, stack[-1].lineno)) not in reported:
                reported.add(line)
                self._on_blocked(stack, num_polls * _INTERVAL_S)

    def _stack(self) -> Sequence[FrameSummary]:
        """The stack of the loop's running code; empty while it waits for events."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        return [] if not stack or stack[-1].filename == threading.__file__ else stack


def blame(stack: Sequence[FrameSummary], seconds: float, environment: Environment | None) -> tuple[str, str | None]:
    """Describe the frame blocking the loop; for the environment's code, also a warning."""
    found = _blocking_frame(stack, inspect.getsourcefile(type(environment)) if environment is not None else None)
    frame = found or stack[-1]
    where = f"{frame.name}, line {frame.lineno} of {frame.filename}"
    if found is None or environment is None:
        return where, None
    return where, (
        f"environment {environment.name} blocks all rollouts: a synchronous call ({where}) has held the event loop for "
        f"{seconds:.1f} s: await there, or use asyncio.to_thread"
    )


def _blocking_frame(stack: Sequence[FrameSummary], environment_file: str | None) -> FrameSummary | None:
    """The innermost frame of `environment_file`, or of any file neither a library's nor ours; None if ours is further
    in."""
    for frame in reversed(stack):
        if frame.filename == environment_file:
            return frame
        if frame.filename.startswith(_PACKAGE):
            return None
        if not frame.filename.startswith(_LIBRARIES):
            return frame
    return None
