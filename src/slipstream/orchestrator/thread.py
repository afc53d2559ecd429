"""The orchestrator's thread: an event loop of its own beside the trainer, and the trainer's handle to it.

The trainer's thread calls `update`, `evaluate`, `release` and `take`; rollouts are made here, in the background,
as soon as the version they need is released. Guarantees: a failure here ends the trainer's wait at once with
the failure itself; every wait of the trainer looks at `should_stop` at least twice a second; `stop` ends the
engine and the reward workers whatever state they are in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any, TypeVar

import uvloop

from slipstream.errors import DeadlineError, EngineError, Interrupted, SlipstreamError, WeightsError
from slipstream.orchestrator.batcher import Batcher
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.event_loop_watch import LoopWatch
from slipstream.orchestrator.versions import Versions
from slipstream.records import ApplyReport, Batch, Task, Ticket
from slipstream.records import Sequence as TokenSequence
from slipstream.transport import MemoryTransport
from slipstream.weights import Announce

T = TypeVar("T")
_POLL_S = 0.5


class EventLoopThread:
    """An asyncio loop in a thread of its own."""

    def __init__(
        self, should_stop: Callable[[], bool], on_blocked: Callable[[Sequence[FrameSummary], float], None] | None = None
    ) -> None:
        """`on_blocked`: told from a third thread of what holds up the loop, see `LoopWatch`."""
        self._should_stop = should_stop
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="orchestrator", daemon=True)
        self._thread.start()
        self._watch = LoopWatch(self._loop, self._thread, on_blocked) if on_blocked else None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float, waits_for: str, **options: Any) -> T:
        """Run `work` there and wait for it here; see `wait`."""
        return self.wait(self.submit(work), timeout_s, waits_for, **options)

    def wait(
        self,
        future: Future[T],
        timeout_s: float,
        waits_for: str,
        *,
        signs: Callable[[], int] = lambda: 0,
        may_stop: bool = True,
    ) -> T:
        """What was started there; a stop request (if it `may_stop`) or the deadline ends the wait and the work. The
        deadline begins anew whenever `signs`, which counts signs of life, has changed."""
        waited, seen = 0.0, signs()
        while True:
            try:
                return future.result(_POLL_S)
            except FutureTimeout:
                if future.done():
                    return future.result()
                waited, seen = (waited + _POLL_S, seen) if signs() == seen else (0.0, signs())
            if may_stop and self._should_stop():
                future.cancel()
                raise Interrupted(f"stopped while waiting for {waits_for}: continue with --resume")
            if waited >= timeout_s:
                future.cancel()
                raise DeadlineError(f"{waits_for} did not end within {timeout_s:.0f} s")

    def stop(self, last: Coroutine[Any, Any, None], timeout_s: float = 30.0) -> bool:
        """Cancel everything, run `last`, end the thread; whether all of that ended within the deadline."""

        async def wind_up() -> None:
            current = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not current]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        if self._watch is not None:
            self._watch.end()
        try:
            # Work that swallows its cancellation or blocks the loop must not hide what ended the run.
            self.submit(wind_up()).result(timeout_s)
        except FutureTimeout:
            return False
        else:
            return True
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)


@dataclass
class Waits:
    """Deadlines of the trainer's waits, in seconds; an update's and an evaluation's begin anew with signs of life."""

    start_s: float
    apply_s: float
    evaluate_s: float
    signs: Callable[[], int] = lambda: 0
    """Counts the signs of life of rollouts."""


