"""The trainer's handles to the generating side: the training loop's `Engine` and `Reader`.

The trainer's thread calls them; rollouts are made elsewhere, by the versions released here.
Guarantees: a failure there ends the trainer's wait with the failure itself; every wait has a deadline.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from slipstream.errors import DeadlineError, EngineError, Interrupted, WeightsError
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.executor import Executor
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.hooks import TrainerHooks
from slipstream.orchestrator.thread import POLL_S, EventLoopThread, Silence, wait_for
from slipstream.records import Batch, Rollout, Ticket
from slipstream.records import Sequence as TokenSequence
from slipstream.trainer.evaluations import Meanwhile, nothing
from slipstream.transport import Receipt, TransportClosed
from slipstream.weights import Announce

A = TypeVar("A", bound=commands.Answer)
SETTLE_S = 30.0
_CAUSE_S = 5.0
"""How long after a failed send the receiver may take to fail: one of the same deadline does so a moment later."""


class Caller(ABC):
    """Brings commands to their executor."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self.should_stop = should_stop

    @abstractmethod
    def submit(self, command: commands.AnyCommand) -> Future[commands.AnyAnswer]:
        """Send a command; the future has its answer or raises its failure. Does not wait."""

    @abstractmethod
    def activity(self) -> int:
        """How many turns and rollouts have ended; any thread may ask."""

    @abstractmethod
    def engine_state(self, *, settles: bool) -> commands.EngineState:
        """See `commands.AskState`."""

    def call(self, command: commands.AnyCommand, kind: type[A], timeout_s: float, waits_for: str, **options: Any) -> A:
        """Send a command and wait for its answer, of type `kind`; see `wait`."""
        return self.wait(self.submit(command), kind, timeout_s, waits_for, **options)

    def wait(
        self,
        future: Future[commands.AnyAnswer],
        kind: type[A],
        timeout_s: float,
        waits_for: str,
        *,
        while_silent: bool = False,
        may_stop: bool = True,
        attend: Callable[[], None] = lambda: None,
    ) -> A:
        """Wait for an answer, see `wait_for`; `while_silent`: the deadline restarts whenever a rollout goes on."""
        activity = self.activity if while_silent else lambda: 0
        answer = wait_for(
            *(future, timeout_s, waits_for),
            should_stop=self.should_stop,
            activity=activity,
            may_stop=may_stop,
            attend=attend,
        )
        if not isinstance(answer, kind):
            raise TypeError(f"the orchestrator answered {type(answer).__name__} and not {kind.__name__}")
        return answer


class LocalCaller(Caller):
    """To an executor in a thread of this process."""

    def __init__(self, thread: EventLoopThread, executor: Executor) -> None:
        super().__init__(thread.should_stop)
        self._thread = thread
        self._executor = executor

    def submit(self, command: commands.AnyCommand) -> Future[commands.AnyAnswer]:
        """See `Caller`."""
        return self._thread.submit(self._executor.do(command))

    def activity(self) -> int:
        """See `Caller`."""
        return self._executor.num_ended()

    def engine_state(self, *, settles: bool) -> commands.EngineState:
        """See `Caller`; answers also while the event loop is blocked."""
        return self._executor.engine_state(settles=settles)


@dataclass(frozen=True)
class Waits:
    """Deadlines of the trainer's waits for the generating side, in seconds."""

    start_s: float
    """For the engine to start."""
    apply_s: float
    """For a version to be applied, without activity of rollouts."""
    rollouts_s: float
    """For a batch or an evaluation, without activity of rollouts."""


