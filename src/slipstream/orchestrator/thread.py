"""Generation in the background: an event loop in a thread of its own, and the trainer's handles to it.

The trainer's thread calls `update`, `evaluate`, `release` and `take`; rollouts are made in the event loop's thread as
soon as the version they need is released. Guarantees: a failure there ends the trainer's wait at once with the failure
itself; every wait of the trainer checks `should_stop` at least twice a second; `stop` ends the engine and the reward
workers whatever state they are in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any, TypeVar

import uvloop

from slipstream.errors import DeadlineError, EngineError, Interrupted, SlipstreamError, WeightsError
from slipstream.orchestrator.batches.orders import MakesBatches
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.event_loop_watch import LoopWatch
from slipstream.orchestrator.hooks import Hooks
from slipstream.orchestrator.versions import Versions
from slipstream.records import ApplyReport, Batch, Ticket
from slipstream.records import Sequence as TokenSequence
from slipstream.transport import MemoryTransport
from slipstream.weights import Announce

T = TypeVar("T")
_POLL_S = 0.5
_CAUSE_S = 5.0
"""How long after a failed send the receiver may take to fail: one of the same deadline does so a moment later."""


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

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float, waits_for: str, **options: Any) -> T:
        """Run `work` in the event loop and wait for its result; see `wait`."""
        return self.wait(self.submit(work), timeout_s, waits_for, **options)

    def wait(
        self,
        future: Future[T],
        timeout_s: float,
        waits_for: str,
        *,
        activity: Callable[[], int] = lambda: 0,
        may_stop: bool = True,
    ) -> T:
        """Wait for the result of submitted work; a stop request (if it `may_stop`) or the deadline ends the wait and
        cancels the work. The deadline restarts whenever `activity` has changed, see `Waits`."""
        silence = _Silence(activity)
        while True:
            try:
                return future.result(_POLL_S)
            except FutureTimeout:
                if future.done():
                    return future.result()
                silence.poll()
            if may_stop and self.should_stop():
                future.cancel()
                raise Interrupted(f"stopped while waiting for {waits_for}: continue with --resume")
            if silence.seconds >= timeout_s:
                future.cancel()
                raise DeadlineError(f"{waits_for} did not end within {timeout_s:.0f} s")

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float = 30.0) -> bool:
        """Cancel all work, run `last` and end the thread; returns whether that succeeded within the deadline."""

        async def cancel_all() -> None:
            current = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not current]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        if self._watch is not None:
            self._watch.end()
        try:
            # Work that suppresses its cancellation or blocks the loop must not hide the error that ended the run.
            self.submit(cancel_all()).result(timeout_s)
        except FutureTimeout:
            return False
        else:
            return True
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)


@dataclass(frozen=True)
class Waits:
    """Deadlines of the trainer's waits for the orchestrator, in seconds."""

    start_s: float
    """For the engine to start."""
    apply_s: float
    """For a version to be applied, without activity of rollouts."""
    rollouts_s: float
    """For a batch or an evaluation, without activity of rollouts."""
    activity: Callable[[], int] = lambda: 0
    """A counter that grows whenever a turn or a rollout ends."""


class _Silence:
    """How long a counter of activity has not changed; `poll` is called every `_POLL_S` seconds."""

    def __init__(self, activity: Callable[[], int]) -> None:
        self._activity = activity
        self._seen = activity()
        self.seconds = 0.0

    def poll(self) -> None:
        seen = self._activity()
        self.seconds = self.seconds + _POLL_S if seen == self._seen else 0.0
        self._seen = seen


