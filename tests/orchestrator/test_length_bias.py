"""Without faults the lengths that are trained on are those that were started, however long some of them take."""

import asyncio
import random
from collections import Counter

import pytest
from benchmarks.scripted_engine import ScriptedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.draws import Draws
from slipstream.orchestrator.batches.orders import ReadyFirst
from slipstream.records import Message, SamplingParams, Task
from slipstream.runlog.ledger import Ledger, balance
from tests import quick_time
from tests.orchestrator.test_orchestrator import END, make_batcher
from tests.orchestrator.test_orders import release, versions_of
from tests.quick_time import event_loop_policy  # noqa: F401 (a fixture)

SIZE, STEPS, LONGEST = 4, 12, 400
OPEN = ("running", "ready", "batched")


class LogNormal(ScriptedEngine):
    """Completions of log-normal lengths, as each request's seed has it; a token takes 50 us."""

    def __init__(self):
        super().__init__(lambda prompt, seed: [ord("b")] * (self.length(seed) - 1) + [END])
        self.started = Counter()

    @staticmethod
    def length(seed):
        return 1 + min(LONGEST, round(random.Random(seed).lognormvariate(2.5, 1.2)))

    async def generate(self, request):
        length, version = self.length(request.seed), self.version
        self.started[length] += 1
        await asyncio.sleep(5e-5 * length)
        now, self.version = self.version, version
        try:
            return await super().generate(request)
        finally:
            self.version = now


def tasks_of_step(step):
    return [Task(f"t{step}.{i}", (Message("user", f"q{step}.{i}"),), "b") for i in range(SIZE)]


async def run(engine, folder, *, seed, staleness, steps, taken, overprovision=0.0):
    """A run of `steps` whose trainer takes the first `taken` batches; returns these."""
    versions, ledger = versions_of(engine), Ledger(folder, 0, 0, staleness=staleness, shape={})
    batcher = make_batcher(engine, staleness=staleness, ledger=ledger)
    batcher.seed, batcher.sampling = seed, SamplingParams(max_tokens=2 * LONGEST, stop_token_ids=(END,))
    batches = ReadyFirst(batcher, versions, tasks_of_step, SIZE, Draws(), overprovision)
    queue = asyncio.Queue(staleness + 1)
    making = asyncio.create_task(batches.make_all(0, steps, queue.put))
    trained = []
    for step in range(taken):
        await release(versions, step)
        await asyncio.sleep(1e-3)  # a step takes the trainer some time
        trained.append(await asyncio.wait_for(queue.get(), 30.0))
    found = balance(folder)
    if taken == steps:
        await asyncio.wait_for(making, 30.0)
    making.cancel()
    await asyncio.wait([making])
    ledger.close(taken, is_whole=taken == steps)
    return trained, found


def lengths_of(batches):
    return Counter(rollout.num_sampled for batch in batches for rollout in batch.rollouts)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 20), staleness=st.sampled_from([1, 2]))
def test_a_whole_run_trains_on_exactly_what_it_started(tmp_path_factory, seed, staleness):
    engine, folder = LogNormal(), tmp_path_factory.mktemp("run")
    batches, _ = quick_time.run(run(engine, folder, seed=seed, staleness=staleness, steps=STEPS, taken=STEPS))
    assert lengths_of(batches) == engine.started
    assert sum(engine.started.values()) == STEPS * SIZE * 2
    found = balance(folder)
    assert [(entry.state, entry.num_groups) for entry in found.entries] == [("trained", STEPS * SIZE)]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 20), staleness=st.sampled_from([1, 2]), taken=st.integers(3, STEPS))
def test_at_any_time_what_was_started_is_trained_on_or_still_open(tmp_path_factory, seed, staleness, taken):
    engine, folder = LogNormal(), tmp_path_factory.mktemp("run")
    batches, found = quick_time.run(run(engine, folder, seed=seed, staleness=staleness, steps=99, taken=taken))
    trained = lengths_of(batches)
    assert trained <= engine.started
    still_open = sum((engine.started - trained).values())
    assert still_open <= 2 * (staleness + 1) * SIZE, "no more than the slots hold"
    assert {entry.state for entry in found.entries} <= {"trained", *OPEN}, "none was dropped or cancelled"
    after = {(entry.state, entry.reason) for entry in balance(folder).entries}
    assert after <= {("trained", ""), ("batched", ""), ("ready", ""), ("cancelled", "run ended")}
    # From the second version on a batch is the groups of one version, so that no length waits for later batches.
    full = batches[staleness + 1 :]
    assert all(batch.draws == [*range(batch.step * SIZE, (batch.step + 1) * SIZE)] for batch in full)


@pytest.mark.parametrize("seed", range(3))
async def test_over_provision_trains_on_shorter_completions_than_it_starts(tmp_path, seed):
    """What the two tests above would find."""
    engine = LogNormal()
    run_of = run(engine, tmp_path, seed=seed, staleness=1, steps=STEPS, taken=STEPS, overprovision=0.5)
    batches, _ = await run_of
    trained, started = lengths_of(batches), engine.started
    assert trained < started

    def mean(lengths):
        return sum(length * number for length, number in lengths.items()) / sum(lengths.values())

    assert mean(trained) < mean(started)
