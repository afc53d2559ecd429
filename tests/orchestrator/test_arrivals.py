"""Groups that programs outside of the run have made: they become batches that are never too old, and nobody starves."""

import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.atropos.environments import Environments
from slipstream.atropos.protocol import RegisterEnv
from slipstream.data.draws import Draws
from slipstream.errors import EnvironmentFault
from slipstream.orchestrator.batches.arrivals import Arrivals
from slipstream.orchestrator.batches.orders import InDataOrder, ReadyFirst
from slipstream.records import Rollout, Sequence, Version

from .. import quick_time
from ..quick_time import event_loop_policy  # noqa: F401 (a fixture)
from ..waiting import Clock
from .test_orchestrator import ScriptedEngine, Task, make_batcher, say, ticket
from .test_orders import Refills, release, versions_of

SIZE, GROUP = 4, 4
BATCH = SIZE * GROUP


def arrivals(**options):
    options = {"capacity": SIZE, "patience_s": 60.0, "whom": "from nobody"} | options
    return Arrivals(lambda: Version(0, 3), **options)


def group(size=2, equal=False):
    return [
        Rollout("", "", "", [Sequence([1, 2], [False, True], [0.0, -0.1])], float(number * (not equal)), "done")
        for number in range(size)
    ]


async def test_groups_are_handed_out_once_and_in_order():
    source, first, second = arrivals(), group(), group()
    source.offer(first, 0)
    waiting = asyncio.create_task(source.take())
    assert (await waiting).rollouts == first
    waiting = [asyncio.create_task(source.take()) for _ in range(2)]
    await asyncio.sleep(0)
    assert (source.num_wanted, source.num_held) == (2, SIZE - 2)
    waiting[0].cancel()
    await asyncio.sleep(0)
    source.offer(second, 1)
    taken = await waiting[1]
    assert (taken.rollouts, taken.step, taken.maker) == (second, 3, 1)
    assert second[0].sequences[0].versions[0].version == "0.3"
    assert (source.num_held, source.num_arrived) == (SIZE, 2)


async def test_a_group_whose_taker_was_cancelled_is_not_lost():
    source = arrivals()
    waiting = asyncio.create_task(source.take())
    await asyncio.sleep(0)
    source.offer(group(3))
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert len((await source.take()).rollouts) == 3


async def test_a_wait_for_groups_ends():
    source = arrivals(patience_s=0.5)
    with pytest.raises(
        EnvironmentFault, match=r"no group of rollouts came for 0.5 s \(environment.run_timeout_s\) from"
    ):
        await source.take()


async def test_time_without_engines_is_no_wait():
    clock = Clock()
    source = arrivals(patience_s=0.01, clock=clock)
    waiting = asyncio.create_task(source.take())
    for _ in range(3):
        await asyncio.sleep(0.02)
        clock.now += 0.009
        source.wait_anew()
    clock.now += 0.009
    await asyncio.sleep(0.02)
    assert not waiting.done()
    clock.now += 0.009
    with pytest.raises(EnvironmentFault):
        await waiting


class Program:
    """As an environment on atroposlib: it begins groups while the answer to its question leaves room."""

    def __init__(self, source, number, sizes, off_policy, chance):
        self.source, self.sizes, self.off_policy, self.chance = source, sizes, off_policy, chance
        self.registered = Environments(BATCH, GROUP)
        self.number, _ = self.registered.register(
            RegisterEnv(max_token_length=9, desired_name=str(number), weight=1.0, group_size=max(sizes))
        )
        self.workers = set()

    async def run(self):
        size = max(self.sizes)
        while True:
            held = [(each.maker, len(each.rollouts)) for each in self.source.held]
            free = self.source.num_held - len(held)
            queue = self.registered.status(self.number, held, free)["queue_size"]
            if queue * size >= self.off_policy * BATCH:
                for worker in self.workers:
                    worker.cancel()
                self.workers = set()
            while len(self.workers) < self.off_policy * BATCH // size - queue:
                worker = asyncio.create_task(self.work())
                self.workers.add(worker)
                worker.add_done_callback(self.workers.discard)
            await asyncio.sleep(0.3)

    async def work(self):
        await asyncio.sleep(self.chance.random() * 0.5)
        equal = self.chance.random() < 0.3
        self.source.offer(group(self.chance.choice(self.sizes), equal), self.number)


async def train(order, staleness, off_policy, sizes, seed, steps=6, refills=None, program=Program):
    """The batches, and why groups were dropped."""
    engine, dropped = ScriptedEngine(say("b")), []
    versions = versions_of(engine)
    source = Arrivals(
        lambda: versions.current,
        capacity=(staleness + 1) * SIZE,
        patience_s=60.0,
        whom="",
        on_drop=lambda reason, rollouts: dropped.append(reason),
        clock=asyncio.get_running_loop().time,
    )
    batcher = make_batcher(engine, staleness=staleness, arrivals=source, refills=refills, group_size=GROUP)
    tasks = [Task(str(number), ()) for number in range(SIZE)]
    made = {
        "data": InDataOrder(batcher, versions, lambda step: tasks),
        "ready": ReadyFirst(batcher, versions, lambda step: tasks, SIZE, Draws()),
    }[order]
    queue = asyncio.Queue(staleness + 1)
    await versions.apply(ticket(0))
    making = asyncio.create_task(made.make_all(0, steps, queue.put))
    running = asyncio.create_task(program(source, 0, sizes, off_policy, random.Random(seed)).run())
    batches = []
    for step in range(steps):
        await release(versions, step)
        async with asyncio.timeout(300):
            taking = asyncio.create_task(queue.get())
            await asyncio.wait({taking, making}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                await making
            batches.append(await taking)
        await asyncio.sleep(random.Random(seed + step).random() * 2)
    await making
    running.cancel()
    return batches, dropped


@settings(max_examples=15, deadline=None)
@given(
    order=st.sampled_from(["data", "ready"]),
    staleness=st.integers(0, 2),
    further=st.integers(0, 2),
    sizes=st.sampled_from([(4,), (3, 5), (1,), (16,), (2, 7, 11)]),
    seed=st.integers(0, 1000),
    has_refills=st.booleans(),
)
def test_batches_of_all_sizes_are_made_and_none_is_too_old(order, staleness, further, sizes, seed, has_refills):
    refills = Refills(lambda step, number: [Task(str(each), ()) for each in range(SIZE)], 2) if has_refills else None
    if order == "ready" and not staleness:
        order = "data"
    batches, dropped = quick_time.run(train(order, staleness, staleness + 1 + further, sizes, seed, refills=refills))
    assert [batch.step for batch in batches] == list(range(6))
    for batch in batches:
        groups = {rollout.group_id for rollout in batch.rollouts}
        assert len(groups) == SIZE or refills is not None
        for rollout in batch.rollouts:
            (span,) = rollout.sequences[0].versions
            assert batch.step - staleness <= int(span.version.split(".")[1]) <= batch.step
    if not further and max(sizes) >= GROUP:
        assert not dropped, "an environment that keeps to the staleness makes nothing in vain"
