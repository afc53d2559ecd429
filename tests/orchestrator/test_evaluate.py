"""An evaluation with several samples a task, and by data source."""

import collections

import msgspec
import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.algo.statistics import wilson_interval
from slipstream.errors import IntegrityError
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.evaluate import (
    MAX_SOURCES,
    evaluate,
    further_metrics,
    is_right,
    refuse_other_versions,
    vote_of,
)
from slipstream.orchestrator.rollouts import seed_of
from slipstream.records import Rollout, Sequence, Task, Version, VersionSpan
from slipstream.runlog.samples import sample_id

from .test_orchestrator import END, SAMPLING, TASKS, make_runner

HOW = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "max_failures": 0.5}


def letters(*sequence):
    """An engine whose answers to each prompt are these letters in turn."""
    asked = collections.Counter()

    def script(prompt, seed):
        asked[prompt[-1]] += 1
        return [ord(sequence[(asked[prompt[-1]] - 1) % len(sequence)]), END]

    return ScriptedEngine(script)


async def test_an_evaluation_of_several_samples_a_task():
    engine = letters("b", "a", "a", "a")
    requests = []
    engine.on_request = requests.append
    found = await evaluate(make_runner(engine), TASKS, **HOW, samples_per_task=4)
    metrics = found.metrics()
    assert (found.num_tasks, len(found.rollouts), found.num_right) == (3, 12, 3)
    names = [rollout.id for rollout in found.rollouts[:5]]
    assert names == ["eval.0-0", "eval.0-1", "eval.0-2", "eval.0-3", "eval.1-0"]
    assert [sample_id(name, 7) for name in names[:2]] == ["eval.7.0-0", "eval.7.0-1"]
    assert sample_id("eval.7.0-1", 7) == "eval.7.0-1"
    assert metrics["eval/accuracy"] == metrics["eval/mean@4"] == 0.25
    assert metrics["eval/accuracy_low"] == metrics["eval/mean@4_low"] < 0.25
    assert metrics["eval/best@2"] == pytest.approx(1 - 0.75**2)
    assert metrics["eval/pass@4"] == 1.0
    assert metrics["eval/samples_per_task"] == 4
    assert metrics["eval/reward/mean@4"] == pytest.approx(metrics["eval/reward"])
    assert len({request.seed for request in requests}) == 12
    answer = commands.Evaluated(found)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=commands.Evaluated) == answer
    # The first samples are those of an evaluation with one.
    single = []
    engine = letters("b")
    engine.on_request = single.append
    alone = await evaluate(make_runner(engine), TASKS, **HOW)
    firsts = {request.seed for request in single}
    assert firsts == {seed_of(0, index) for index in range(3)}, "as in all versions"
    assert firsts == {request.seed for request in requests if request.id.split(".")[1].endswith("-0")}
    assert {name for name in alone.metrics() if "@" in name or "source" in name} == set()
    assert alone.interval == wilson_interval(3, 3)


async def test_majorities_need_answers_and_failures_vote_for_nothing():
    how = HOW | {"samples_per_task": 4}
    open_ended = [msgspec.structs.replace(task, answer=None) for task in TASKS]
    without = await evaluate(make_runner(letters("b", "a")), open_ended, **how)
    assert not any("maj" in name for name in without.metrics())
    found = (await evaluate(make_runner(letters("b", "b", "b", "a")), TASKS, **how)).metrics()
    assert 0.75 < found["eval/maj@4"] < 1.0
    failed = await evaluate(make_runner(letters("b", "b", "x", "a")), TASKS, **how)
    assert failed.num_failed == 3
    lenient = await evaluate(make_runner(letters("b", "b", "x", "a")), TASKS, **{**how, "threshold": -1.0})
    assert lenient.metrics()["eval/mean@4"] == lenient.accuracy == 0.75, "a failed one is wrong whatever the threshold"
    assert failed.metrics()["eval/mean@4"] == 0.5
    assert failed.metrics()["eval/reward/mean@3"] == pytest.approx(failed.mean_reward)


