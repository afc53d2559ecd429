"""One of several engines stays on its version for somebody, with scripted engines: what it gets, and how it comes
back."""

import asyncio
import contextlib
import itertools

import msgspec
import pytest

from slipstream.errors import EngineError, WeightsError
from slipstream.orchestrator.concurrency import retry_on_restart
from slipstream.records import Delta, GenerateRequest, SamplingParams

from .test_replicas import Several, ticket, turn

REQUEST = GenerateRequest("e", [1], SamplingParams(max_tokens=4), seed=0, timeout_s=5.0)


def delta(step):
    return msgspec.structs.replace(ticket(step), delta=Delta(ticket(step - 1).version, ()))


class Watched(Several):
    """Remembers which versions each engine took; version 1 is in service."""

    def __init__(self, number=2, **options):
        super().__init__(number, **options)
        self.groups = itertools.count()
        self.taken = [[] for _ in self.engines]
        for engine, taken in zip(self.engines, self.taken, strict=True):
            self.watch(engine, taken)

    def watch(self, engine, taken):
        apply = engine.apply

        async def watched(ticket, timeout_s):
            taken.append(ticket.version.step)
            return await apply(ticket, timeout_s)

        engine.apply = watched

    async def begun(self):
        await self.replicas.apply(ticket(1), 5)
        return self

    async def answers(self, number=4):
        """Which engines answer, of requests that are there at once."""
        self.hold()
        asked = [self.ask(f"{n}", f"{next(self.groups)}") for n in range(number)]
        await turn()
        self.let_go()
        found = await asyncio.gather(*asked)
        return {completion.token_ids[0] for completion in found}


async def test_it_gets_no_requests_and_no_versions_and_then_catches_up_with_the_newest():
    several = await Watched(3).begun()
    async with several.replicas.aside(5) as engine:
        assert engine is several.engines[2], "of those with least to do, the last"
        assert several.replicas.each == tuple(several.engines[:2])
        for step in (2, 3):
            report = await several.replicas.apply(ticket(step), 5)
            assert report.version.step == step
            assert (await engine.generate(REQUEST)).versions[0].version == "0.1"
            assert await several.answers() == {0, 1}
    assert several.taken == [[1, 2, 3], [1, 2, 3], [1, 3]]
    assert await several.answers() == {0, 1, 2}
    assert several.replicas.each == tuple(several.engines)
    # Where no version came meanwhile, it serves at once.
    async with several.replicas.aside(5):
        assert await several.answers() == {0, 1}
    assert await several.answers() == {0, 1, 2}
    assert several.taken[2] == [1, 3]


async def test_the_one_with_least_to_do_is_set_aside_and_its_requests_go_on():
    several = await Watched().begun()
    several.hold()
    running = [several.ask("a", "a"), several.ask("b", "a"), several.ask("c", "b")]
    await turn()
    assert several.asked == [["a", "b"], ["c"]]
    async with several.replicas.aside(5) as engine:
        assert engine is several.engines[1]
        further = several.ask("d", "b")
        await turn()
        assert several.asked == [["a", "b", "d"], ["c"]], "its group moves to another"
        several.let_go()
        assert [made.token_ids for made in await asyncio.gather(*running, further)] == [[0], [0], [1], [0]]


async def test_deltas_are_taken_one_after_the_other_from_the_newest_whole_version_on():
    several = await Watched().begun()
    async with several.replicas.aside(5):
        for step in (2, 3):
            await several.replicas.apply(delta(step), 5)
    assert several.taken[1] == [1, 2, 3]
    async with several.replicas.aside(5):
        for made in (delta(4), ticket(5), delta(6)):
            await several.replicas.apply(made, 5)
    assert several.taken[1] == [1, 2, 3, 5, 6]


async def test_a_delta_is_possible_where_all_but_it_hold_the_same():
    several = Watched()

    async def held(version):
        return version

    several.engines[0].held = lambda: held(ticket(3).version)
    several.engines[1].held = lambda: held(ticket(1).version)
    async with several.replicas.aside(5):
        assert await several.replicas.held() == ticket(3).version
        several.engines[1].back.clear()
        several.engines[1].kill()
        several.replicas._find_dead()
        assert await asyncio.wait_for(several.replicas.held(), 60) == ticket(3).version, "its restart is not waited for"
        several.engines[1].back.set()
    assert await several.replicas.held() is None


