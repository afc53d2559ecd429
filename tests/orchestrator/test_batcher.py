"""The batch of a step: what it counts of all that was generated, what the ledger learns of it, and parts of a batch."""

import asyncio
import time

import msgspec
import pytest

from slipstream.errors import TrainingError
from slipstream.inference.scripted import ScriptedEngine
from slipstream.orchestrator.batches.batcher import Batcher
from slipstream.orchestrator.batches.dynamic_sampling import Refills
from slipstream.orchestrator.batches.share import Share
from slipstream.orchestrator.hooks import Hooks
from slipstream.records import Rollout, Sequence, Version, VersionSpan
from slipstream.runlog.ledger import Ledger, balance

from ..quick_time import event_loop_policy  # noqa: F401 (a fixture)
from .test_orchestrator import END, SAMPLING, TASKS, Odd, make_batcher, make_runner, say

VERSION = Version(0, 3)


class Counting(Hooks):
    """Counts what it is told."""

    def __init__(self):
        self.rounds, self.num_ended = [], 0

    def round_began(self, num_rollouts):
        self.rounds.append(num_rollouts)

    def rollout_ended(self):
        self.num_ended += 1


async def test_each_batch_counts_its_own_tokens_seconds_and_rollouts():
    hooks, engine = Counting(), ScriptedEngine(say("b"))
    batcher = make_batcher(engine, hooks=hooks)
    for step, tasks in ((3, TASKS), (4, TASKS[:1])):
        began = time.monotonic()
        batch = await batcher.make(step, Version(0, step), tasks)
        num = 2 * len(tasks)
        assert batch.metrics["tokens/generated"] == 2 * num
        assert 0 < batch.metrics["time/generate_s"] <= max(0.001, time.monotonic() - began)
        seconds = batch.metrics["time/generate_s"]
        assert batch.metrics["throughput/rollouts_per_s"] == pytest.approx(num / seconds)
        assert batch.metrics["throughput/generated_tokens_per_s"] == pytest.approx(2 * num / seconds)
    assert hooks.num_ended == 8


async def test_a_group_that_an_earlier_attempt_finished_is_not_made_again(tmp_path):
    earlier = Ledger(tmp_path, 0, 0, staleness=0, shape={})
    sequence = Sequence([1, 1], [False, True], [0.0, 0.0], [VersionSpan(1, "0.3")])
    earlier.begin("3.1")
    earlier.finish("3.1", [Rollout(f"3.1.{n}", "t1", "3.1", [sequence], 1.0, "done") for n in range(2)])
    earlier._data.close()  # it was killed
    hooks, engine = Counting(), ScriptedEngine(say("b"))
    asked, engine.version = [], Version(1, 3)
    engine.on_request = lambda request: asked.append(request.group_id)
    batcher = make_batcher(engine, hooks=hooks, ledger=Ledger(tmp_path, 1, 3, staleness=0, shape={}))
    batch = await batcher.make(3, Version(1, 3), TASKS)
    assert sorted(asked) == ["3.0", "3.0", "3.2", "3.2"]
    assert [rollout.id for rollout in batch.rollouts][2:4] == ["3.1.0", "3.1.1"]
    assert hooks.num_ended == 6, "progress counts what is there already"
    assert batch.metrics["tokens/generated"] == 4 * 2


def refills_of(tasks, most=1):
    return Refills(lambda step, number: tasks, most)


async def test_the_ledger_learns_of_groups_that_are_left_out(tmp_path):
    def one_has_signal(prompt, seed):
        return [ord("b") if prompt[-1] == ord("0") or seed % 2 else ord("a"), END]

    ledger = Ledger(tmp_path, 0, 0, staleness=0, shape={})
    refills = Refills(lambda step, number: TASKS, 0)
    batcher = make_batcher(ScriptedEngine(one_has_signal), ledger=ledger, refills=refills)
    batch = await batcher.make(3, VERSION, TASKS)
    num_kept = len({rollout.group_id for rollout in batch.rollouts})
    ledger.close(4, is_whole=True)
    found = balance(tmp_path)
    assert found.num("dropped") == 3 - num_kept >= 1
    assert {(e.state, e.reason) for e in found.entries} == {("trained", ""), ("dropped", "no_signal")}


@pytest.mark.parametrize(("number", "num_rollouts"), [(0, 4), (1, 0), (2, 0)])
async def test_where_nothing_has_signal_the_first_part_alone_is_no_empty_one(number, num_rollouts):
    hooks = Counting()
    batcher = make_batcher(ScriptedEngine(say("b")), refills=refills_of(TASKS * 2), share=Share(number, 3), hooks=hooks)
    batch = await batcher.make(3, VERSION, TASKS[:2])
    assert len(batch.rollouts) == num_rollouts
    assert hooks.rounds == [4]
    assert batch.metrics["rollout/drawn_groups"] == 4


async def test_without_refills_too_the_groups_with_signal_are_counted():
    """Of the rollouts that can be trained on: one that failed has a reward of 0, which is none."""

    def script(prompt, seed):
        asked.append(prompt[-1])
        return [ord({"0": "bx", "1": "ba"}[chr(prompt[-1])][asked.count(prompt[-1]) - 1]), END]

    asked = []
    tasks = [msgspec.structs.replace(task, info={"data_source": task.id}) for task in TASKS[:2]]
    batcher = make_batcher(ScriptedEngine(script), max_reward_failures=0.5)
    metrics = (await batcher.make(3, VERSION, tasks)).metrics
    assert (metrics["task/t0/signal_groups"], metrics["task/t1/signal_groups"]) == (0, 1)
    assert (metrics["task/t0/dropped"], metrics["task/t1/dropped"]) == (1, 0)


async def test_the_teacher_scores_what_can_be_trained_on():
    class Teacher:
        async def score(self, rollout):
            scored.append(rollout.id)

    scored = []
    engine = ScriptedEngine(lambda prompt, seed: [ord("x" if prompt[-1] == ord("2") else "b"), END])
    batcher = make_batcher(engine, max_reward_failures=0.5, teacher=Teacher())
    batch = await batcher.make(3, VERSION, TASKS)
    assert sorted(scored) == [rollout.id for rollout in batch.rollouts]
    assert len(scored) == 4


async def test_a_group_renders_its_prompt_once(monkeypatch):
    rendered = []
    batcher = make_batcher(ScriptedEngine(say("b")))
    tokenizer = batcher.runner.tokenizer
    render = tokenizer.render
    monkeypatch.setattr(tokenizer, "render", lambda messages: rendered.append(messages) or render(messages))
    await batcher.make(3, VERSION, TASKS)
    assert len(rendered) == len(TASKS)


async def test_a_group_that_is_given_up_is_graded_no_further():
    class Ranked(Odd):
        scores_groups = True

        async def score_group(self, task, episodes):
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

    begun, ended = asyncio.Event(), asyncio.Event()
    batcher = make_batcher(ScriptedEngine(say("b")), environment=Ranked())
    making = asyncio.create_task(batcher.make(3, VERSION, TASKS[:1]))
    await asyncio.wait_for(begun.wait(), 10)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await asyncio.wait_for(ended.wait(), 10)


async def test_unless_told_otherwise_a_token_of_an_older_version_is_too_old():
    engine = ScriptedEngine(say("b"))
    engine.version = Version(0, 2)
    batcher = Batcher(make_runner(engine), 2, SAMPLING, 0, max_reward_failures=0.0, needs_logprobs=True)
    with pytest.raises(TrainingError, match=r"training\.staleness = 0"):
        await batcher.make(3, VERSION, TASKS)