@dataclass
class _Beside:
    """An evaluation beside training."""

    step: int
    answer: Future[commands.AnyAnswer]
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def has_ended(self, answer: Future[commands.AnyAnswer]) -> None:
        self.ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has taken. The answer may be there a moment before `has_ended` is called."""
        return (self.ended or time.monotonic()) - self.began


@dataclass
class Orchestrator:
    """Implements the training loop's `Engine`: publishes versions to the engine, evaluates them, releases them."""

    caller: Caller
    _: KW_ONLY
    publish: Callable[[int, Announce], Ticket]
    saved_step: Callable[[], int] = lambda: 0
    """The step of the newest whole checkpoint."""
    waits: Waits
    hooks: TrainerHooks
    hold: Callable[[int | None], None] = lambda step: None
    """Told the step of the files to keep, while an engine stays on this version; None: of none."""
    last_evaluation: Evaluation | None = None
    _published: int = -1
    """The step published last; -1 before the first."""
    _beside: _Beside | None = None

    def update(self, step: int) -> None:
        """See the loop's `Engine`."""
        if self._published < 0:
            with self.hooks.waiting_for_engine():
                self.caller.call(commands.Start(), commands.Done, self.waits.start_s, "the engine to start")
        self.hooks.before_update()
        try:
            return self._publish(step)
        except (EngineError, WeightsError) as error:
            if not self.hooks.repeats_update(error):
                raise
        return self._publish(step)

    def _publish(self, step: int) -> None:
        """Publish the live weights, and have them applied."""
        self._published = step
        # The bridge decides when the engine begins to apply: after the files are complete, or before a collective.
        applying: list[Future[commands.AnyAnswer]] = []

        def announce(ticket: Ticket) -> Callable[[], bool]:
            applying.append(self.caller.submit(commands.Apply(ticket)))
            return applying[0].done

        try:
            ticket = self.publish(step, announce)
        except WeightsError as error:
            # If the receiver failed too, its error is the cause, and the sender's a consequence.
            for future in applying:
                cause = _failure_of(future)
                if cause is not None:
                    raise cause from error
                future.cancel()
            raise
        waits_for = f"the engine to apply version {ticket.version.name}"
        answer = self.caller.wait(applying[0], commands.Applied, self.waits.apply_s, waits_for, while_silent=True)
        self.hooks.version_applied(answer.report, answer.metrics)

    def probe(self) -> list[TokenSequence]:
        """See the loop's `Engine`."""
        try:
            return self._probe()
        except EngineError as error:
            if not self.hooks.repeats_update(error):
                raise
        self._publish(self._published)
        return self._probe()

    def _probe(self) -> list[TokenSequence]:
        asked = self.caller.submit(commands.SampleProbe())
        return self.caller.wait(asked, commands.Probed, self.waits.apply_s, "the probe", while_silent=True).sequences

    def mend(self, step: int) -> None:
        """Publish the live weights again, as version `step`, if lost servers are back without any."""
        if self.hooks.wants_weights():
            self.update(step)

    def fence(self) -> None:
        """See the loop's `Engine`. A stop request does not end this wait: the update has begun."""
        self.caller.call(
            commands.Fence(),
            commands.Done,
            self.waits.apply_s,
            "the engine to pause",
            while_silent=True,
            may_stop=False,
        )

    def begin(self, step: int) -> None:
        """See the loop's `Engine`. Does not wait."""
        self.caller.submit(commands.Begin(step))

    def evaluate(self, step: int, meanwhile: Meanwhile = nothing) -> dict[str, float]:
        """See the loop's `Engine`."""
        answer = self.caller.submit(commands.Evaluate(step))
        meanwhile(answer.done)
        return self._evaluated(step, answer)

    def begin_evaluation(self, step: int) -> None:
        """See the loop's `Engine`. Does not wait."""
        self.hold(step)
        self._beside = _Beside(step, self.caller.submit(commands.Evaluate(step, beside=True)))
        self._beside.answer.add_done_callback(self._beside.has_ended)

    def take_evaluation(self, *, waits: bool) -> dict[str, float] | None:
        """See the loop's `Engine`."""
        beside = self._beside
        if beside is None or not (waits or beside.answer.done()):
            return None
        metrics = self._evaluated(beside.step, beside.answer, ", beside training")
        self._beside = None
        self.hold(None)
        return {**metrics, "eval/beside_s": beside.seconds}

    def _evaluated(self, step: int, answer: Future[commands.AnyAnswer], how: str = "") -> dict[str, float]:
        """Wait for the answer; returns the metrics."""
        waits_for = f"the evaluation of step {step}{how}"
        limit_s, mend = self.waits.rollouts_s, partial(self.mend, step)
        done = self.caller.wait(answer, commands.Evaluated, limit_s, waits_for, while_silent=True, attend=mend)
        found = done.evaluation
        self.last_evaluation = found
        self.hooks.version_evaluated(step, found)
        return found.metrics()

    def roll_out(self, step: int, items: Sequence[int], *, seed: int, temperature: float) -> list[Rollout]:
        """One rollout of each of these training tasks by version `step`, in their order. The engine holds it."""
        command = commands.RollOut(step, list(items), seed, temperature)
        waits_for = f"the rollouts of step {step}"
        options = {"while_silent": True, "attend": partial(self.mend, step)}
        answer = self.caller.call(command, commands.RolledOut, self.waits.rollouts_s, waits_for, **options)
        self.hooks.batch_taken()
        return answer.rollouts

    def ask(self, command: commands.MakeBatch) -> Future[commands.AnyAnswer]:
        """Ask for a batch of a session; `take` waits for it."""
        return self.caller.submit(command)

    def take(self, answer: Future[commands.AnyAnswer], step: int) -> Batch:
        """The requested batch, in training step `step`."""
        waits_for, mend = f"the rollouts of step {step}", partial(self.mend, step)
        made = self.caller.wait(answer, commands.Made, self.waits.rollouts_s, waits_for, while_silent=True, attend=mend)
        self.hooks.batch_taken()
        return made.batch

    def settle(self, step: int, trained: Sequence[str] = (), unused: Sequence[str] = ()) -> None:
        """These groups were trained on at `step` - 1, or will not be."""
        command = commands.Settle(step, [*trained], [*unused])
        self.caller.call(command, commands.Done, SETTLE_S, "the ledger", may_stop=False)

    def release(self, step: int, change: tuple[int, list[float]] | None = None) -> None:
        """See the loop's `Engine`. Does not wait: a synchronous call may be blocking the event loop."""
        self.caller.submit(commands.Release(step, self.saved_step(), change))
        self.hooks.version_released(step)


