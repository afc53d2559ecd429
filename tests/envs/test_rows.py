"""The environment `rows`: its splits, its rewards, and verl's reward functions in a worker that can be killed."""

import asyncio
import json

import pytest
from tests.envs.environments import shorten

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Score
from slipstream.envs.registry import load_environment
from slipstream.envs.rows import Rows
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.split import split_of
from slipstream.errors import ConfigError, DataError

QUESTIONS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(200)]
COMPUTE_SCORE = r"""
import re, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False):
    if solution_str == "hang":
        time.sleep(1000)
    found = re.findall(r"####\s*(-?\d+)", solution_str)
    score = 1.0 if found and found[-1] == ground_truth else 0.0
    return {"score": score, "acc": score > 0, "pred": found[-1] if found else "", "index": extra_info.get("index", -1)}

async def waiting(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
""".replace("\\\\\\\\", "\\\\")


def verl(n, source="openai/gsm8k", **more):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"split": "train", "index": n, "answer": f"{n} and 1\n#### {n + 1}"},
        **more,
    }


@pytest.fixture
def make(tmp_path):
    """`make(rows, **settings)`: the environment over these rows."""

    def make(rows=QUESTIONS, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Rows(0, {"path": str(path), **settings})

    return make


def reward(environment, task, text):
    return environment.score(task, text).reward


def test_one_question_in_ten_is_held_out_by_its_text(make):
    environment = make()
    train, held_out = environment.tasks("train", 1000), environment.tasks("eval", 1000)
    assert len(train) + len(held_out) == 200
    assert environment.num_train_tasks == len(train)
    assert all(split_of(task.prompt[0].content) == "eval" for task in held_out)
    assert environment.tasks("train", 7) == train[:7]


def test_a_file_of_its_own_is_held_out(make, tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"question": "Why?", "answer": "so"}) + "\n")
    environment = make(eval_path=str(path))
    assert environment.num_train_tasks == 200
    (task,) = environment.tasks("eval", 500)
    assert (task.answer, reward(environment, task, "so\n"), reward(environment, task, "not so")) == ("so", 1.0, 0.0)


def test_no_held_out_question(make):
    with pytest.raises(DataError, match=r"none of the 1 questions .* is held out"):
        make([row for row in QUESTIONS if split_of(row["question"]) == "train"][:1]).tasks("eval", 5)


def test_exact_and_number(make):
    environment = make([{"question": f"q{n}", "answer": ["1,000", "1e3"]} for n in range(20)])
    task = environment.tasks("train", 1)[0]
    assert [reward(environment, task, text) for text in ("1,000", " 1e3 ", "1000")] == [1.0, 1.0, 0.0]
    assert reward(environment, task, "<think>1,000</think>\n1,000") == 1.0
    assert environment.score(task, "<think>1,000").metrics == {"unclosed_thinking": 1.0}
    environment = make([{"question": f"q{n}", "answer": "so #### 1,000"} for n in range(20)], reward="number")
    task = environment.tasks("train", 1)[0]
    assert [reward(environment, task, text) for text in ("It is 1000.0.", "1000 or 7", "none")] == [1.0, 0.0, 0.0]


async def test_a_reward_function_of_verl_runs_unchanged_and_is_killed_when_it_hangs(tmp_path):
    (tmp_path / "score.py").write_text(COMPUTE_SCORE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(verl(n)) + "\n" for n in range(50)))
    settings = {"path": str(tmp_path / "rows.jsonl"), "reward": f"{tmp_path / 'score.py'}:compute_score"}
    settings |= {"gold_column": "extra_info.answer"}
    config = EnvironmentConfig(name="rows", settings=settings, reward_timeout_s=60.0)
    environment = load_environment(config)
    task = environment.tasks("train", 1)[0]
    async with ScorerPool(config) as scorer:
        score = await scorer.score(task, environment.gold(task))
        assert score.reward == 1.0
        assert score.metrics == {"acc": 1.0, "index": float(task.info["extra_info"]["index"])}
        assert (await scorer.score(task, "<think>#### -7</think>")).reward == 0.0
        shorten(scorer, 2.0)
        with pytest.raises(Exception, match="was killed after 2 s"):
            await scorer.score(task, "hang")


