"""Several engines as one, with scripted engines: who answers, and what happens when one dies or fails."""

import asyncio

import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.errors import EngineError
from slipstream.inference.replicas import EngineReplicas
from slipstream.records import GenerateRequest, SamplingParams, Ticket, Version


class Slow(ScriptedEngine):
    """Answers when it is told to; says who it is."""

    def __init__(self, number, max_restarts=1, **options):
        super().__init__(lambda prompt, seed: [number], max_restarts=max_restarts, **options)
        self.asked = []
        self.open = asyncio.Event()
        self.open.set()
        self.back = asyncio.Event()
        self.back.set()
        self.is_blank = False
        self.apply_error = None

    async def generate(self, request):
        self.asked.append(request.id)
        while not self.open.is_set() and self.is_alive:
            await asyncio.sleep(0.001)
        self._check_alive()
        return await super().generate(request)

    async def revive(self):
        await self.back.wait()
        if self.is_in_memory_only:
            raise EngineError("no file holds its weights")
        await super().revive()

    async def replace(self):
        await self.back.wait()
        kept, self.is_in_memory_only = self.is_in_memory_only, False
        await super().revive()
        self.is_in_memory_only, self.is_blank = kept, True

    async def apply(self, ticket, timeout_s):
        await self.open.wait()
        if self.apply_error is not None:
            raise self.apply_error
        return await super().apply(ticket, timeout_s)


class Several:
    def __init__(self, number=2, num_places=4, asked_by_others=False, **options):
        self.events = []
        note = lambda kind, **fields: self.events.append((kind, fields))  # noqa: E731
        self.engines = [Slow(n, on_event=note, **options) for n in range(number)]
        self.replicas = EngineReplicas(
            self.engines, num_places=num_places, on_event=note, asked_by_others=asked_by_others
        )

    def hold(self):
        for engine in self.engines:
            engine.open.clear()

    def let_go(self):
        for engine in self.engines:
            engine.open.set()

    def ask(self, name, group="", timeout_s=5.0):
        sampling = SamplingParams(max_tokens=4)
        request = GenerateRequest(name, [1], sampling, seed=0, timeout_s=timeout_s, group_id=group)
        return asyncio.ensure_future(self.replicas.generate(request))

    @property
    def asked(self):
        return [engine.asked for engine in self.engines]


def ticket(step, bridge="disk"):
    return Ticket(Version(0, step, f"digest {step}"), bridge, f"folder-{step}", ())


async def turn():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_go_where_least_is_to_be_done_and_a_group_stays_together():
    several = Several()
    several.hold()
    for group in "abcd":
        for number in range(2):
            several.ask(f"{group}{number}", group)
            await turn()
    assert several.asked == [["a0", "a1", "c0", "c1"], ["b0", "b1", "d0", "d1"]]
    several.let_go()


async def test_a_group_is_divided_when_its_engine_has_no_place_left_and_another_has():
    several = Several(num_places=4)
    several.hold()
    for number in range(10):
        several.ask(f"a{number}", "a")
        await turn()
    assert [len(asked) for asked in several.asked] == [4, 6]
    for number in range(10):
        several.ask(f"b{number}", "b")
        await turn()
    # All are full: a group waits in one piece, where least is to be done.
    assert [len(asked) for asked in several.asked] == [14, 6]
    several.let_go()


async def test_what_a_dead_engine_was_doing_is_done_by_another_while_it_comes_back():
    several = Several()
    first, second = several.engines
    several.hold()
    first.back.clear()
    answers = [several.ask(f"{n}", f"{n}") for n in range(4)]
    await turn()
    first.kill()
    second.open.set()
    assert [completion.token_ids for completion in await asyncio.gather(*answers)] == [[1]] * 4
    assert sorted(second.asked) == ["0", "1", "2", "3"]
    assert several.events == [("replica_lost", {"replica": 0, "num_requests": 2})]
    # Whoever comes meanwhile is answered by the other; afterwards by both.
    assert (await several.ask("meanwhile")).token_ids == [1]
    first.back.set()
    several.let_go()
    await several.replicas.joined()
    assert [kind for kind, _ in several.events] == ["replica_lost", "engine_restart"]
    assert (await several.ask("after")).token_ids == [0]
    assert several.replicas.num_restarts == 1


async def test_when_all_are_dead_requests_wait_for_the_first_that_is_back():
    several = Several()
    for engine in several.engines:
        engine.back.clear()
        engine.kill()
    answer = several.ask("a")
    await turn()
    assert not answer.done()
    several.engines[1].back.set()
    assert (await answer).token_ids == [1]


async def test_an_engine_that_died_too_often_ends_every_call():
    several = Several(max_restarts=0)
    several.engines[0].kill()
    assert (await several.ask("another answers")).token_ids == [1]
    await turn()
    for call in (several.ask("b"), several.replicas.apply(ticket(1), 5), several.replicas.revive()):
        with pytest.raises(EngineError, match=r"inference.max_restarts = 0"):
            await call


async def test_an_engine_that_lives_and_refuses_is_not_asked_again_by_itself():
    several = Several()

    def refuse(request):
        raise EngineError("refused")

    several.engines[0].on_request = refuse
    with pytest.raises(EngineError, match="refused"):
        await several.ask("a")
    assert several.asked == [["a"], []]


async def test_no_request_begins_before_every_engine_has_proved_the_version():
    several = Several()
    first, second = several.engines
    second.open.clear()
    applying = asyncio.ensure_future(several.replicas.apply(ticket(1), 5))
    await turn()
    assert first.version == ticket(1).version
    waiting = several.ask("waits")
    await turn()
    assert several.asked == [[], []]
    second.open.set()
    report = await applying
    assert (report.version, report.mismatched) == (ticket(1).version, ())
    assert (await waiting).versions[0].version == "0.1"


