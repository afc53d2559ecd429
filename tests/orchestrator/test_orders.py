"""Batches in the order of the data, and of the groups that finish first: a scripted engine and a trainer."""

import asyncio
import random

import pytest
from benchmarks.scripted_engine import ScriptedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.draws import Draws
from slipstream.envs.base import Episode
from slipstream.errors import EnvironmentFault
from slipstream.orchestrator.batches.batcher import group_name
from slipstream.orchestrator.batches.dynamic_sampling import Refills
from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.batches.orders import InDataOrder, ReadyFirst
from slipstream.orchestrator.versions import Versions
from slipstream.records import Message, Rollout, Sequence, Task, Version, VersionSpan
from slipstream.runlog.ledger import Ledger, balance
from tests import quick_time
from tests.orchestrator.test_orchestrator import END, Odd, Watching, make_batcher, say, ticket
from tests.quick_time import event_loop_policy  # noqa: F401 (a fixture)

SIZE = 3


def tasks_of_step(step):
    return [Task(f"t{step}.{i}", (Message("user", f"q{step}.{i}"),), "b") for i in range(SIZE)]


class Uneven(ScriptedEngine):
    """An engine whose answers take as long as chance has it."""

    def __init__(self, script, seed=0, longest_s=0.01):
        super().__init__(script)
        self._random, self._longest_s = random.Random(seed), longest_s
        self.num_running = self.most_running = 0

    async def generate(self, request):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        version = self.version
        await asyncio.sleep(self._longest_s * self._random.random() ** 3)
        self.num_running -= 1
        now, self.version = self.version, version  # one version for the whole answer: the one that it began with
        try:
            return await super().generate(request)
        finally:
            self.version = now


def versions_of(engine):
    versions = Versions(engine, apply_timeout_s=1.0)
    versions.allow_in_flight()
    return versions


async def release(versions, step):
    await versions.apply(ticket(step))
    await versions.release(step)


async def train(engine, *, order, staleness, steps, first=0, draws=None, train_s=0.002, overprovision=0.0, **options):
    """All batches of a run whose trainer takes one after the other."""
    versions, batcher = versions_of(engine), make_batcher(engine, staleness=staleness, **options)
    if order == "data":
        batches = InDataOrder(batcher, versions, tasks_of_step)
    else:
        batches = ReadyFirst(batcher, versions, tasks_of_step, SIZE, draws or Draws(), overprovision)
    queue = asyncio.Queue(staleness + 1)
    made = asyncio.create_task(batches.make_all(first, steps, queue.put))
    trained = []
    for step in range(first, steps):
        await release(versions, step)
        taking = asyncio.create_task(queue.get())
        await asyncio.wait({taking, made}, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            await made
        trained.append(await taking)
        await asyncio.sleep(train_s)
    await asyncio.wait_for(made, 1.0)
    return trained


async def test_a_batch_that_begins_early_waits_in_the_engine_and_is_of_the_next_version():
    class Fenced(ScriptedEngine):
        """Answers nothing between a fence and the next version."""

        goes_on = asyncio.Event()

        async def fence(self, timeout_s):
            self.goes_on.clear()

        async def apply(self, ticket, timeout_s):
            report = await super().apply(ticket, timeout_s)
            self.goes_on.set()
            return report

        async def generate(self, request):
            asked.append(request.id)
            await self.goes_on.wait()
            return await super().generate(request)

    asked = []
    engine, queue = Fenced(say("b")), asyncio.Queue(1)
    versions, batcher = Versions(engine, apply_timeout_s=1.0, fence=engine.fence), make_batcher(engine)
    versions.allow_in_flight()
    made = asyncio.create_task(InDataOrder(batcher, versions, tasks_of_step).make_all(0, 2, queue.put))
    await release(versions, 0)
    assert (await queue.get()).step == 0
    asked.clear()
    await versions.begin(1)
    await asyncio.sleep(0.1)
    assert (len(asked), queue.empty()) == (SIZE * 2, True)
    await release(versions, 1)
    batch = await asyncio.wait_for(queue.get(), 1.0)
    assert (batch.step, batch.version, len(asked)) == (1, Version(0, 1), SIZE * 2)
    spans = {span.version for rollout in batch.rollouts for row in rollout.sequences for span in row.versions}
    assert spans == {"0.1"}
    await asyncio.wait_for(made, 1.0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), staleness=st.integers(0, 4), first=st.integers(0, 2))
