"""Rubrics: weights, metrics of all parts, parts that do not apply, coroutines; in run files and from Python."""

import asyncio
import json
import math

import pytest
from tests.inline_scorer import InlineScorer

from slipstream.config.python_objects import give
from slipstream.config.schema import EnvironmentConfig
from slipstream.envs import Score
from slipstream.envs.base import RewardFailed
from slipstream.envs.from_python import load_python_environment, pack_environment
from slipstream.envs.registry import load_environment
from slipstream.envs.rewards import NotApplicable, Rubric, named
from slipstream.envs.rewards.contract import settled
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError
from slipstream.records import Message, Task

TASK = Task("t", (Message("user", "?"),), "12", {"data_source": "a"})
STYLE = """
def style(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str.endswith(".")), "length": len(solution_str)}

async def slow(data_source, solution_str, ground_truth, extra_info):
    return 0.5

def maybe(completions, **kwargs):
    return [None if "?" in each[0]["content"] else 1.0 for each in completions]

def never(completions, **kwargs):
    return [None for _ in completions]

def raises(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("x")
"""


def ends(task, completion):
    return {"reward": float(completion.endswith(".")), "length": len(completion)}


async def later(task, completion):
    await asyncio.sleep(0)
    return 0.5


@pytest.fixture
def file(tmp_path):
    (tmp_path / "style.py").write_text(STYLE)
    return tmp_path / "style.py"


def test_parts_are_weighted_and_all_of_them_are_metrics():
    rubric = Rubric(("number", 1.0), (ends, 0.25, "style"))
    assert rubric(TASK, "It is 12.") == Score(1.25, {"number": 1.0, "style": 1.0, "style/length": 9.0})
    assert rubric(TASK, "12") == Score(1.0, {"number": 1.0, "style": 0.0, "style/length": 2.0})
    assert rubric(TASK, "<think>3.</think>It is 13.").reward == 0.25
    assert rubric(TASK, "<think>12").metrics == {
        "number": 0.0,
        "number/unclosed_thinking": 1.0,
        "style": 0.0,
        "style/unclosed_thinking": 1.0,
    }
    assert Rubric("exact", ("number", -1.0))(TASK, "12") == Score(0.0, {"exact": 1.0, "number": 1.0})


async def test_coroutines_run_at_once():
    rubric = Rubric("number", (later, 2.0), (later, 2.0, "again"))
    assert await rubric(TASK, "12") == Score(3.0, {"number": 1.0, "later": 0.5, "again": 0.5})


def test_parts_that_do_not_apply_are_left_out(file):
    rubric = named([{"reward": "number"}, {"reward": f"trl:{file}:maybe", "weight": 0.5}])
    assert rubric(TASK, "12") == Score(1.5, {"number": 1.0, "maybe": 1.0})
    assert rubric(TASK, "12?") == Score(1.0, {"number": 1.0, "maybe/not_applicable": 1.0})
    with pytest.raises(NotApplicable, match="no part of the rubric never applies"):
        named([f"trl:{file}:never"])(TASK, "12")
    assert issubclass(NotApplicable, RewardFailed)


def test_a_part_that_raises_fails_the_whole(file):
    with pytest.raises(KeyError):
        named(["number", f"{file}:raises"])(TASK, "12")


async def test_groups_are_graded_part_by_part(file):
    rubric = named([{"reward": "number"}, {"reward": f"trl:{file}:maybe", "weight": 0.5}])
    scores = await rubric.score_group(TASK, ["12", "12?", "1"])
    assert [score.reward for score in scores] == [1.5, 1.0, 0.5]
    with pytest.raises(NotApplicable):
        await named([f"trl:{file}:never"]).score_group(TASK, ["12"])


@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        ([], "rubric has no part"),
        ([{"reward": "number"}, {"reward": "number"}], "two parts that are called 'number'"),
        ([{"reward": "nmber"}], r"rubric\[0\].reward = 'nmber' is not a reward"),
        ([{"reward": "number", "wieght": 1}], r"rubric\[0\]: .*unknown field `wieght`: a part has reward, weight"),
        ([{"reward": "number", "weight": "much"}], r"rubric\[0\]: .*Expected `float`"),
        ([{"reward": "number", "weight": math.inf}], "the weight of 'number' is inf"),
        ([{"weight": 1.0}], r"rubric\[0\]: .*missing required field `reward`"),
    ],
)
def test_wrong_rubrics(tmp_path, rubric, said):
    with pytest.raises(ConfigError, match=said):
        load_environment(EnvironmentConfig(name="rows", settings={"path": str(tmp_path), "rubric": rubric}))


