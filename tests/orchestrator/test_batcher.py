"""The batch of a step: what it counts of all that was generated, what the ledger learns of it, and parts of a batch."""

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from benchmarks.scripted_engine import ScriptedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.launch.generation import drop_metrics
from slipstream.orchestrator.batches.dynamic_sampling import Refills
from slipstream.orchestrator.batches.pace import Generated
from slipstream.orchestrator.batches.share import Share
from slipstream.records import Rollout, Sequence, Version, VersionSpan
from slipstream.runlog import COUNTS, RunLog, read_metrics
from slipstream.runlog.ledger import Ledger, balance
from slipstream.sinks.prometheus import counts_of
from slipstream.trainer.metrics import rollout_metrics, skipped_batch

from ..quick_time import event_loop_policy  # noqa: F401 (a fixture)
from .test_orchestrator import END, TASKS, Odd, Watching, make_batcher, say

VERSION = Version(0, 3)


async def test_each_batch_counts_its_own_tokens_seconds_and_rollouts():
    progress, engine = Watching(), ScriptedEngine(say("b"))
    batcher = make_batcher(engine, progress=progress)
    for step, tasks in ((3, TASKS), (4, TASKS[:1])):
        began = time.monotonic()
        batch = await batcher.make(step, Version(0, step), tasks)
        num = 2 * len(tasks)
        assert batch.metrics["tokens/generated"] == 2 * num
        assert 0 < batch.metrics["time/generate_s"] <= max(0.001, time.monotonic() - began)
        seconds = batch.metrics["time/generate_s"]
        assert batch.metrics["throughput/rollouts_per_s"] == pytest.approx(num / seconds)
        assert batch.metrics["throughput/generated_tokens_per_s"] == pytest.approx(2 * num / seconds)
    assert progress.num_ended == 8


async def test_the_time_of_generation_begins_when_the_engine_goes_on():
    engine = ScriptedEngine(say("b"))
    batcher = make_batcher(engine)

    async def goes_on(request):
        if not engine.num_asked:
            batcher.idle.hold()
            time.sleep(0.3)
            batcher.idle.go_on()
        engine.num_asked += 1
        return await generate(request)

    engine.num_asked, generate, engine.generate = 0, engine.generate, goes_on
    batch = await batcher.make(3, VERSION, TASKS[:1])
    assert batch.metrics["time/generate_s"] < 0.3


async def test_a_group_that_an_earlier_attempt_finished_is_not_made_again(tmp_path):
    earlier = Ledger(tmp_path, 0, 0, staleness=0, shape={})
    sequence = Sequence([1, 1], [False, True], [0.0, 0.0], [VersionSpan(1, "0.3")])
    earlier.begin("3.1")
    earlier.finish("3.1", [Rollout(f"3.1.{n}", "t1", "3.1", [sequence], 1.0, "done") for n in range(2)])
    earlier._data.close()  # it was killed
    progress, engine = Watching(), ScriptedEngine(say("b"))
    asked, engine.version = [], Version(1, 3)
    engine.on_request = lambda request: asked.append(request.group_id)
    batcher = make_batcher(engine, progress=progress, ledger=Ledger(tmp_path, 1, 3, staleness=0, shape={}))
    batch = await batcher.make(3, Version(1, 3), TASKS)
    assert sorted(asked) == ["3.0", "3.0", "3.2", "3.2"]
    assert [rollout.id for rollout in batch.rollouts][2:4] == ["3.1.0", "3.1.1"]
    assert progress.num_ended == 6, "progress counts what is there already"
    assert batch.metrics["tokens/generated"] == 4 * 2
    seconds = batch.metrics["time/generate_s"]
    assert batch.metrics["throughput/generated_tokens_per_s"] == pytest.approx(4 * 2 / seconds)


OUTCOMES = st.sampled_from(["done", "done", "truncated", "reward_error", "environment_error", "engine_error"])
GROUPS = st.lists(st.lists(st.tuples(OUTCOMES, st.integers(0, 5)), min_size=1, max_size=3), max_size=4)
ENDS = st.sampled_from(["batch", "batch", "batch", "no_signal", "surplus"])
BATCHES = st.lists(st.tuples(GROUPS, st.lists(ENDS, min_size=4, max_size=4), st.booleans()), min_size=1, max_size=4)


