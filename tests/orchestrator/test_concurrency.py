"""Requests to an engine that died, or that lives and refuses."""

import asyncio
from types import SimpleNamespace

import pytest

from slipstream.errors import DeadlineError, EngineError
from slipstream.orchestrator import concurrency as module
from slipstream.orchestrator.concurrency import all_of, retry_on_restart


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    return made


class Engine:
    """Is down, and started again by `revive`, after the attempts with these numbers."""

    def __init__(self, *dies):
        self.dies, self.num_restarts, self.num_attempts = dies, 0, 0

    async def revive(self):
        self.num_restarts += self.num_attempts in self.dies


async def attempts_of(engine, clock, answers_at=10**6):
    async def attempt():
        engine.num_attempts += 1
        clock.now += 5.0
        if engine.num_attempts >= answers_at:
            return "answer"
        raise EngineError("out of service")

    return await retry_on_restart(engine, attempt)


@pytest.mark.parametrize(("dies", "num"), [((), 5), ((3,), 8), ((1, 2, 3), 8), ((4, 8), 13)])
async def test_patience_with_an_engine_that_refuses_begins_anew_with_each_restart(dies, num, clock):
    engine = Engine(*dies)
    with pytest.raises(EngineError, match="out of service"):
        await attempts_of(engine, clock)
    assert (engine.num_attempts, engine.num_restarts) == (num, len(dies))


async def test_an_engine_that_answers_in_time_has_answered(clock):
    assert await attempts_of(Engine(), clock, 5) == "answer"
    engine = Engine(1)
    assert await attempts_of(engine, clock, 2) == "answer"
    assert engine.num_restarts == 1


async def test_while_an_engine_refuses_other_work_goes_on(clock):
    seen = []

    async def attempt():
        if len(seen) < 2:
            raise EngineError("not yet")
        return "answer"

    async def other():
        for _ in range(5):
            seen.append(1)
            await asyncio.sleep(0)

    assert await all_of([retry_on_restart(Engine(), attempt), other()]) == ["answer", None]


async def test_an_engine_that_is_late_is_not_asked_again(clock):
    async def attempt():
        engine.num_attempts += 1
        raise DeadlineError("late")

    engine = Engine()
    with pytest.raises(DeadlineError, match="late"):
        await retry_on_restart(engine, attempt)
    assert engine.num_attempts == 1
    assert await all_of([]) == []
