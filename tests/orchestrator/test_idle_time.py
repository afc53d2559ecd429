"""What engine and trainer wait for: seconds by reason, by a clock that the test moves."""

import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.versions import Versions
from slipstream.records import Ticket, Version
from tests.orchestrator.executors import executor_of
from tests.waiting import Clock


@pytest.fixture
def clock():
    return Clock(100.0)


def test_each_moment_has_one_reason_on_each_side(clock):
    idle = IdleTime(clock=clock)
    clock.now += 5  # before the first batch nothing is counted
    idle.begin(0)
    with idle.groups:
        clock.now += 1  # rendering, tools or rewards
        with idle.requests:
            clock.now += 10
            with idle.requests, idle.updates:
                clock.now += 2  # no idleness: it has requests
        clock.now += 3
    assert idle.cut(0) == {
        "idle/engine_s": 4.0,
        "idle/trainer_s": 16.0,
        "idle/engine_environment_s": 4.0,
        "idle/trainer_environment_s": 4.0,
        "idle/trainer_generation_s": 12.0,
    }
    clock.now += 20  # the trainer trains
    with idle.updates:
        clock.now += 4
    idle.released(1)
    with idle.groups, idle.requests:
        clock.now += 1
    assert idle.cut(1) == {
        "idle/engine_s": 24.0,
        "idle/trainer_s": 1.0,
        "idle/engine_trainer_s": 20.0,
        "idle/engine_update_s": 4.0,
        "idle/trainer_generation_s": 1.0,
    }


def test_a_batch_that_waits_for_its_oldest_group_and_an_engine_that_starts_again(clock):
    is_up = [True]
    idle = IdleTime(lambda: is_up[0], clock=clock)
    idle.begin(3)
    with idle.groups:
        with idle.requests:
            clock.now += 1
            idle.is_due(True)
            clock.now += 2
            is_up[0] = False  # and its request fails
        clock.now += 4
        is_up[0] = True
        idle.is_due(False)
        with idle.requests:
            clock.now += 8
    assert idle.cut(3) == {
        "idle/engine_s": 4.0,
        "idle/trainer_s": 15.0,
        "idle/engine_restart_s": 4.0,
        "idle/trainer_generation_s": 9.0,
        "idle/trainer_oldest_s": 6.0,
    }


def test_a_trainer_that_has_not_released_the_version_waits_for_nothing(clock):
    idle = IdleTime(clock=clock)
    idle.begin(0)
    assert idle.cut(0) == {"idle/engine_s": 0.0, "idle/trainer_s": 0.0}
    with idle.groups, idle.requests:
        clock.now += 7
    assert idle.cut(1) == {"idle/engine_s": 0.0, "idle/trainer_s": 0.0}, "made ahead, while step 0 is trained"
    clock.now += 1
    idle.released(1)
    clock.now += 1
    idle.released(2)
    clock.now += 1
    assert idle.cut(2) == {
        "idle/engine_s": 3.0,
        "idle/trainer_s": 1.0,
        "idle/engine_trainer_s": 3.0,
        "idle/trainer_generation_s": 1.0,
    }


def test_requests_that_wait_in_the_engine_leave_it_idle(clock):
    idle = IdleTime(clock=clock)
    idle.begin(0)
    idle.cut(0)
    began = clock.now
    idle.hold()
    with idle.groups, idle.requests:
        clock.now += 7
        idle.go_on()
        clock.now += 2
        idle.released(1)
        clock.now += 1
    idle.go_on()
    assert idle.went_on == began + 7, "nothing has waited since"
    assert idle.cut(1) == {
        "idle/engine_s": 7.0,
        "idle/trainer_s": 3.0,
        "idle/engine_trainer_s": 7.0,
        "idle/trainer_generation_s": 3.0,
    }


def test_requests_beyond_the_places_of_the_engine_wait():
    idle = IdleTime(num_places=2)
    with idle.requests, idle.requests, idle.requests:
        assert idle.queues() == {"rollout/requests_open": 3.0, "rollout/requests_waiting": 1.0}
    assert idle.queues() == {"rollout/requests_open": 0.0, "rollout/requests_waiting": 0.0}
    assert IdleTime().queues() == {"rollout/requests_open": 0.0}


async def test_the_executor_tells_of_updates_and_releases(clock):
    engine = ScriptedEngine(lambda prompt, seed: [0])
    idle = IdleTime(clock=clock)
    idle.begin(0)

    async def probe():
        clock.now += 2
        return []

    executor = executor_of(engine, Versions(engine, apply_timeout_s=1.0), probe=probe, idle=idle)
    idle.cut(0)
    await executor.do(commands.Apply(Ticket(Version(0, 1, "d"), "disk", "f", ())))
    await executor.do(commands.SampleProbe())
    await executor.do(commands.Release(1))
    clock.now += 1
    found = idle.cut(1)
    assert found["idle/engine_update_s"] == 2.0
    assert found["idle/trainer_s"] == 1.0