def test_every_group_is_in_one_batch_and_none_is_too_old(seed, staleness, first):
    steps = first + 7
    draws = Draws(first * SIZE)
    batches = quick_time.run(
        train(Uneven(say("b"), seed, 0.04), order="ready", staleness=staleness, steps=steps, first=first, draws=draws)
    )
    assert [batch.step for batch in batches] == list(range(first, steps))
    assert sorted(n for batch in batches for n in batch.draws) == list(range(first * SIZE, steps * SIZE))
    ids = [rollout.id for batch in batches for rollout in batch.rollouts]
    assert len(set(ids)) == len(ids) == 7 * SIZE * 2
    for batch in batches:
        oldest = min(int(s.version.split(".")[1]) for r in batch.rollouts for q in r.sequences for s in q.versions)
        assert oldest >= batch.step - staleness
        assert batch.step - staleness <= batch.version.step <= oldest
        draws.use(batch.draws)
    assert draws == Draws(steps * SIZE)


class Slow(ScriptedEngine):
    """The completions of every fourth task of the order are never done."""

    def __init__(self):
        super().__init__(say("b"))
        self.hung = self.cancelled = 0

    async def generate(self, request):
        step, place, *_ = map(int, request.id.partition("-")[0].split("."))
        if (step * SIZE + place) % 4 == 0:
            self.hung += 1
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await super().generate(request)


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_with_over_provision_the_last_groups_are_cancelled_and_counted(staleness, tmp_path):
    ledger, engine = Ledger(tmp_path, 0, 0, staleness=staleness, shape={}), Slow()
    making = train(engine, order="ready", staleness=staleness, steps=6, overprovision=1.0, ledger=ledger, train_s=0.02)
    batches = await asyncio.wait_for(making, 30.0)
    ledger.close(6, is_whole=True)
    assert [len(batch.rollouts) for batch in batches] == [2 * SIZE] * 6
    used = [number for batch in batches for number in batch.draws]
    assert sorted(used) == list(range(len(used))), "each draw ends once"
    trained = {rollout.group_id for batch in batches for rollout in batch.rollouts}
    assert len(trained) == 6 * SIZE
    states = {(entry.state, entry.reason): entry.num_groups for entry in balance(tmp_path).entries}
    num_cancelled = sum(batch.metrics.get("rollout/groups_cancelled", 0) for batch in batches)
    assert states.pop(("trained", "")) == 6 * SIZE
    assert states.pop(("cancelled", "surplus")) == num_cancelled > 0
    assert states.pop(("dropped", "surplus"), 0) == sum(
        batch.metrics.get("dropped_groups/surplus", 0) for batch in batches
    )
    assert states == {}
    assert engine.hung == engine.cancelled > 0
    for batch in batches:
        versions = [int(s.version.split(".")[1]) for r in batch.rollouts for q in r.sequences for s in q.versions]
        assert min(versions) >= batch.step - staleness


async def test_an_environment_that_suppresses_its_cancellation_ends_its_group_once_all_the_same(tmp_path):
    class Stubborn(Odd):
        async def run(self, task, policy):
            try:
                return await super().run(task, policy)
            except asyncio.CancelledError:
                return Episode("b")

    ledger = Ledger(tmp_path, 0, 0, staleness=1, shape={})
    making = train(
        Slow(), order="ready", staleness=1, steps=4, overprovision=1.0, ledger=ledger, environment=Stubborn()
    )
    batches = await asyncio.wait_for(making, 30.0)
    ledger.close(4, is_whole=True)
    found = balance(tmp_path)
    assert (found.num("trained"), found.num_open) == (4 * SIZE, 0)
    assert sum(len(batch.draws) for batch in batches) == found.num_begun


