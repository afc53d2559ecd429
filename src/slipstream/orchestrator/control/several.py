"""Several orchestrators behind the handles of one: every command goes to all of them, and their parts of a batch are
joined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from slipstream.inference.replicas import worst_report
from slipstream.orchestrator.batches.share import join
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import Caller
from slipstream.records import Batch
from slipstream.transport import Receipt, Transport

A = TypeVar("A", bound=commands.Answer)
_OF_THE_FIRST = (commands.Evaluate, commands.RollOut, commands.AskTeacher)
"""Commands for one orchestrator alone, in place of all."""
_REPLICA = "replica_"


class SeveralCallers(Caller):
    """Sends each command to all orchestrators; it fails with the first of them, and the others' work is cancelled."""

    def __init__(self, callers: Sequence[Caller], num_replicas: int) -> None:
        """`num_replicas`: engines of each."""
        super().__init__(callers[0].should_stop)
        self._callers = callers
        self._num_replicas = num_replicas

    def submit(self, command: commands.AnyCommand) -> Future[commands.AnyAnswer]:
        """See `Caller`."""
        if isinstance(command, _OF_THE_FIRST):
            return self._callers[0].submit(command)
        return _all_of([caller.submit(command) for caller in self._callers], self._joined)

    def activity(self) -> int:
        """See `Caller`."""
        return sum(caller.activity() for caller in self._callers)

    def engine_state(self, *, settles: bool) -> commands.EngineState:
        """See `Caller`."""
        return _state([caller.engine_state(settles=settles) for caller in self._callers])

    def _joined(self, answers: list[commands.AnyAnswer]) -> commands.AnyAnswer:
        """One answer of all."""
        first = answers[0]
        match first:
            case commands.Applied():
                applied = _of(answers, commands.Applied)
                metrics = self._metrics([each.metrics for each in applied])
                return commands.Applied(worst_report([each.report for each in applied], "orchestrator"), metrics)
            case commands.Probed():
                probed = _of(answers, commands.Probed)
                return commands.Probed([sequence for each in probed for sequence in each.sequences])
            case commands.Held():
                held = _of(answers, commands.Held)
                return first if all(each == first for each in held) else commands.Held(None)
            case commands.Joined():
                return commands.Joined(sum(each.count for each in _of(answers, commands.Joined)))
            case commands.EngineState():
                return _state(_of(answers, commands.EngineState))
            case _:
                return first

    def _metrics(self, parts: Sequence[dict[str, float]]) -> dict[str, float]:
        """Engines are numbered through; all other numbers are summed up."""
        found: dict[str, float] = {}
        for number, part in enumerate(parts):
            for name, value in part.items():
                if name.startswith(_REPLICA):
                    own, _, figure = name.removeprefix(_REPLICA).partition("/")
                    name = f"{_REPLICA}{number * self._num_replicas + int(own)}/{figure}"
                found[name] = found.get(name, 0.0) + value
        return found


class JoinedBatches:
    """A reader's batches: the batch of a step, once all orchestrators have put their parts of it."""

    def __init__(self, transports: Sequence[Transport[Batch]]) -> None:
        self._transports = transports
        self._taken: list[tuple[Receipt, Batch]] = []

    def take(self, timeout_s: float) -> tuple[Receipt, Batch]:
        """See `Transport`; parts taken before the deadline are kept for the next call."""
        while len(self._taken) < len(self._transports):
            self._taken.append(self._transports[len(self._taken)].take(timeout_s))
        return "", join([batch for _, batch in self._taken])

    def __len__(self) -> int:
        """Batches with all parts there."""
        return min(len(transport) for transport in self._transports)

    def ack(self, receipt: Receipt) -> bool:
        """See `Transport`; of the last taken parts."""
        taken, self._taken = self._taken, []
        valid = [transport.ack(own) for transport, (own, _) in zip(self._transports, taken, strict=True)]
        return all(valid)


def _all_of(
    parts: Sequence[Future[commands.AnyAnswer]], join_answers: Callable[[list[commands.AnyAnswer]], commands.AnyAnswer]
) -> Future[commands.AnyAnswer]:
    """A future of all answers; the first failure is its own, and cancelling it cancels them."""
    whole, guard, left = Future[commands.AnyAnswer](), threading.Lock(), [len(parts)]

    def on_done(part: Future[Any]) -> None:
        with guard:
            left[0] -= 1
            is_last = not left[0]
        with suppress(InvalidStateError):  # another one has failed before, or nobody waits
            if part.cancelled():
                whole.cancel()
            elif (error := part.exception()) is not None:
                whole.set_exception(error)
            elif is_last:
                try:
                    whole.set_result(join_answers([each.result() for each in parts]))
                except TypeError as error:
                    whole.set_exception(error)

    def on_whole(done: Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            for part in parts:
                part.cancel()

    whole.add_done_callback(on_whole)
    for part in parts:
        part.add_done_callback(on_done)
    return whole


def _of(answers: Sequence[commands.AnyAnswer], kind: type[A]) -> list[A]:
    """All answers; they must be of one kind."""
    found = [answer for answer in answers if isinstance(answer, kind)]
    if len(found) < len(answers):
        raise TypeError(f"orchestrators answered {' and '.join(sorted({type(each).__name__ for each in answers}))}")
    return found


def _state(states: Sequence[commands.EngineState]) -> commands.EngineState:
    """Whether all engines run, and whether a dead one had the only copy of the weights."""
    down = [state for state in states if not state.is_up]
    is_in_memory_only = any(state.is_in_memory_only for state in down or states)
    return commands.EngineState(not down, is_in_memory_only, any(state.wants_weights for state in states))
