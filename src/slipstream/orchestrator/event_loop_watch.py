"""Says what holds up an event loop: somebody's synchronous call, in which nothing else of the loop goes on."""

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

_LOOK_S = 0.25
_LAG_S = 1.0
_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class LoopWatch:
    """Looks at a loop from a thread of its own, until `end`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        tell: Callable[[Sequence[FrameSummary], float], None],
    ) -> None:
        """`tell` is called once for each place that holds up the loop for more than a second, with the stack, outermost
        first, and the seconds so far; `thread` runs the loop."""
        self._loop = loop
        self._thread = thread
        self._tell = tell
        self._num_beats = 0
        self._ended = threading.Event()
        loop.call_soon_threadsafe(self._beat)
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _beat(self) -> None:
        self._num_beats += 1
        if not self._ended.is_set():
            self._loop.call_later(_LOOK_S, self._beat)

    def _watch(self) -> None:
        told: set[tuple[str, int | None]] = set()
        seen = num_looks = 0
        while not self._ended.wait(_LOOK_S):
            # Counted in looks: while the whole process is stopped there are none.
            num_looks = num_looks + 1 if self._num_beats == seen else 0
            seen = self._num_beats
            if num_looks * _LOOK_S <= _LAG_S:
                continue
            stack = self._stack()
            if stack and (place := (stack[-1].filename, stack[-1].lineno)) not in told:
                told.add(place)
                self._tell(stack, num_looks * _LOOK_S)

    def _stack(self) -> Sequence[FrameSummary]:
        """What the loop runs; nothing while it waits."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        return [] if not stack or stack[-1].filename == threading.__file__ else stack


def blame(stack: Sequence[FrameSummary], seconds: float, environment: Environment | None) -> tuple[str, str | None]:
    """Which frame holds up the loop; and where that is the environment's code, the warning that says so."""
    found = _culprit(stack, inspect.getsourcefile(type(environment)) if environment is not None else None)
    frame = found or stack[-1]
    where = f"{frame.name}, line {frame.lineno} of {frame.filename}"
    if found is None or environment is None:
        return where, None
    return where, (
        f"environment {environment.name} holds up all rollouts: nothing else has gone on for {seconds:.1f} s beside a "
        f"synchronous call ({where}): await there, or use asyncio.to_thread"
    )


def _culprit(stack: Sequence[FrameSummary], theirs: str | None) -> FrameSummary | None:
    """The innermost frame of the file `theirs`, or of any that is neither a library's nor ours; None where we are to
    blame."""
    for frame in reversed(stack):
        if frame.filename == theirs:
            return frame
        if frame.filename.startswith(_OURS):
            return None
        if not frame.filename.startswith(_LIBRARIES):
            return frame
    return None