async def test_without_staleness_both_orders_make_the_same_batches():
    made = [
        await train(Uneven(lambda prompt, seed: [97 + seed % 5, END]), order=order, staleness=0, steps=4)
        for order in ("data", "ready")
    ]
    rows = [[(r.id, r.completion) for batch in batches for r in batch.rollouts] for batches in made]
    assert rows[0] == rows[1]


async def test_groups_of_several_batches_run_at_once():
    engine = Uneven(say("b"))
    await train(engine, order="ready", staleness=2, steps=6)
    assert engine.most_running == 3 * SIZE * 2
    engine = Uneven(say("b"))
    await train(engine, order="data", staleness=2, steps=6)
    assert engine.most_running == SIZE * 2


async def test_with_all_slots_full_a_batch_is_the_groups_of_one_version():
    """The price of dropping none for its age: from the second version on no batch has a choice."""
    batches = await train(Uneven(say("b"), 3, 0.03), order="ready", staleness=2, steps=7)
    for batch in batches[3:]:
        assert batch.version.step == batch.step - 2
        assert batch.draws == list(range(batch.step * SIZE, (batch.step + 1) * SIZE))


async def test_groups_without_signal_give_their_slots_back_and_are_counted():
    def script(prompt, seed):
        silent = prompt[-1] == ord("1")  # every third task: both completions are right
        return [ord("b") if silent or seed % 2 else ord("c"), END]

    refills = Refills(lambda step, number: [], max_refills=30)
    batches = await train(Uneven(script), order="ready", staleness=1, steps=5, refills=refills)
    for batch in batches:
        groups = {rollout.group_id for rollout in batch.rollouts}
        assert len(groups) == SIZE
        assert not any(group.endswith(".1") for group in groups)
    used = sorted(number for batch in batches for number in batch.draws)
    assert len(used) == len(set(used))
    dropped = sum(batch.dropped.get("no_signal", 0) for batch in batches)
    assert dropped == 2 * (len(used) - 5 * SIZE)
    assert sum(batch.metrics["rollout/drawn_groups"] for batch in batches) == len(used)


async def test_where_nothing_has_signal_the_batches_are_made_and_the_trainer_sees_it():
    refills = Refills(lambda step, number: [], max_refills=2)
    batches = await train(Uneven(say("b")), order="ready", staleness=1, steps=3, refills=refills)
    assert [len(batch.rollouts) for batch in batches] == [2 * SIZE] * 3
    dropped = [batch.dropped.get("no_signal", 0) for batch in batches]  # which batch drops them depends on the load
    assert max(dropped) <= 2 * 2 * SIZE
    assert sum(dropped) > 0


@pytest.mark.parametrize("order", ["data", "ready"])
async def test_the_ledger_knows_while_a_run_goes_on_what_was_trained(order, tmp_path):
    ledger = Ledger(tmp_path, 0, 0, staleness=1, shape={})
    batches = await train(Uneven(say("b")), order=order, staleness=1, steps=6, ledger=ledger)
    found = balance(tmp_path)
    assert found.num("trained") >= 4 * SIZE
    assert found.num("trained", "batched") == found.num_begun == len(batches) * SIZE


async def test_finished_groups_of_an_earlier_attempt_are_used_as_far_as_they_are_in_time(tmp_path):
    """Seven began under version 0, as where groups without signal had given their slots away. Two more are generated
    under it and keep the second batch waiting, so that it has room for one of the four that are left."""
    earlier = Ledger(tmp_path, 0, 0, staleness=1, shape={})
    for number in {*range(3 * SIZE)} - {4, 5}:
        name = group_name(*divmod(number, SIZE))
        sequence = Sequence([1, 1], [False, True], [0.0, 0.0], [VersionSpan(1, "0.0")])
        earlier.begin(name)
        earlier.finish(name, [Rollout(f"{name}.0", "t", name, [sequence], 1.0, "done")])
    earlier._data.close()  # it was killed
    ledger = Ledger(tmp_path, 1, 0, staleness=1, shape={})
    engine = Uneven(say("b"), longest_s=1.0)
    engine._random.random = lambda: 0.7  # all take 0.34 s
    batches = await train(engine, order="ready", staleness=1, steps=4, ledger=ledger)
    ledger.close(4, is_whole=True)
    assert [sorted({r.group_id for r in batch.rollouts}) for batch in batches[:2]] == [
        [group_name(step, place) for place in range(SIZE)] for step in range(2)
    ]
    found = balance(tmp_path)
    assert (found.num("dropped"), found.num("trained"), found.num_open) == (SIZE, 4 * SIZE, 0)


