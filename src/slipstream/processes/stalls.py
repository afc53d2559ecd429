"""Whether a trainer hangs, as another process sees it. Pure. Looks are counted, not seconds: a look is missing while
the observer is stopped, too, or the machine is suspended, so nobody is blamed for that time."""

from __future__ import annotations

from slipstream.processes.heartbeat import Heartbeat

POLL_S = 1.0
"""Seconds between two looks."""
STOPPED_POLLS = 30
"""How many looks may find the trainer stopped (SIGSTOP) before it is killed."""
SILENT_POLLS = 600
"""How many looks may find no new heartbeat of a trainer that is not stopped."""
ENDED = ("", "Z", "X")
"""States of a process that has ended."""
_DEBUGGED = "t"
"""State of a process that a debugger has stopped."""


class Looks:
    """What was found of a trainer, look by look."""

    def __init__(self) -> None:
        self._last: Heartbeat | None = None
        self._forget()

    def _forget(self) -> None:
        self._num_stopped = self._num_silent = self._num_in_phase = 0

    def add(self, state: str, beat: Heartbeat | None) -> str:
        """Add a look at the trainer's state and last heartbeat; why it is to be killed, empty if it is not."""
        last, self._last = self._last, beat
        if state == _DEBUGGED:  # somebody looks at it
            self._forget()
            return ""
        is_stopped = state == "T"
        self._num_stopped = self._num_stopped + 1 if is_stopped else 0
        is_same = beat is not None and last is not None and beat.time == last.time
        self._num_silent = self._num_silent + 1 if is_same else 0
        if beat is None or last is None or beat.num_phases != last.num_phases or not beat.limit_s:
            self._num_in_phase = 0
        elif not is_stopped:
            self._num_in_phase += 1
        if self._num_stopped >= STOPPED_POLLS:
            return f"is stopped (state {state}) for {POLL_S * self._num_stopped:.0f} s"
        if self._num_silent >= SILENT_POLLS:
            return f"gives no sign of life (state {state}) for {POLL_S * self._num_silent:.0f} s"
        if beat is not None and 0 < beat.limit_s <= POLL_S * self._num_in_phase:
            return f"does not get on at {beat.place} (state {state}) for {POLL_S * self._num_in_phase:.0f} s"
        return ""
