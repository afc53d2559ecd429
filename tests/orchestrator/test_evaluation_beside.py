"""The trainer's handle of an evaluation that goes on beside training."""

import asyncio

import pytest
from benchmarks.event_loop import call

from slipstream.errors import DeadlineError, EnvironmentFault, Interrupted
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import LocalCaller, Orchestrator, Waits
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.hooks import TrainerHooks
from slipstream.orchestrator.thread import EventLoopThread

from ..waiting import until
from .executors import executor_of


class Hooks(TrainerHooks):
    def __init__(self):
        self.evaluated = []

    def version_evaluated(self, step, evaluation):
        self.evaluated.append((step, evaluation.num_right))


class Beside:
    """An orchestrator that evaluates when it is told to."""

    def __init__(self, wait_s=5.0):
        self.asked, self.held, self.hooks, self.stops, self.failure = [], [], Hooks(), False, None
        self.was_cancelled = False
        self.thread = EventLoopThread(lambda: self.stops)
        self.end = asyncio.Event()
        caller = LocalCaller(self.thread, executor_of(evaluate=self.evaluate))
        waits = Waits(wait_s, wait_s, wait_s)
        self.orchestrator = Orchestrator(caller, publish=None, waits=waits, hooks=self.hooks, hold=self.held.append)

    async def evaluate(self, command):
        self.asked.append(command)
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.failure is not None:
            raise self.failure
        return Evaluation(4, 3, 0, 0.75, 2.0, 0.0)

    def begin(self):
        """Begin an evaluation of step 4, and wait until it goes on."""
        self.orchestrator.begin_evaluation(4)
        until(lambda: self.asked)

    def let_go(self):
        async def done():
            self.end.set()

        call(self.thread, done(), 5, "it")


@pytest.fixture
def beside():
    made = []

    def make(**options):
        made.append(Beside(**options))
        return made[-1]

    yield make
    for each in made:
        assert each.thread.stop(asyncio.sleep(0))


def test_it_is_begun_and_taken_when_it_has_ended(beside):
    one = beside()
    assert one.orchestrator.take_evaluation(waits=True) is None, "none was begun"
    one.orchestrator.begin_evaluation(4)
    assert one.orchestrator.take_evaluation(waits=False) is None
    assert (one.held, one.hooks.evaluated) == ([4], [])
    one.let_go()
    metrics = one.orchestrator.take_evaluation(waits=True)
    assert metrics["eval/accuracy"] == 0.75
    assert 0 < metrics["eval/beside_s"] < 60
    assert one.asked == [commands.Evaluate(4, beside=True)]
    assert (one.held, one.hooks.evaluated) == ([4, None], [(4, 3)])
    assert one.orchestrator.last_evaluation.num_right == 3
    assert one.orchestrator.take_evaluation(waits=True) is None
    assert one.orchestrator.evaluate(6)["eval/accuracy"] == 0.75
    assert one.asked[-1] == commands.Evaluate(6)


def test_its_failure_is_raised_where_it_is_looked_for(beside):
    one = beside()
    one.failure = EnvironmentFault("too many failed")
    one.orchestrator.begin_evaluation(4)
    one.let_go()
    with pytest.raises(EnvironmentFault, match="too many failed"):
        one.orchestrator.take_evaluation(waits=True)


def test_the_wait_for_it_has_a_deadline_and_ends_with_the_run(beside):
    late = beside(wait_s=0.5)
    late.begin()
    with pytest.raises(DeadlineError, match="the evaluation of step 4, beside training did not end within"):
        late.orchestrator.take_evaluation(waits=True)
    stopped = beside()
    stopped.begin()
    stopped.stops = True
    with pytest.raises(Interrupted, match="stopped while waiting for the evaluation of step 4"):
        stopped.orchestrator.take_evaluation(waits=True)
    for each in (late, stopped):
        call(each.thread, asyncio.sleep(0.01), 5, "it", may_stop=False)
        assert each.was_cancelled