async def test_a_failure_ends_the_making_with_itself():
    with pytest.raises(EnvironmentFault, match="x is not graded"):
        await train(Uneven(say("x")), order="ready", staleness=1, steps=3)


def test_draws_go_on_where_an_earlier_attempt_ended():
    draws = Draws()
    draws.use([0, 2, 5])
    assert draws.state() == {"next": 6, "left": [1, 3, 4]}
    again = Draws.of_state(draws.state())
    unused = again.unused()
    assert [next(unused) for _ in range(5)] == [1, 3, 4, 6, 7]
    again.use([1, 3, 4, 6])
    assert again == Draws(7)
    with pytest.raises(KeyError):
        again.use([1])


def orders_of(batcher, versions):
    return {
        "data": InDataOrder(batcher, versions, tasks_of_step),
        "ready": ReadyFirst(batcher, versions, tasks_of_step, SIZE, Draws()),
    }


@pytest.mark.parametrize("order", ["data", "ready"])
async def test_nothing_begins_before_the_first_version_is_released(order):
    engine, progress, made = ScriptedEngine(say("b")), Watching(), asyncio.Queue()
    versions = versions_of(engine)
    batcher = make_batcher(engine, progress=progress)
    making = asyncio.create_task(orders_of(batcher, versions)[order].make_all(0, 2, made.put))
    await asyncio.sleep(0.02)
    assert (making.done(), engine.num_requests) == (False, 0)
    for step in range(2):
        await release(versions, step)
        assert (await asyncio.wait_for(made.get(), 10)).step == step
    await asyncio.wait_for(making, 10)
    assert progress.told == [("generate", 2 * SIZE), "ended"] * 2


async def test_no_more_groups_run_than_the_batches_need_unless_it_is_asked_for():
    engine, made = Uneven(say("b"), longest_s=0.05), asyncio.Queue()
    versions = versions_of(engine)
    await release(versions, 0)
    await asyncio.wait_for(orders_of(make_batcher(engine), versions)["ready"].make_all(0, 1, made.put), 10)
    assert engine.most_running == 2 * SIZE
    assert len(made.get_nowait().draws) == SIZE


async def test_a_batch_that_waits_for_its_oldest_group_says_so():
    """As soon as there are enough others: of six groups of version 0 one is slow, and so are two of version 1."""

    class Waiting(ScriptedEngine):
        async def generate(self, request):
            if request.group_id in ("0.0", "2.1", "2.2"):
                await let_go.wait()
            return await super().generate(request)

    now, let_go, made, engine = [0.0], asyncio.Event(), asyncio.Queue(), Waiting(say("b"))
    idle = IdleTime(clock=lambda: now[0])
    versions, batcher = versions_of(engine), make_batcher(engine, staleness=1, idle=idle)
    making = asyncio.create_task(orders_of(batcher, versions)["ready"].make_all(0, 3, made.put))
    for step in range(2):
        idle.released(step)
        await release(versions, step)
        if step == 0:
            assert (await asyncio.wait_for(made.get(), 10)).draws == [1, 2, 3]
    while engine.num_requests < 6 * 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)  # by the time of `quick_time`: everything else has gone as far as it can
    now[0] += 7.0
    let_go.set()
    second = await asyncio.wait_for(made.get(), 10)
    assert second.draws == [0, 4, 5]
    assert second.metrics["idle/trainer_oldest_s"] == 7.0
    await release(versions, 2)
    await asyncio.wait_for(making, 10)