class Orchestrator:
    """What the training loop sees of the generating side; see the module."""

    def __init__(
        self,
        thread: EventLoopThread,
        versions: Versions,
        *,
        publish: Callable[[int, Announce], Ticket],
        probe: Callable[[], Awaitable[list[TokenSequence]]],
        evaluate: Callable[[], Awaitable[Evaluation]],
        on_applied: Callable[[ApplyReport], None],
        start: Callable[[], Awaitable[None]],
        waits: Waits,
        starting: Callable[[], AbstractContextManager[None]] = nullcontext,
        wake: Callable[[], None] = lambda: None,
        rest: Callable[[], None] = lambda: None,
        on_evaluated: Callable[[int, Evaluation], None] = lambda step, evaluation: None,
        publishes_again: Callable[[SlipstreamError], bool] = lambda error: False,
    ) -> None:
        """`start` ends when engine and rewards are ready for the first version; awaited, within `starting`, before that
        is applied. `wake` is called before each update and `rest` after each release, both by the trainer's thread.
        `publishes_again` says whether an update that failed is made a second time."""
        self._thread = thread
        self._versions = versions
        self._publish = publish
        self._probe = probe
        self._evaluate = evaluate
        self._on_applied = on_applied
        self._on_evaluated = on_evaluated
        self._start: Callable[[], Awaitable[None]] | None = start
        self._starting = starting
        self._waits = waits
        self._wake = wake
        self._rest = rest
        self._publishes_again = publishes_again
        self.last_evaluation: Evaluation | None = None

    def update(self, step: int) -> list[TokenSequence]:
        """See the loop's `Engine`."""
        if self._start is not None:
            start, self._start = self._start, None
            with self._starting():
                self._thread.call(_awaited(start), self._waits.start_s, "the engine to start")
        self._wake()
        try:
            return self._bring(step)
        except (EngineError, WeightsError) as error:
            if not self._publishes_again(error):
                raise
        return self._bring(step)

    def _bring(self, step: int) -> list[TokenSequence]:
        """Publish the live weights, have them applied, and probe."""

        async def apply_and_probe(ticket: Ticket) -> tuple[ApplyReport, list[TokenSequence]]:
            report = await self._versions.apply(ticket)
            return report, await self._probe()

        # The bridge decides when the engine begins: after the files are whole, or before a collective.
        under_way: list[Future[tuple[ApplyReport, list[TokenSequence]]]] = []

        def announce(ticket: Ticket) -> Callable[[], bool]:
            under_way.append(self._thread.submit(apply_and_probe(ticket)))
            return under_way[0].done

        try:
            ticket = self._publish(step, announce)
        except WeightsError as error:
            # A receiver that failed is the reason, and the sender's wait only what came of it.
            if under_way and under_way[0].done() and (cause := under_way[0].exception()) is not None:
                raise cause from error
            for future in under_way:
                future.cancel()
            raise
        report, sequences = self._thread.wait(
            under_way[0],
            self._waits.apply_s,
            f"the engine to apply version {ticket.version.name}",
            signs=self._waits.signs,
        )
        self._on_applied(report)
        return sequences

    def fence(self) -> None:
        """See the loop's `Engine`. A stop request does not end this wait: the update has begun."""
        self._thread.call(
            self._versions.fence(),
            self._waits.apply_s,
            "the engine to stand still",
            signs=self._waits.signs,
            may_stop=False,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """See the loop's `Engine`."""

        self.last_evaluation = self._thread.call(
            _awaited(self._evaluate),
            self._waits.evaluate_s,
            f"the evaluation of step {step}",
            signs=self._waits.signs,
        )
        self._on_evaluated(step, self.last_evaluation)
        return self.last_evaluation.metrics()

    def release(self, step: int) -> None:
        """See the loop's `Engine`. Not waited for: the loop may be held up by somebody's synchronous call."""
        self._thread.submit(self._versions.release(step))
        self._rest()


class RolloutReader:
    """The trainer's view of the rollouts made in the background: batches, in order, over a transport."""

    def __init__(
        self,
        thread: EventLoopThread,
        versions: Versions,
        batcher: Batcher,
        tasks_of_step: Callable[[int], Sequence[Task]],
        *,
        should_stop: Callable[[], bool],
        timeout_s: float,
        signs: Callable[[], int] = lambda: 0,
        staleness: int = 0,
        on_begin: Callable[[int], None],
        on_end: Callable[[], None],
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout_s`: how long a batch may be made without a change of `signs`, which counts signs of life.
        `staleness`: the batch of step k may be begun by version k - staleness. `on_taken` is called by the trainer's
        thread when it has a batch."""
        self._thread = thread
        self._versions = versions
        self._batcher = batcher
        self._tasks_of_step = tasks_of_step
        self._should_stop = should_stop
        self._timeout_s = timeout_s
        self._signs = signs
        self._staleness = staleness
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_taken = on_taken
        self._transport: MemoryTransport[Batch] = MemoryTransport(
            1, producer="the rollouts of the next batch", consumer="the trainer"
        )
        self._failure: BaseException | None = None
        self._producer: Future[None] | None = None

    def start(self, step: int, num_steps: int) -> None:
        """Begin to produce batches from `step` on, each as soon as a version that is new enough is released."""
        self._producer = self._thread.submit(self._produce(step, num_steps))

    async def _produce(self, first: int, num_steps: int) -> None:
        try:
            for step in range(first, num_steps):
                # A resumed run's first version is the one it begins with.
                # No deadline: the trainer is in this process, and when it ends, so does this wait.
                version = await self._versions.wait_for(max(first, step - self._staleness), None)
                tasks = self._tasks_of_step(step)
                self._on_begin(len(tasks))
                async with self._versions.generating():
                    batch = await self._batcher.make(step, version, tasks)
                self._on_end()
                await self._transport.put_async(batch, self._timeout_s)
        except BaseException as error:
            self._failure = error
            self._transport.close("the orchestrator failed")
            raise

    def take(self, step: int) -> Batch:
        """See the loop's `Reader`."""
        waited, seen = 0.0, self._signs()
        while True:
            try:
                receipt, batch = self._transport.take(_POLL_S)
            except DeadlineError:
                waited, seen = (waited + _POLL_S, seen) if self._signs() == seen else (0.0, self._signs())
            except SlipstreamError as closed:
                raise self._failure or closed from None
            else:
                self._transport.ack(receipt)
                self._on_taken()
                return batch
            if self._should_stop():
                raise Interrupted(f"stopped while waiting for the rollouts of step {step}: continue with --resume")
            if waited >= self._timeout_s:
                raise DeadlineError(
                    f"the rollouts of step {step} are not ready, and none has gone on for {self._timeout_s:.0f} s"
                )


async def _awaited(start: Callable[[], Awaitable[T]]) -> T:
    return await start()
