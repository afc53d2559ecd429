"""An event loop in a thread of its own, and waits for its work.

Guarantees: a failure there ends the wait at once with the failure itself. Every wait has a deadline and checks
`should_stop` at least twice a second. `stop` cancels all work in any state.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from traceback import FrameSummary
from typing import Any, TypeVar

import uvloop

from slipstream.errors import DeadlineError, Interrupted, SlipstreamError, first_line
from slipstream.orchestrator.event_loop_watch import LoopWatch
from slipstream.patience import passing_tasks

T = TypeVar("T")
POLL_S = 0.5


class Silence:
    """How long a counter of activity has not changed; `poll` is called every `POLL_S` seconds."""

    def __init__(self, activity: Callable[[], int]) -> None:
        self._activity = activity
        self._seen = activity()
        self.seconds = 0.0

    def poll(self) -> None:
        """Look at the counter."""
        seen = self._activity()
        self.seconds = self.seconds + POLL_S if seen == self._seen else 0.0
        self._seen = seen


def wait_for(
    future: Future[T],
    timeout_s: float,
    waits_for: str,
    *,
    should_stop: Callable[[], bool],
    activity: Callable[[], int] = lambda: 0,
    may_stop: bool = True,
    attend: Callable[[], None] = lambda: None,
) -> T:
    """Wait for the result of work in another thread or process, and `attend` to other things meanwhile. A stop request
    (if it `may_stop`) or the deadline ends the wait and cancels the work. The deadline restarts whenever `activity` has
    changed. After a stop request a retriable failure does not count: both may have one signal as their cause."""
    silence, stopped = Silence(activity), f"stopped while waiting for {waits_for}: continue with --resume"
    while True:
        try:
            return future.result(POLL_S)
        except FutureTimeout:
            if future.done():
                return future.result()
            silence.poll()
            attend()
        except SlipstreamError as error:
            if not (error.is_retriable and may_stop and should_stop()):
                raise
            raise Interrupted(f"{stopped}; meanwhile: {first_line(error)}") from error
        if may_stop and should_stop():
            future.cancel()
            raise Interrupted(stopped)
        if silence.seconds >= timeout_s:
            future.cancel()
            raise DeadlineError(f"{waits_for} did not end within {timeout_s:.0f} s")


class EventLoopThread:
    """An asyncio loop in a thread of its own."""

    def __init__(
        self, should_stop: Callable[[], bool], on_blocked: Callable[[Sequence[FrameSummary], float], None] | None = None
    ) -> None:
        """`on_blocked` is called from a third thread when a synchronous call blocks the loop, see `LoopWatch`."""
        self.should_stop = should_stop
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="orchestrator", daemon=True)
        self._thread.start()
        self._watch = LoopWatch(self._loop, self._thread, on_blocked) if on_blocked else None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` in the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float = 30.0) -> bool:
        """Cancel all work, run `last` and end the thread; returns whether this succeeded within the deadline."""

        async def cancel_all() -> None:
            others = passing_tasks()
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        if self._watch is not None:
            self._watch.end()
        has_ended = False
        try:
            # Work with a suppressed cancellation, or in the loop's way, must not hide the error at the run's end.
            with contextlib.suppress(FutureTimeout):
                self.submit(cancel_all()).result(timeout_s)
                has_ended = True
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
            if has_ended and not self._thread.is_alive():
                # It holds seven descriptors: many runs in one process would use up all.
                self._loop.close()
        return has_ended