def test_a_rubric_and_a_reward(tmp_path):
    for more, said in (({"reward": "exact"}, "reward and rubric: keep one"), ({}, "rubric is not a list")):
        settings = {"path": str(tmp_path), "rubric": ["number"] if more else {"a": 1}, **more}
        with pytest.raises(ConfigError, match=said):
            load_environment(EnvironmentConfig(name="rows", settings=settings))


async def test_in_a_run_file(tmp_path, file):
    rows = [{"question": f"{n}?", "answer": str(n), "data_source": "b" if n % 2 else "a"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = [{"reward": "number"}, {"reward": f"{file}:style", "weight": 0.2}, {"reward": f"{file}:slow", "weight": 0}]
    config = EnvironmentConfig(name="rows", settings={"path": str(tmp_path / "rows.jsonl"), "rubric": parts})
    found = load_environment(config).tasks("train", 2)[1]
    async with ScorerPool(config) as scorer:
        score = await scorer.score(found, f"{found.answer}.")
    assert score == Score(1.2, {"number": 1.0, "style": 1.0, "style/length": len(found.answer) + 1.0, "slow": 0.5})
    # Beside other rewards, by data source.
    table = {"a": "exact", "b": parts[:2]}
    environment = load_environment(
        EnvironmentConfig(name="rows", settings={"path": str(tmp_path / "rows.jsonl"), "reward": table})
    )
    by_source = {each.info["data_source"]: each for each in environment.tasks("train", 10)}
    rewards = {source: environment.score(each, f"{each.answer}.").reward for source, each in by_source.items()}
    assert rewards == {"a": 0.0, "b": 1.2}


@pytest.mark.quick("object")
@pytest.mark.parametrize("form", ["object", "parts", "in the file"])
async def test_from_python_in_workers(file, form):
    rows = [{"question": f"{n}?", "answer": n} for n in range(40)]
    parts = ["number", {"reward": f"{file}:style", "weight": 0.2}]
    reward = {"object": Rubric("number", (ends, 0.2, "style")), "parts": parts, "in the file": named(parts)}[form]
    packed = pack_environment(rows, reward=reward)
    assert pack_environment(rows, reward=reward).name == packed.name
    assert pack_environment(rows, reward=Rubric("number")).name != packed.name
    give(packed)
    environment = load_python_environment(packed.name, 0, {})
    found = environment.tasks("train", 1)[0]
    async with ScorerPool(EnvironmentConfig(name=packed.name)) as scorer:
        score = await scorer.score(found, f"<think>7</think>{found.answer}.")
    assert score.reward == 1.2
    assert set(score.metrics) == {"number", "style", "style/length"}


SIGNATURES = """
def own(task, completion): return {"reward": float(completion == task.answer), "length": len(completion)}
async def waits(task, completion, strict=True): return float(completion == task.answer)
def verl(data_source, solution_str, ground_truth, extra_info): return float(solution_str == ground_truth)
def any_names(row, text): return float(text == row.answer)
def trl(completions, **columns): return [0.0]
def half_of_verl(solution_str, ground_truth): return 1.0
def one(task): return 1.0
"""


@pytest.mark.parametrize("name", ["own", "waits", "verl", "any_names"])
async def test_a_function_is_the_same_reward_in_a_file_and_from_python(tmp_path, name):
    (tmp_path / "rewards.py").write_text(SIGNATURES)
    module = {}
    exec(SIGNATURES, module)
    of_file, of_python = named(f"{tmp_path / 'rewards.py'}:{name}"), named(module[name])
    task = Task("t", (Message("user", "1 + 1"),), "2")
    for text, expected in (("2", 1.0), ("3", 0.0)):
        scores = [await settled(reward(task, text)) for reward in (of_file, of_python)]
        assert scores[0] == scores[1]
        assert scores[0].reward == expected
    rows = [{"prompt": f"{n}", "answer": str(n)} for n in range(20)]
    passed = pack_environment(rows, reward=module[name])
    give(passed)
    environment = load_python_environment(passed.name, 0, {})
    first = environment.tasks("train", 1)[0]
    assert (await InlineScorer(environment).score(first, first.answer)).reward == 1.0


@pytest.mark.parametrize("name", ["trl", "half_of_verl", "one"])
def test_another_signature_is_refused_with_those_that_are_taken(tmp_path, name):
    (tmp_path / "rewards.py").write_text(SIGNATURES)
    module = {}
    exec(SIGNATURES, module)
    for given in (f"{tmp_path / 'rewards.py'}:{name}", module[name]):
        with pytest.raises(ConfigError, match="cannot be called with task, completion, nor as verl"):
            named(given)
    with pytest.raises(ConfigError, match="cannot be called with task, completion, nor as verl"):
        pack_environment([{"prompt": "1", "answer": "1"}], reward=module[name])