async def test_an_evaluation_is_told_apart_by_data_source():
    sources = ("gsm8k", "openai/math", "gsm8k")
    tasks = [
        msgspec.structs.replace(task, info={"data_source": source}) for task, source in zip(TASKS, sources, strict=True)
    ]
    engine = ScriptedEngine(lambda prompt, seed: [ord("baa"[prompt[-1] - ord("0")]), END])
    found = (await evaluate(make_runner(engine), tasks, **HOW)).metrics()
    assert found["eval/source/gsm8k/accuracy"] == 0.5
    assert found["eval/source/gsm8k/accuracy_low"] == pytest.approx(wilson_interval(1, 2)[0])
    assert (found["eval/source/gsm8k/num_tasks"], found["eval/source/openai/math/num_tasks"]) == (2, 1)
    more = (await evaluate(make_runner(engine), tasks, **HOW, samples_per_task=2)).metrics()
    assert more["eval/source/gsm8k/best@2"] == 0.5
    many = [Task(f"t{n}", TASKS[0].prompt, None, {"data_source": f"s{n}"}) for n in range(MAX_SOURCES + 3)]
    wide = (await evaluate(make_runner(engine), many, **HOW)).metrics()
    assert wide["eval/sources_left_out"] == 3
    assert sum(name.endswith("/accuracy") and "source" in name for name in wide) == MAX_SOURCES


@pytest.mark.parametrize(
    ("completion", "answer", "vote"),
    [
        ("<think>7 or 8</think> It is  8.", "8", "8"),
        ("so \\boxed{1}, no: \\boxed{\\frac{1}{2}}", "1/2", "\\frac{1}{2}"),
        ("1,234.0 apples", "1234", "1234"),
        ("none", "3", None),
        ("<think>3", "3", None),
        (" two  words ", "two words", "two words"),
        ("\\boxed{x  y} of z", "x y", "x y"),
        ("\\boxed{\\text{a} + {b}} }", "?", "\\text{a} + {b}"),
        ("\\boxed{}", "7", ""),
        ("it is 3/4", " -1/2 ", "3/4"),
        ("it is .5", "1,000", "1/2"),
        ("at 3 or 4", "3 or 4", "at 3 or 4"),
        ("\\boxed{1", "1", "1"),
    ],
)
def test_what_a_completion_votes_for(completion, answer, vote):
    assert vote_of(completion, answer) == vote


@pytest.mark.parametrize(
    ("graded_text", "vote"), [("all", "so a, or b? <answer>b</answer>"), ("tag", "b"), ("last_line", "b?")]
)
def test_the_graded_part_of_a_completion_votes(graded_text, vote):
    completion = "so a, or\nb?" if graded_text == "last_line" else "so a, or b? <answer>b</answer>"
    assert vote_of(completion, "b", graded_text) == vote
    assert vote_of("", "b", "tag") is None


async def test_a_token_of_another_version_makes_no_figure():
    how = HOW | {"version": Version(0, 2)}
    engine = letters("b")
    engine.version = Version(0, 2, "d")
    assert (await evaluate(make_runner(engine), TASKS, **how)).accuracy == 1.0
    # It may be another engine than the one of training, which has another version.
    engine.version, other = Version(0, 3, "d"), letters("b")
    other.version = Version(0, 2, "d")
    assert (await evaluate(make_runner(engine), TASKS, **how, engine=other)).accuracy == 1.0
    assert engine.num_requests == len(TASKS)
    with pytest.raises(IntegrityError, match=r"eval.0 of the evaluation of version 0.2 holds tokens of version 0.3:"):
        await evaluate(make_runner(engine), TASKS, **how)
    engine.version = None
    with pytest.raises(IntegrityError, match="holds tokens of version nobody knows which"):
        await evaluate(make_runner(engine), TASKS, **how)


