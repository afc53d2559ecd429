"""Requests that the engine gives up: which are tried again, when, how often, and what becomes of the others."""

import asyncio
import math

import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.orchestrator import retries as module
from slipstream.orchestrator.retries import BUDGET, LONGEST_WAIT_S, Retries, wait_s
from tests.orchestrator.test_orchestrator import SAMPLING, TASKS, make_runner, say
from tests.quick_time import event_loop_policy  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)


class Flaky(ScriptedEngine):
    """Gives up the first `times` requests for `cause`."""

    def __init__(self, times, cause, **options):
        super().__init__(say("b"), **options)
        self.requests = []

        def abort(request):
            self.requests.append(request)
            return cause if len(self.requests) <= times else None

        self.abort = abort


def runner_of(engine, most=5, budget_s=60.0, **options):
    told, engine.exhausted = [], []

    def count(values):
        for name in values:
            reason = name.removeprefix("retry/")
            (engine.exhausted if reason == "exhausted" else told).append(reason)

    retries = Retries(most, budget_s, count)
    return make_runner(engine, retries=retries, **options), told


def run(runner, rollout_id="r"):
    return runner.run(TASKS[0], rollout_id=rollout_id, group_id="g", sampling=SAMPLING, seed=7)


def test_waits_double_up_to_their_bound_and_are_the_requests_own(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 1.0)
    for number, bound in enumerate((1, 2, 4, 8, 16, 30, 30), start=1):
        waits = [wait_s(f"3.{place}.0", number) for place in range(200)]
        assert all(bound / 2 <= wait <= bound for wait in waits)
        assert max(waits) - min(waits) > 0.4 * bound
        assert waits == [wait_s(f"3.{place}.0", number) for place in range(200)]
    assert wait_s("r", 10**6) <= LONGEST_WAIT_S
    assert not math.isclose(wait_s("r", 8), wait_s("r", 9))


async def test_the_time_that_a_request_waits_in_a_paused_engine_is_not_counted():
    runner, told = runner_of(Flaky(1, "late"), budget_s=-1.0)
    assert (await run(runner)).outcome == "engine_error"
    runner, told = runner_of(Flaky(1, "late"), budget_s=-1.0)
    runner.idle.went_on = math.inf
    assert (await run(runner)).outcome == "done"
    assert told == ["late"]


@pytest.mark.parametrize("cause", ["late", "refused", "aborted"])
async def test_a_request_that_is_given_up_is_tried_again_with_the_same_seed(cause):
    engine = Flaky(3, cause)
    runner, told = runner_of(engine)
    rollout = await run(runner)
    assert (rollout.outcome, rollout.reward, rollout.error, rollout.num_sampled) == ("done", 1.0, "", 2)
    assert len(rollout.sequences) == 1
    assert told == [cause] * 3
    assert engine.exhausted == []
    assert {request.seed for request in engine.requests} == {7}
    assert len({request.id for request in engine.requests}) == 4
    assert runner.num_ended == 5, "four tries, and the rollout"


@pytest.mark.parametrize("cause", ["invalid", ""])
async def test_what_is_refused_for_good_is_not_tried_again(cause):
    engine = Flaky(1, cause)
    runner, told = runner_of(engine)
    rollout = await run(runner)
    assert (rollout.outcome, len(engine.requests), told, engine.exhausted) == ("engine_error", 1, [], [])
    assert rollout.error == "request r.0-0 was told to fail"


@pytest.mark.parametrize(("most", "tries"), [(5, 6), (1, 2), (0, 1)])
async def test_in_the_end_it_is_an_engine_error_that_says_how_often(most, tries):
    engine = Flaky(100, "late")
    runner, told = runner_of(engine, most)
    rollout = await run(runner)
    assert (rollout.outcome, len(engine.requests), len(told)) == ("engine_error", tries, most)
    assert len(engine.exhausted) == (most > 0), "counted once, and not where there are no further tries"
    assert ("in the last of" in rollout.error) == (most > 0)
    assert rollout.error.endswith(f", in the last of {tries} tries" if most else "was told to fail")
    assert rollout.sequences == []
    assert rollout.num_sampled == 0


@pytest.mark.parametrize(("lasts_s", "tries"), [(300.0, 2), (299.0, 3), (100.0, 6), (150.0, 4), (700.0, 1)])
async def test_no_try_begins_after_the_budget(monkeypatch, lasts_s, tries):
    """A request that is late at its deadline each time has two tries."""
    clock = [0.0]
    monkeypatch.setattr(module, "_clock", lambda: clock[0])

    def pass_time(request):
        clock[0] += lasts_s

    engine = Flaky(100, "late")
    engine.on_request = pass_time
    runner, _ = runner_of(engine, 5, BUDGET * 300.0)
    rollout = await run(runner)
    assert (rollout.outcome, len(engine.requests)) == ("engine_error", tries)
    assert engine.exhausted == ["exhausted"]
    assert clock[0] <= max(lasts_s, (BUDGET + 1) * 300.0)


async def test_an_engine_that_dies_is_not_counted():
    engine = Flaky(1, "refused", max_restarts=1)
    engine.on_request = lambda request: engine.kill() if engine.num_requests == 1 else None
    runner, told = runner_of(engine)
    rollout = await run(runner)
    assert (rollout.outcome, told, engine.num_restarts) == ("done", ["refused"], 1)
    assert runner.num_ended == 3


async def test_the_environments_deadline_does_not_run_meanwhile(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 1.5)
    runner, told = runner_of(Flaky(1, "late"), run_timeout_s=0.5)
    assert (await run(runner)).outcome == "done"
    assert told == ["late"]


async def test_a_rollout_that_is_cancelled_waits_no_longer(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 60.0)
    engine = Flaky(100, "late")
    runner, told = runner_of(engine, 5, 1000.0)
    task = asyncio.create_task(run(runner))
    while not told:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert len(engine.requests) == 1
