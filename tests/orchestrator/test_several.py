"""Several orchestrators as one: who makes which groups, joined batches, and joined answers."""

import itertools
import threading
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.draws import Draws
from slipstream.errors import DeadlineError, EngineError, Interrupted
from slipstream.orchestrator.batches.share import Share, join
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import Caller
from slipstream.orchestrator.control.several import JoinedBatches, SeveralCallers
from slipstream.records import ApplyReport, Batch, Rollout, Sequence, Version, VersionSpan
from slipstream.transport import MemoryTransport

VERSION = Version(0, 3)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_every_place_is_one_orchestrators(of, size, steps):
    shares = [Share(number, of) for number in range(of)]
    places = [share.place(own, size) for share in shares for own in range(steps * size)]
    assert sorted(places) == list(range(steps * size * of))
    whole = list(range(of * size))
    assert [item for share in shares for item in share.part(whole)] == whole
    for share in shares:
        assert [share.place(own, size) for own in range(size)] == share.part(whole)


@given(st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 40)))
def test_draws_that_are_used_up_are_nobodys(of, size, used):
    draws = Draws()
    draws.use(sorted(used))
    left = [itertools.takewhile(lambda n: n < 100, Share(n, of).draws(draws.unused(), size)) for n in range(of)]
    parts = [list(part) for part in left]
    assert sorted(n for part in parts for n in part) == [n for n in range(100) if n not in used]
    for number, part in enumerate(parts):
        assert all(n // size % of == number for n in part)


def batch(step, name, reward=1.0, **metrics):
    spans = [VersionSpan(1, f"0.{step - 1}")]
    sequence = Sequence([1, 2], [False, True], [0.0, -0.1], spans)
    return Batch(step, VERSION, [Rollout(name, "t", name, [sequence], reward, "done")], metrics=metrics)


def test_a_batch_of_two_parts():
    first = batch(4, "a", **{"time/generate_s": 2.0, "throughput/rollouts_per_s": 3.0, "rollout/drawn_groups": 1.0})
    second = batch(4, "b", **{"time/generate_s": 5.0, "throughput/rollouts_per_s": 4.0, "rollout/drawn_groups": 3.0})
    first.metrics |= {"idle/engine_s": 3.0, "idle/engine_environment_s": 3.0, "idle/trainer_s": 0.0}
    second.metrics |= {"idle/engine_s": 2.0, "idle/engine_update_s": 2.0, "idle/trainer_s": 4.0}
    first.metrics["reward/drawn_mean"], second.metrics["reward/drawn_mean"] = 0.0, 1.0
    first.dropped, second.dropped = {"timeout": 1, "no_signal": 2}, {"timeout": 3}
    first.draws, second.draws, second.version = [4, 9], [6], Version(0, 2)
    made = join([first, second])
    assert [rollout.id for rollout in made.rollouts] == ["a", "b"]
    assert (made.step, made.version, made.draws) == (4, Version(0, 2), [4, 6, 9])
    assert made.dropped == {"timeout": 4, "no_signal": 2}
    assert made.metrics == {
        "time/generate_s": 5.0,
        "throughput/rollouts_per_s": (2 * 3.0 + 5 * 4.0) / 5,
        "rollout/drawn_groups": 4.0,
        "reward/drawn_mean": 0.25,
        "staleness/mean": 1.0,
        "staleness/max": 1.0,
        "staleness/mixed_fraction": 0.0,
        "staleness/age_0": 0.0,
        "staleness/age_1": 1.0,
        "idle/engine_s": 3.0,
        "idle/engine_environment_s": 3.0,
        "idle/engine_update_s": 0.0,
        "idle/trainer_s": 4.0,
    }
    assert join([first]) is first
    with pytest.raises(ValueError, match="several steps"):
        join([first, batch(5, "c")])


def test_a_part_that_was_taken_waits_for_the_others():
    queues = [MemoryTransport(2), MemoryTransport(2)]
    joined = JoinedBatches(queues)
    queues[0].put(batch(1, "a"), 1.0)
    with pytest.raises(DeadlineError):
        joined.take(0.05)
    queues[1].put(batch(1, "b"), 1.0)
    for queue, name in zip(queues, "cd", strict=True):
        queue.put(batch(2, name), 1.0)
    receipt, made = joined.take(1.0)
    assert [rollout.id for rollout in made.rollouts] == ["a", "b"]
    assert joined.ack(receipt)
    receipt, made = joined.take(1.0)
    assert [rollout.id for rollout in made.rollouts] == ["c", "d"]
    assert joined.ack(receipt)
    assert len(joined) == 0
    queues[0].put(batch(3, "e"), 0.1)
    queues[0].put(batch(4, "f"), 0.1)
    with pytest.raises(DeadlineError):
        queues[0].put(batch(5, "g"), 0.05)


class Scripted(Caller):
    """Answers when it is told to."""

    def __init__(self, up=True, only=False, number=1):
        super().__init__(lambda: False)
        self.sent, self.state, self.number = [], commands.EngineState(up, only), number

    def submit(self, command):
        future = Future()
        self.sent.append((command, future))
        return future

    def activity(self):
        return self.number

    def engine_state(self, *, settles):
        return self.state

    def answer(self, answer):
        self.sent[-1][1].set_result(answer)


def applied(number, mismatched=()):
    report = ApplyReport(VERSION, mismatched=mismatched, num_bytes=5, transfer_s=float(number))
    return commands.Applied(report, {"replica_0/requests": float(number), "rollout/parser_failures": 1.0})


def test_commands_go_to_all_and_their_answers_are_one():
    callers = [Scripted(), Scripted()]
    several = SeveralCallers(callers, 2)
    future = several.submit(commands.Fence())
    callers[1].answer(applied(2, ("w",)))
    assert not future.done()
    callers[0].answer(applied(1))
    made = future.result(1)
    assert made.report.mismatched == ("w (orchestrator 1)",)
    assert made.report.transfer_s == 2.0
    assert made.metrics == {
        "replica_0/requests": 1.0,
        "replica_2/requests": 2.0,
        "rollout/parser_failures": 2.0,
    }
    future = several.submit(commands.SampleProbe())
    for number, caller in enumerate(callers):
        caller.answer(commands.Probed([Sequence([number], [True], [0.0])]))
    assert [sequence.token_ids for sequence in future.result(1).sequences] == [[0], [1]]
    for own, other, expected in ((VERSION, VERSION, VERSION), (VERSION, None, None)):
        future = several.submit(commands.AskHeld())
        callers[0].answer(commands.Held(own))
        callers[1].answer(commands.Held(other))
        assert future.result(1) == commands.Held(expected)
    future = several.submit(commands.AskJoined())
    for caller in callers:
        caller.answer(commands.Joined(3))
    assert future.result(1) == commands.Joined(6)
    future = several.submit(commands.AskHeld())
    callers[0].answer(commands.Held(VERSION))
    callers[1].answer(commands.Joined(1))
    with pytest.raises(TypeError, match="answered Held and Joined"):
        future.result(1)
    assert several.activity() == 2
    several.submit(commands.Evaluate(2))
    assert isinstance(callers[0].sent[-1][0], commands.Evaluate)
    assert isinstance(callers[1].sent[-1][0], commands.AskHeld)


def test_the_first_failure_ends_the_others_work():
    callers = [Scripted(), Scripted(), Scripted()]
    several = SeveralCallers(callers, 1)
    future = several.submit(commands.MakeBatches(0, 3))
    callers[0].answer(commands.Done())
    callers[2].sent[-1][1].set_exception(EngineError("dead"))
    with pytest.raises(EngineError, match="dead"):
        future.result(1)
    assert callers[1].sent[-1][1].cancelled()


def test_who_waits_no_longer_cancels_all():
    callers = [Scripted(), Scripted()]
    several = SeveralCallers(callers, 1)
    several.should_stop = threading.Event().is_set
    with pytest.raises(DeadlineError, match="the engines did not end"):
        several.call(commands.Start(), commands.Done, 0.1, "the engines")
    assert all(caller.sent[-1][1].cancelled() for caller in callers)
    several.should_stop = lambda: True
    with pytest.raises(Interrupted):
        several.call(commands.Start(), commands.Done, 60.0, "the engines")
    assert all(caller.sent[-1][1].cancelled() for caller in callers)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([(True, False), (True, False)], (True, False)),
        ([(True, True), (True, False)], (True, True)),
        ([(True, True), (False, False)], (False, False)),
        ([(True, False), (False, True)], (False, True)),
    ],
)
def test_the_state_of_all_engines(states, expected):
    several = SeveralCallers([Scripted(*state) for state in states], 1)
    assert several.engine_state(settles=False) == commands.EngineState(*expected)