async def test_after_a_failed_update_nobody_answers_until_a_version_is_proved():
    several = Several()
    several.engines[1].apply_error = EngineError("half of it is there")
    with pytest.raises(EngineError, match="half of it"):
        await several.replicas.apply(ticket(1), 5)
    with pytest.raises(EngineError, match="no engine is in service"):
        await several.ask("a")
    several.engines[1].apply_error = None
    await several.replicas.apply(ticket(2), 5)
    assert (await several.ask("b")).versions[0].version == "0.2"


async def test_one_that_holds_other_weights_is_named_and_stays_out_of_service():
    several = Several()
    several.engines[1].mismatched = ("w",)
    report = await several.replicas.apply(ticket(1), 5)
    assert report.mismatched == ("w (replica 1)",)
    assert {tuple((await several.ask(str(n))).token_ids) for n in range(3)} == {(0,)}


async def test_without_files_a_dead_engine_waits_for_the_next_version():
    several = Several()
    first, second = several.engines
    for engine in several.engines:
        engine.is_in_memory_only = True
    first.kill()
    assert (await several.ask("a")).token_ids == [1]
    assert await several.replicas.joined() == 1
    assert first.is_blank
    assert {tuple((await several.ask(str(n))).token_ids) for n in range(3)} == {(1,)}
    await several.replicas.apply(ticket(1, "broadcast"), 5)
    assert {tuple((await several.ask(str(n), timeout_s=1)).token_ids) for n in range(1)} == {(0,)}
    # When the last one that had the weights dies, nobody has them.
    first.kill()
    second.kill()
    with pytest.raises(EngineError, match="no file holds its weights"):
        await several.replicas.revive()
    with pytest.raises(EngineError, match="no file holds its weights"):
        await several.ask("b")


@pytest.mark.parametrize("notices", ["a request", "the update"])
@pytest.mark.parametrize("number", [1, 2])
async def test_without_files_engines_that_all_die_in_an_update_wait_for_its_repetition(number, notices):
    several = Several(number)
    await several.replicas.apply(ticket(1, "broadcast"), 5)
    for engine in several.engines:
        engine.is_in_memory_only = True
    several.hold()
    asked = several.ask("before", timeout_s=30.0) if notices == "a request" else None
    await turn()
    update = asyncio.ensure_future(several.replicas.apply(ticket(2, "broadcast"), 5))
    await turn()
    for engine in several.engines:
        engine.kill()
    if asked is not None:
        async with asyncio.timeout(60):
            while not all(engine.is_alive for engine in several.engines):  # it looks again, and has them started
                await asyncio.sleep(0.001)
        assert not asked.done()
        for engine in several.engines:
            engine.apply_error = EngineError("no file holds its weights")  # those of the process that died
    several.let_go()
    with pytest.raises(EngineError, match="no file holds its weights"):
        await update
    for engine in several.engines:
        engine.apply_error = None
    during = several.ask("during", timeout_s=30.0)
    assert not several.replicas.is_up, "the run sees that one died, and repeats"
    assert await several.replicas.joined() == number
    assert all(engine.is_blank for engine in several.engines)
    await turn()
    assert not during.done()
    assert not several.replicas.is_up, "they have no weights yet"
    await several.replicas.apply(ticket(2, "broadcast"), 5)
    assert several.replicas.is_up
    for answer in filter(None, (asked, during)):
        assert [span.version for span in (await answer).versions] == ["0.2"]
    # Where no update is under way, nobody has them.
    for engine in several.engines:
        engine.kill()
    with pytest.raises(EngineError, match="no file holds its weights"):
        await several.ask("later")


@pytest.mark.parametrize("asked_by_others", [False, True])
async def test_a_server_that_is_back_waits_for_a_version_unless_the_others_cannot_replace_it(asked_by_others):
    several = Several(asked_by_others=asked_by_others)
    for engine in several.engines:
        engine.is_server = True
    await several.replicas.apply(ticket(2, "broadcast"), 5)
    several.engines[0].kill()
    await several.replicas.revive()
    while not several.engines[0].is_alive:
        await turn()
    await turn()
    assert len(several.replicas.each) == 1
    assert several.replicas.wants_weights == asked_by_others
    await several.replicas.apply(ticket(2, "broadcast"), 5)
    assert len(several.replicas.each) == 2
    assert not several.replicas.wants_weights


async def test_metrics_are_of_each_engine_and_since_the_last_call():
    several = Several()
    await asyncio.gather(*(several.ask(str(n), str(n)) for n in range(4)))
    metrics = several.replicas.take_metrics()
    assert metrics["replica_0/requests"] + metrics["replica_1/requests"] == 4
    assert metrics["replica_0/tokens_per_s"] > 0
    later = several.replicas.take_metrics()
    assert all(0 < later.pop(f"replica_{number}/idle_s") < 60 for number in range(2))
    assert later == {f"replica_{number}/{name}": 0.0 for number in (0, 1) for name in ("requests", "restarts")}


async def test_a_delta_is_possible_only_where_all_hold_the_same():
    several = Several()
    several.engines[0].held = several.engines[1].held = lambda: _answer(Version(0, 3, "d"))
    assert await several.replicas.held() == Version(0, 3, "d")
    several.engines[1].held = lambda: _answer(None)
    assert await several.replicas.held() is None


async def _answer(value):
    return value