def rollouts_of(group_id, kinds):
    return [
        Rollout(
            f"{group_id}.{number}", "t", group_id, [Sequence([1] * (size + 1), [False] + [True] * size)], 1.0, outcome
        )
        for number, (outcome, size) in enumerate(kinds)
    ]


@settings(max_examples=15, deadline=None)
@given(GROUPS, BATCHES)
def test_ledger_rows_and_counters_agree_on_what_became_of_every_group_and_token(left, batches):
    with tempfile.TemporaryDirectory() as scratch, RunLog.create(Path(scratch) / "run") as log:
        earlier = Ledger(log.folder, 0, 0, staleness=0, shape={"of": "another run"})
        for number, kinds in enumerate(left):
            earlier.begin(f"9.{number}")
            earlier.finish(f"9.{number}", rollouts_of(f"9.{number}", kinds))
        earlier.close(0)
        drop = lambda reason, tokens: log.count(drop_metrics(reason, tokens))  # noqa: E731
        ledger = Ledger(log.folder, 1, 0, staleness=0, shape={}, on_drop=drop)
        batcher, totals = make_batcher(None, ledger=ledger), Counter()
        log.listeners.append(
            lambda step, row: [totals.update({(name, *labels): n}) for name, labels, n in counts_of(row)]
        )
        for step, (groups, ends, teaches) in enumerate(batches):
            made = [rollouts_of(f"{step}.{number}", kinds) for number, kinds in enumerate(groups)]
            for group in made:
                ledger.begin(group[0].group_id)
                ledger.finish(group[0].group_id, group)
            reasons = {group[0].group_id: end for group, end in zip(made, ends, strict=False) if end != "batch"}
            for group_id, reason in reasons.items():
                ledger.drop(group_id, reason)
            chosen = [group for group in made if group[0].group_id not in reasons]
            batch = batcher.batch(step, Version(1, step), made, chosen, reasons, {}, Generated.of(made, 1.0))
            row = batch.metrics | rollout_metrics(batch)
            log.metrics(step + 1, row if teaches else row | skipped_batch(batch, row) | {"train/skipped": 1.0})
            ledger.trained(step + 1)
        ledger.close(len(batches), is_whole=True)
        rows, entries = read_metrics(log.folder), balance(log.folder).entries
        sums = Counter()
        for row in rows:
            sums.update({name: value for name, value in row.items() if name.startswith(("tokens/", *COUNTS))})
        trained = sum(entry.num_tokens for entry in entries if entry.state == "trained")
        assert trained == sums["tokens/trained"] == totals["tokens_trained",]
        dropped = [entry for entry in entries if entry.state == "dropped"]
        names = {entry.reason.replace(" ", "_"): entry for entry in dropped}
        for group, value in (("dropped_tokens", "num_tokens"), ("dropped_groups", "num_groups")):
            found = {name.partition("/")[2]: number for name, number in sums.items() if name.startswith(f"{group}/")}
            expected = {reason: getattr(entry, value) for reason, entry in names.items()}
            assert {k: n for k, n in found.items() if n} == {k: n for k, n in expected.items() if n}
            counter = {"dropped_tokens": "tokens_dropped", "dropped_groups": "groups_dropped"}[group]
            counted = {labels[0][1]: n for (name, *labels), n in totals.items() if name == counter and n}
            assert counted == {k: n for k, n in found.items() if n}
        assert sum(entry.num_groups for entry in entries) == len(left) + sum(len(groups) for groups, *_ in batches)
        sizes = [
            size for groups in (left, *(groups for groups, *_ in batches)) for kinds in groups for _, size in kinds
        ]
        assert sum(entry.num_tokens for entry in entries) == sum(sizes), "each token is in one entry"


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
    progress = Watching()
    batcher = make_batcher(
        ScriptedEngine(say("b")), refills=refills_of(TASKS * 2), share=Share(number, 3), progress=progress
    )
    batch = await batcher.make(3, VERSION, TASKS[:2])
    assert len(batch.rollouts) == num_rollouts
    assert progress.told == [("generate", 4)]
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