def test_an_async_function_too(make, tmp_path):
    (tmp_path / "score.py").write_text(COMPUTE_SCORE)
    environment = make([verl(n) for n in range(20)], reward=f"{tmp_path / 'score.py'}:waiting", strip_thinking=True)
    assert asyncio.run(environment.score(environment.tasks("train", 1)[0], "<think>x</think>four")).reward == 4.0


def test_numbers_beside_the_score_that_are_not_finite_are_counted(make, tmp_path):
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1.0, 'a': float('nan'), 'b': 2, 'c': float('inf'), 'note': 'text'}\n"
    )
    environment = make([verl(n) for n in range(20)], reward=f"{tmp_path / 'score.py'}")
    score = environment.score(environment.tasks("train", 1)[0], "four")
    assert score == Score(1.0, {"b": 2.0, "non_finite": 2.0})


def test_whole_numbers_of_a_column_of_floats(make):
    """pandas makes whole numbers floats where one of them is missing."""
    environment = make([{"question": f"What is {n} + 1?", "answer": n + 1.0} for n in range(20)], reward="exact")
    task = environment.tasks("train", 1)[0]
    assert environment.gold(task) == str(int(float(task.answer)))
    assert reward(environment, task, environment.gold(task)) == 1.0


def test_rewards_by_data_source(make):
    table = {"openai": "number", "openai/exact": "exact"}
    rows = [verl(n, source) for n in range(30) for source in ("openai/gsm8k", "openai/exact_match")]
    environment = make(rows, reward=table)
    by_source = {task.info["data_source"]: task for task in environment.tasks("train", 60)}
    said = {source: reward(environment, task, f"so {task.answer}") for source, task in by_source.items()}
    assert said == {"openai/gsm8k": 1.0, "openai/exact_match": 0.0}
    with pytest.raises(DataError, match=r"row 1 of .*: data_source = 'other' has no reward: .* openai/exact, openai"):
        make([verl(1, "other")], reward=table).tasks("train", 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"paht": "x"}, r"environment.settings.paht: rows has no such setting: did you mean 'path'\?"),
        ({"format": "parquet"}, "format = 'parquet' is not a choice"),
        ({"strip_thinking": "yes"}, "strip_thinking = 'yes' is a str: give true or false"),
        ({"split": 3}, "split = 3 is not a text"),
        ({"reward": {"a": "near"}}, "environment.settings.reward.a = 'near' is not a reward"),
    ],
)
def test_wrong_settings(make, settings, said):
    with pytest.raises(ConfigError, match=said):
        make(**settings)
    with pytest.raises(ConfigError, match=r"environment.settings.path is missing"):
        Rows(0, {})


def test_a_folder_of_splits_holds_out_the_one_that_is_meant_for_it(tmp_path):
    for split, first in (("train", 0), ("test", 100), ("validation", 120)):
        (tmp_path / split).mkdir()
        rows = "".join(json.dumps(row) + "\n" for row in QUESTIONS[first : first + 20])
        (tmp_path / split / "0.jsonl").write_text(rows)
    path = str(tmp_path)

    def held_out(**settings):
        environment = Rows(0, {"path": path, "eval_path": path, **settings})
        return environment.tasks("eval", 1)[0].answer, environment.eval_source

    assert held_out() == ("101", f"split 'test' of {path}")
    assert held_out(split="test") == ("121", f"split 'validation' of {path}")
    assert held_out(eval_split="validation") == ("121", f"split 'validation' of {path}")
    assert held_out(path=f"{path}/train", eval_path=f"{path}/test") == ("101", f"{path}/test")
    assert Rows(0, {"path": path}).eval_source == f"one question in ten of {path}, by its text"
