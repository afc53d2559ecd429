"""Handles Ctrl-C, SIGTERM and SIGUSR1: the first asks the run to stop at the next safe point, a second one ends it at
once.

SIGUSR1 is a scheduler's warning (`sbatch --signal=B:USR1@120`): it asks for the same stop, but never ends the run at
once, and neither does the first SIGTERM after it. After SIGTERM or SIGUSR1 the stop may have a deadline
(`Grace`), kept by a thread. The operating system tells the thread of a signal: a main thread computing for
minutes in one call of C code does not hold the deadline up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn, Protocol, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_BOUNDED = frozenset({signal.SIGTERM, signal.SIGUSR1})
"""Signals with a deadline for the stop."""
_LEFT = 0
"""Written to the watching thread's pipe when the context is left; no signal has this number."""
_JOIN_S = 2.0
_SAME_S = 1.0


class Grace(Protocol):
    """Ends a run that did not stop in time."""

    @property
    def seconds(self) -> float:
        """How long after the signal `end` is called."""
        ...

    def end(self, number: int, at_once: Callable[[], None]) -> NoReturn:
        """End this process after signal `number`; called in a thread of its own. `at_once` ends the children."""
        ...


class StopRequest:
    """A context for signals: the first sets a flag and calls `on_first` with its number. `at_once` is called before
    a second one ends the process, and `grace.end` if the run is still in the context at its deadline."""

    def __init__(
        self,
        at_once: Callable[[], None] = lambda: None,
        on_first: Callable[[int], None] = lambda number: None,
        grace: Grace | None = None,
        num_passed_on: Callable[[], int] | None = None,
    ) -> None:
        """`num_passed_on`: number of SIGTERMs passed on by the supervisor so far, if there is one. A scheduler
        signals all processes of a job: each of its SIGTERMs comes twice, however long the second one takes or
        this process takes to see it. SIGTERMs within `_SAME_S` are one."""
        self.at_once = at_once
        self.on_first = on_first
        self._grace = grace
        self._requested = threading.Event()
        self._only_warned = True
        self._num_passed_on = num_passed_on or (lambda: 0)
        self._same_s = _SAME_S if num_passed_on is not None else 0.0
        self._last_term = -_SAME_S
        self._num_terms = 0
        self._num_asked = 0
        """Requests of SIGTERM's sender: passed-on ones are counted apart from the others."""
        self._before: dict[int, object] = {}
        self._watch: _Watch | None = None

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask for the stop without a signal."""
        self._requested.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._is_counted():
            return
        is_first, only_warned = not self._requested.is_set(), self._only_warned
        self._only_warned = only_warned and number == signal.SIGUSR1
        if is_first:
            self._requested.set()
            self.on_first(number)
        elif number != signal.SIGUSR1 and not (only_warned and number == signal.SIGTERM):
            self.at_once()
            os._exit(128 + number)

    def _is_counted(self) -> bool:
        """Whether another sender has sent this SIGTERM before."""
        last, self._last_term = self._last_term, time.monotonic()
        self._num_terms += 1
        passed_on, before = self._num_passed_on(), self._num_asked
        self._num_asked = max(before, passed_on, self._num_terms - passed_on)
        return self._num_asked == before or self._last_term - last < self._same_s

    def __enter__(self) -> Self:
        if self._grace is not None:
            self._watch = _Watch(self._grace, lambda: self.at_once())
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._before[number])  # pyright: ignore[reportArgumentType]
        if self._watch is not None:
            self._watch.leave()


class _Watch:
    """A thread that calls `grace.end` if the context was not left in time after a signal."""

    def __init__(self, grace: Grace, at_once: Callable[[], None]) -> None:
        self._grace, self._at_once = grace, at_once
        self._left = threading.Event()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        _watching.add(self._wake)
        self._thread = threading.Thread(target=self._run, name="grace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            received = os.read(self._woken, 64)
            if _LEFT in received:
                return
            if bounded := _BOUNDED.intersection(received):
                break
        if not self._left.wait(self._grace.seconds):
            self._grace.end(min(bounded), self._at_once)

    def leave(self) -> None:
        """End the watch."""
        signal.set_wakeup_fd(self._before)
        _watching.discard(self._wake)
        self._left.set()
        with contextlib.suppress(BlockingIOError):  # so full of signals that the thread has read one
            os.write(self._wake, bytes([_LEFT]))
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():  # else it is ending the process
            os.close(self._wake)
            os.close(self._woken)


_watching: set[int] = set()


def _forget() -> None:
    """In a forked child: its signals are none of its parent's."""
    if _watching:
        _watching.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)