class Takes(Protocol):
    """The reader's end of a transport of batches."""

    def take(self, timeout_s: float) -> tuple[Receipt, Batch]:
        """See `Transport`."""
        ...

    def ack(self, receipt: Receipt) -> bool:
        """See `Transport`."""
        ...

    def __len__(self) -> int:
        """See `Transport`."""
        ...


@dataclass
class RolloutReader:
    """Implements the training loop's `Reader`: batches of rollouts, made in the background, in order."""

    caller: Caller
    transport: Takes
    """Brings the batches."""
    waits: Waits
    hooks: TrainerHooks
    mend: Callable[[int], None] = lambda step: None
    """See `Orchestrator`."""
    _making: Future[commands.AnyAnswer] | None = None

    def start(self, command: commands.MakeBatches) -> None:
        """Have batches made, each as soon as a new enough version is released."""
        self._making = self.caller.submit(command)

    def take(self, step: int) -> Batch:
        """See the loop's `Reader`."""
        silence, limit_s = Silence(self.caller.activity), self.waits.rollouts_s
        while True:
            try:
                receipt, batch = self.transport.take(POLL_S)
            except DeadlineError:
                self._refuse_stop(step)  # first: the maker of batches may have got the same signal
                self._raise_failure(0.0)
                self.mend(step)
                silence.poll()
            except TransportClosed:
                self._refuse_stop(step)
                self._raise_failure(_CAUSE_S)
                raise
            else:
                self.transport.ack(receipt)
                with suppress(DeadlineError):  # an absent server cannot say
                    batch.metrics["rollout/batches_ready"] = float(len(self.transport))
                self.hooks.batch_taken()
                return batch
            if silence.seconds >= limit_s:
                raise DeadlineError(
                    f"the rollouts of step {step} are not ready, and none has gone on for {limit_s:.0f} s"
                )

    def _refuse_stop(self, step: int) -> None:
        if self.caller.should_stop():
            raise Interrupted(f"stopped while waiting for the rollouts of step {step}: continue with --resume")

    def _raise_failure(self, within_s: float) -> None:
        """Raise the failure of making batches, if it comes in time."""
        assert self._making is not None
        failure = _failure_of(self._making, within_s)
        if failure is not None:
            raise failure


def _failure_of(future: Future[Any], within_s: float | None = None) -> BaseException | None:
    """The failure of work elsewhere, soon after this side's; None if it goes on, had all it needed, or was
    cancelled."""
    try:
        return future.exception(_CAUSE_S if within_s is None else within_s)
    except (FutureTimeout, CancelledError):
        return None
