"""Commands whose answer depends on the engine's state; all others the callers of tests/orchestrator/test_remote get."""

import asyncio
import threading

import pytest

from slipstream.errors import DeadlineError, EngineError
from slipstream.inference import engine
from slipstream.orchestrator.control import commands
from slipstream.records import ParameterSpec, Sequence

from .executors import executor_of

PARAMETERS = (ParameterSpec("w", (2,), "float32", "ff"),)


class Engine:
    """One that lives, and whose `share` fails so."""

    is_in_memory_only = wants_weights = False

    def __init__(self, error=None, *, is_up=True):
        self.error, self.is_up = error, is_up

    async def share(self, parameters, timeout_s):
        raise self.error


@pytest.mark.parametrize("is_up", [True, False])
async def test_an_engine_that_lives_may_say_that_it_cannot_share(is_up):
    executor = executor_of(Engine(EngineError("no such method"), is_up=is_up))
    if is_up:
        assert isinstance(await executor.do(commands.Share(PARAMETERS, 7.0)), commands.NotShared)
    else:
        with pytest.raises(EngineError, match="no such method"):
            await executor.do(commands.Share(PARAMETERS, 7.0))
    with pytest.raises(DeadlineError, match="not in time"):
        await executor_of(Engine(DeadlineError("not in time"))).do(commands.Share(PARAMETERS, 7.0))


@pytest.mark.parametrize("fails", [False, True])
async def test_the_probe_of_a_batch_that_has_begun_is_sampled_with_it(fails):
    class Versions:
        async def begin(self, step):
            pass

    async def probe():
        begun.append(len(begun))
        if fails and len(begun) == 1:
            raise EngineError("its version was given up")
        return [Sequence([len(begun)], [True], [0.0])]

    begun = []
    executor = executor_of(versions=Versions(), probe=probe)
    await executor.do(commands.Begin(1))
    await asyncio.sleep(0)
    assert begun == [0]
    for number in (2, 3) if fails else (1, 2):
        assert (await executor.do(commands.SampleProbe())).sequences[0].token_ids == [number]


async def test_the_state_of_the_engine_is_looked_at_in_another_thread():
    threads = []

    class State:
        is_in_memory_only, wants_weights = True, False

        @property
        def is_up(self):
            threads.append(threading.current_thread())
            return False

    assert await executor_of(State()).do(commands.AskState(settles=False)) == commands.EngineState(False, True)
    assert threading.current_thread() not in threads


async def test_a_dying_engine_gets_a_moment_to_end_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(engine, "_DYING_S", 60.0)
    executor = executor_of(dying := Engine())
    asked = asyncio.create_task(executor.do(commands.AskState(settles=True)))
    await asyncio.sleep(0.05)
    dying.is_up = False
    assert not (await asked).is_up
