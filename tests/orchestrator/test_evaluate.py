"""An evaluation with several samples a task, and by data source."""

import collections

import msgspec
import pytest

from slipstream.algo.statistics import wilson_interval
from slipstream.errors import IntegrityError
from slipstream.inference.scripted import ScriptedEngine
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.evaluate import MAX_SOURCES, evaluate, vote_of
from slipstream.orchestrator.rollouts import seed_of
from slipstream.records import Task, Version
from slipstream.runlog.samples import sample_id

from .test_orchestrator import END, SAMPLING, TASKS, make_runner


def letters(*sequence):
    """An engine whose answers to each prompt are these letters in turn."""
    asked = collections.Counter()

    def script(prompt, seed):
        asked[prompt[-1]] += 1
        return [ord(sequence[(asked[prompt[-1]] - 1) % len(sequence)]), END]

    return ScriptedEngine(script)


async def test_an_evaluation_of_several_samples_a_task():
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "max_failures": 0.5}
    engine = letters("b", "a", "a", "a")
    requests = []
    engine.on_request = requests.append
    found = await evaluate(make_runner(engine), TASKS, **how, samples_per_task=4)
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
    alone = await evaluate(make_runner(engine), TASKS, **how)
    firsts = {request.seed for request in single}
    assert firsts == {seed_of(0, index) for index in range(3)}, "as in all versions"
    assert firsts == {request.seed for request in requests if request.id.split(".")[1].endswith("-0")}
    assert {name for name in alone.metrics() if "@" in name or "source" in name} == set()
    assert alone.interval == wilson_interval(3, 3)


async def test_majorities_need_answers_and_failures_vote_for_nothing():
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "max_failures": 0.5, "samples_per_task": 4}
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


@pytest.mark.parametrize("samples_per_task", [1, 2, 3])
async def test_every_sample_has_an_id_of_its_own(samples_per_task):
    asked, engine = [], ScriptedEngine(lambda prompt, seed: [ord("b"), END])
    engine.on_request = lambda request: asked.append(request.id)
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "max_failures": 0.5}
    await evaluate(make_runner(engine), TASKS, **how, samples_per_task=samples_per_task)
    assert len(asked) == len(set(asked)) == len(TASKS) * samples_per_task


async def test_an_evaluation_is_told_apart_by_data_source():
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "max_failures": 0.5}
    sources = ("gsm8k", "openai/math", "gsm8k")
    tasks = [
        msgspec.structs.replace(task, info={"data_source": source}) for task, source in zip(TASKS, sources, strict=True)
    ]
    engine = ScriptedEngine(lambda prompt, seed: [ord("baa"[prompt[-1] - ord("0")]), END])
    found = (await evaluate(make_runner(engine), tasks, **how)).metrics()
    assert found["eval/source/gsm8k/accuracy"] == 0.5
    assert found["eval/source/gsm8k/accuracy_low"] == pytest.approx(wilson_interval(1, 2)[0])
    assert (found["eval/source/gsm8k/num_tasks"], found["eval/source/openai/math/num_tasks"]) == (2, 1)
    more = (await evaluate(make_runner(engine), tasks, **how, samples_per_task=2)).metrics()
    assert more["eval/source/gsm8k/best@2"] == 0.5
    many = [Task(f"t{n}", TASKS[0].prompt, None, {"data_source": f"s{n}"}) for n in range(MAX_SOURCES + 3)]
    wide = (await evaluate(make_runner(engine), many, **how)).metrics()
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
        ("\\boxed{1", "1", "1"),
    ],
)
def test_what_a_completion_votes_for(completion, answer, vote):
    assert vote_of(completion, answer) == vote


async def test_a_token_of_another_version_makes_no_figure():
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "max_failures": 0.5, "version": Version(0, 2)}
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