async def test_what_is_said_of_rollouts_that_end_in_several_ways():
    def script(prompt, seed):
        return [*map(ord, {"0": "b", "1": "bbbbbbbb", "2": "x"}[chr(prompt[-1])]), END]

    engine, requests, ended = ScriptedEngine(script), [], []
    engine.on_request = requests.append
    found = await evaluate(make_runner(engine), TASKS, **HOW, on_rollout=lambda: ended.append(1))
    low, high = wilson_interval(1, 3)
    assert found.metrics() == {
        "eval/accuracy": pytest.approx(1 / 3),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/num_tasks": 3.0,
        "eval/num_failed": 1.0,
        "eval/reward": 0.5,
        "eval/length": 3.0,
        "eval/truncated_fraction": pytest.approx(1 / 3),
    }
    assert len(ended) == 3
    assert all(request.is_urgent for request in requests)
    assert sorted(request.group_id for request in requests) == ["eval.0", "eval.1", "eval.2"]


async def test_figures_by_source_are_over_its_own_tasks_and_samples():
    tasks = [
        msgspec.structs.replace(task, info={"data_source": source}) for task, source in zip(TASKS, "ssr", strict=True)
    ]
    answers = {"0": "bb", "1": "ba", "2": "xb"}
    asked = collections.Counter()

    def script(prompt, seed):
        asked[chr(prompt[-1])] += 1
        return [ord(answers[chr(prompt[-1])][asked[chr(prompt[-1])] - 1]), END]

    evaluation = await evaluate(make_runner(ScriptedEngine(script)), tasks, **HOW, samples_per_task=2)
    found = evaluation.metrics()
    assert (found["eval/source/s/accuracy"], found["eval/source/s/reward"]) == (0.75, 0.75)
    assert (found["eval/source/s/mean@2"], found["eval/source/s/pass@2"]) == (0.75, 1.0)
    assert found["eval/source/s/reward/mean@2"] == 0.75
    assert (found["eval/source/r/accuracy"], found["eval/source/r/reward"]) == (0.5, 1.0), "one has no reward"
    assert found["eval/source/r/reward/mean@1"] == 1.0
    assert (found["eval/accuracy"], found["eval/samples_per_task"]) == (pytest.approx(4 / 6), 2)
    assert "eval/source/s/std@2_low" in found
    assert "eval/source/r/std@2_low" not in found, "one task has no interval"
    assert evaluation.interval == (found["eval/mean@2_low"], found["eval/mean@2_high"])
    assert "eval/sources_left_out" not in found


def test_a_sequence_that_nothing_was_sampled_of_is_of_every_version():
    prompt, sampled = (
        Sequence([1, 2], [False, False]),
        Sequence([1, 2], [False, True], versions=[VersionSpan(1, "0.2")]),
    )
    rollout = Rollout("r", "t", "g", [prompt, sampled], 1.0, "done")
    refuse_other_versions([rollout], Version(0, 2))
    with pytest.raises(
        IntegrityError, match=r"rollout r of the evaluation of version 0\.3 holds tokens of version 0\.2"
    ):
        refuse_other_versions([rollout], Version(0, 3))
    mixed = Sequence([1, 2], [True, True], versions=[VersionSpan(0, "0.2"), VersionSpan(1, "0.3")])
    with pytest.raises(IntegrityError, match=r"of the test of version 0\.2 holds tokens of version 0\.2, 0\.3:"):
        refuse_other_versions([Rollout("r", "t", "g", [mixed], 1.0, "done")], Version(0, 2), "the test")


def test_right_is_what_was_graded_and_reaches_the_threshold():
    def of(reward, outcome):
        return Rollout("r", "t", "g", [], reward, outcome)

    assert is_right(of(0.5, "done"), 0.5)
    assert is_right(of(0.5, "truncated"), 0.5)
    assert not is_right(of(0.49, "done"), 0.5)
    assert not is_right(of(1.0, "reward_error"), 0.5)


def test_an_empty_completion_votes_for_nothing():
    """As one whose thinking never ends: the two are of one opinion."""

    def of(completion, reward):
        return Rollout("r", "t", "g", [], reward, "done", completion=completion)

    task = msgspec.structs.replace(TASKS[0], answer="b")
    rollouts = [of("", 0.0), of("<think>", 0.0), of("b", 1.0), of("b", 1.0)]
    assert further_metrics([task], rollouts, 1.0)["eval/maj@4"] == pytest.approx(0.5)
    assert further_metrics([task], [of("b", 1.0)], 1.0) == {}