class Orchestrator:
    """Implements the training loop's `Engine`: publishes versions to the engine, evaluates them, releases them."""

    def __init__(
        self,
        thread: EventLoopThread,
        versions: Versions,
        *,
        publish: Callable[[int, Announce], Ticket],
        probe: Callable[[], Awaitable[list[TokenSequence]]],
        evaluate: Callable[[], Awaitable[Evaluation]],
        start: Callable[[], Awaitable[None]],
        waits: Waits,
        hooks: Hooks,
    ) -> None:
        """`start` is awaited before the first update, and ends when engine and rewards are ready for it."""
        self._thread = thread
        self._versions = versions
        self._publish = publish
        self._probe = probe
        self._evaluate = evaluate
        self._start: Callable[[], Awaitable[None]] | None = start
        self._waits = waits
        self._hooks = hooks
        self.last_evaluation: Evaluation | None = None

    def update(self, step: int) -> list[TokenSequence]:
        """See the loop's `Engine`."""
        if self._start is not None:
            start, self._start = self._start, None
            with self._hooks.waiting_for_engine():
                self._thread.call(_awaited(start), self._waits.start_s, "the engine to start")
        self._hooks.before_update()
        try:
            return self._publish_and_probe(step)
        except (EngineError, WeightsError) as error:
            if not self._hooks.repeats_update(error):
                raise
        return self._publish_and_probe(step)

    def _publish_and_probe(self, step: int) -> list[TokenSequence]:
        """Publish the live weights, have them applied, and probe."""

        async def apply_and_probe(ticket: Ticket) -> tuple[ApplyReport, list[TokenSequence]]:
            report = await self._versions.apply(ticket)
            return report, await self._probe()

        # The bridge decides when the engine begins to apply: after the files are complete, or before a collective.
        applying: list[Future[tuple[ApplyReport, list[TokenSequence]]]] = []

        def announce(ticket: Ticket) -> Callable[[], bool]:
            applying.append(self._thread.submit(apply_and_probe(ticket)))
            return applying[0].done

        try:
            ticket = self._publish(step, announce)
        except WeightsError as error:
            # Where the receiver failed too, that is the cause, and the sender's error a consequence.
            for future in applying:
                cause = _failure_of(future)
                if cause is not None:
                    raise cause from error
                future.cancel()
            raise
        report, sequences = self._thread.wait(
            applying[0],
            self._waits.apply_s,
            f"the engine to apply version {ticket.version.name}",
            activity=self._waits.activity,
        )
        self._hooks.version_applied(report)
        return sequences

    def fence(self) -> None:
        """See the loop's `Engine`. A stop request does not end this wait: the update has begun."""
        self._thread.call(
            self._versions.fence(),
            self._waits.apply_s,
            "the engine to pause",
            activity=self._waits.activity,
            may_stop=False,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """See the loop's `Engine`."""

        self.last_evaluation = self._thread.call(
            _awaited(self._evaluate),
            self._waits.rollouts_s,
            f"the evaluation of step {step}",
            activity=self._waits.activity,
        )
        self._hooks.version_evaluated(step, self.last_evaluation)
        return self.last_evaluation.metrics()

    def release(self, step: int) -> None:
        """See the loop's `Engine`. Does not wait: a synchronous call may be blocking the event loop."""
        self._thread.submit(self._versions.release(step))
        self._hooks.version_released()


class RolloutReader:
    """Implements the training loop's `Reader`: batches of rollouts that are made in the background, in order."""

    def __init__(
        self, thread: EventLoopThread, batches: MakesBatches, *, num_ahead: int, waits: Waits, hooks: Hooks
    ) -> None:
        """`num_ahead`: how many finished batches may wait for the trainer."""
        self._thread = thread
        self._batches = batches
        self._waits = waits
        self._hooks = hooks
        self._transport: MemoryTransport[Batch] = MemoryTransport(
            num_ahead, producer="the rollouts of the next batch", consumer="the trainer"
        )
        self._failure: BaseException | None = None
        self._producer: Future[None] | None = None

    def start(self, step: int, num_steps: int) -> None:
        """Start to make batches from `step` on, each as soon as a version that is new enough is released."""
        self._producer = self._thread.submit(self._produce(step, num_steps))

    async def _produce(self, first: int, num_steps: int) -> None:
        try:
            await self._batches.make_all(first, num_steps, self._put)
        except BaseException as error:
            self._failure = error
            self._transport.close("the orchestrator failed")
            raise

    async def _put(self, batch: Batch) -> None:
        await self._transport.put_async(batch, self._waits.rollouts_s)

    def take(self, step: int) -> Batch:
        """See the loop's `Reader`."""
        silence, limit_s = _Silence(self._waits.activity), self._waits.rollouts_s
        while True:
            try:
                receipt, batch = self._transport.take(_POLL_S)
            except DeadlineError:
                silence.poll()
            except SlipstreamError as closed:
                raise self._failure or closed from None
            else:
                self._transport.ack(receipt)
                self._hooks.batch_taken()
                return batch
            if self._thread.should_stop():
                raise Interrupted(f"stopped while waiting for the rollouts of step {step}: continue with --resume")
            if silence.seconds >= limit_s:
                raise DeadlineError(
                    f"the rollouts of step {step} are not ready, and none has gone on for {limit_s:.0f} s"
                )


async def _awaited(function: Callable[[], Awaitable[T]]) -> T:
    return await function()


def _failure_of(receiving: Future[Any]) -> BaseException | None:
    """What the receiver fails with, soon after the sender did; None where it goes on, had all it needed, or was
    cancelled."""
    try:
        return receiving.exception(_CAUSE_S)
    except (FutureTimeout, CancelledError):
        return None