async def test_one_that_dies_comes_back_on_its_own_version_and_training_goes_on():
    several = await Watched().begun()
    async with several.replicas.aside(5) as engine:
        await several.replicas.apply(ticket(2), 5)
        engine.kill()
        engine.back.clear()
        assert await several.answers() == {0}
        await several.replicas.apply(ticket(3), 5)
        engine.back.set()
        answer = await retry_on_restart(engine, lambda: engine.generate(REQUEST))
        assert answer.versions[0].version == "0.1"
        assert await several.answers() == {0}
    assert several.taken == [[1, 2, 3], [1, 3]]
    assert await several.answers() == {0, 1}
    assert [kind for kind, _ in several.events] == ["replica_aside", "replica_lost", "engine_restart"]


async def test_one_that_cannot_be_started_again_ends_every_call():
    several = await Watched(max_restarts=0).begun()

    async def work():
        async with several.replicas.aside(5) as engine:
            engine.kill()
            await retry_on_restart(engine, lambda: engine.generate(REQUEST))

    with pytest.raises(EngineError, match=r"inference.max_restarts = 0"):
        await work()


async def test_one_that_does_not_prove_the_newest_version_answers_nothing_until_a_later_one():
    several = await Watched().begun()

    async def work():
        async with several.replicas.aside(5) as engine:
            await several.replicas.apply(ticket(2), 5)
            engine.mismatched = ("w",)

    with pytest.raises(WeightsError, match=r"parameters in the engine differ from published version 0\.2"):
        await work()
    assert await several.answers() == {0}
    several.engines[1].mismatched = ()
    await several.replicas.apply(ticket(3), 5)
    assert await several.answers() == {0, 1}


async def test_a_block_that_is_cancelled_leaves_nothing_and_an_old_version_serves_nobody():
    several = await Watched().begun()

    async def work():
        async with several.replicas.aside(5):
            await asyncio.sleep(600)

    task = asyncio.ensure_future(work())
    await turn()
    await several.replicas.apply(ticket(2), 5)
    # It dies, and is back after the block: still on the old version.
    several.engines[1].back.clear()
    several.engines[1].kill()
    several.replicas._find_dead()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    several.engines[1].back.set()
    await turn()
    assert several.engines[1].is_up
    assert await several.answers() == {0}
    await several.replicas.apply(ticket(3), 5)
    assert several.taken == [[1, 2, 3], [1, 3]]
    assert await several.answers() == {0, 1}


async def test_a_block_that_ends_early_while_an_update_goes_on_leaves_no_old_version_in_service():
    several = await Watched().begun()
    first, second = several.engines
    first.open.clear()
    end = asyncio.Event()

    async def work():
        async with several.replicas.aside(5):
            await end.wait()
            raise ValueError("early")

    working = asyncio.ensure_future(work())
    await turn()
    updating = asyncio.ensure_future(several.replicas.apply(ticket(2), 5))
    await turn()
    end.set()
    with pytest.raises(ValueError, match="early"):
        await working
    first.open.set()
    await updating
    assert second.version == ticket(1).version
    assert await several.answers() == {0}
    await several.replicas.apply(ticket(3), 5)
    assert await several.answers() == {0, 1}


async def test_an_update_waits_for_one_that_catches_up():
    several = await Watched().begun()
    first, second = several.engines
    async with several.replicas.aside(5):
        await several.replicas.apply(ticket(2), 5)
        second.open.clear()
        catching_up = True

        async def update():
            await turn()
            assert second.version == ticket(1).version
            asyncio.get_running_loop().call_soon(second.open.set)
            await several.replicas.apply(ticket(3), 5)
            assert not catching_up

        updating = asyncio.ensure_future(update())
    catching_up = False
    await updating
    assert several.taken == [[1, 2, 3], [1, 2, 3]]
    assert first.version == second.version == ticket(3).version


async def test_an_engine_that_cannot_be_spared_is_not():
    several = await Watched().begun()
    async with several.replicas.aside(5):
        with pytest.raises(EngineError, match=r"none of 1 engines can stay .* use evaluation.beside = false"):
            async with several.replicas.aside(5):
                raise AssertionError("the last one is needed")
    for engine in several.engines:
        engine.is_in_memory_only = True
    with pytest.raises(EngineError, match="none of 2 engines can stay on its version"):
        async with several.replicas.aside(5):
            raise AssertionError("no file holds its weights")
