import contextlib
import time

import numpy as np
import pytest

from slipstream.envs import single_turn
from slipstream.envs.agent import Agent
from slipstream.envs.atropos import Atropos
from slipstream.envs.base import Environment, RewardFailed, Score, as_score
from slipstream.envs.from_python import FunctionEnvironment
from slipstream.envs.hosted.keeper import KeptEnvironment
from slipstream.envs.rewards.contract import Plain
from slipstream.envs.single_turn import as_task, as_tasks
from slipstream.errors import DataError, EnvironmentFault
from slipstream.records import Message, Task


def test_an_episode_begins_with_the_policys_turn_unless_something_comes_before():
    class Asks(single_turn.SingleTurn):
        def tasks(self, split, num_tasks):
            return []

    class SetsUp(Asks):
        async def setup_episode(self, task):
            return "a box"

    class Plays(Asks):
        async def run(self, task, policy):
            """Begins with something else."""

    assert Asks(0).begins_with_turn
    assert not any(each(0).begins_with_turn for each in (SetsUp, Plays))
    assert all(each.begins_with_turn is Environment.begins_with_turn for each in (Agent, Atropos, KeptEnvironment))


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, Score(1.0)),
        (True, Score(1.0)),
        (np.float32(0.5), Score(0.5)),
        (np.int64(2), Score(2.0)),
        (np.bool_(True), Score(1.0)),
        (np.array(0.5), Score(0.5)),
        ({"reward": np.bool_(False), "right": np.bool_(True)}, Score(0.0, {"right": 1.0})),
        ({"reward": 0.5, "format": True}, Score(0.5, {"format": 1.0})),
        (Score(0.25, {"x": 1}), Score(0.25, {"x": 1.0})),
    ],
)
def test_numbers_and_mappings_are_scores(value, score):
    assert as_score(value) == score


@pytest.mark.parametrize(
    "value",
    ["1", None, [1.0], 1j, float("-inf"), {"reward": None}, {"score": 1}, Score(float("nan")), 10**400, np.ones(1)],
)
def test_anything_else_is_a_failed_reward(value):
    with pytest.raises(RewardFailed):
        as_score(value)


def test_a_dictionary_is_a_task():
    task = as_task({"prompt": "2+2", "answer": "4", "level": 3, "tags": ("a",)}, "train/0", "row 0")
    assert task == Task("train/0", (Message("user", "2+2"),), "4", {"level": 3, "tags": ("a",)})
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert as_task({"prompt": chat, "id": 7}, "x", "row 0") == Task(
        "7", (Message("system", "s"), Message("user", "u")), None
    )
    assert as_task(task, "x", "row 0") is task


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("2+2", "row 3 is a str"),
        ({"question": "2+2"}, "row 3 has no 'prompt', only question"),
        ({"prompt": "a", "answer": 4}, "row 3 has the answer 4, a int"),
        ({"prompt": 5}, "prompt that is a int"),
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [{"role": "bot", "content": "x"}]}, "row 3 has a message"),
        ({"prompt": [("user", "x")]}, "row 3 has a message"),
        ({"prompt": "a", "when": {1, 2}}, "info.when is a set"),
        ({"prompt": "a", "x": [{"y": np.float64(1.0)}]}, r"info.x\[0\].y is a float64"),
        ({"prompt": "a", "x": {1: 2}}, "info.x has the key 1, a int"),
        ({"prompt": "a", "x": 2**70}, "more than 64 bits"),
    ],
)
def test_what_cannot_be_a_task_is_named(raw, said):
    with pytest.raises(DataError, match=said):
        as_task(raw, "x", "row 3")


def test_ids_are_unique():
    with pytest.raises(DataError, match="train tasks 0 and 2 of demo have the same id 'a'"):
        as_tasks([{"prompt": "x", "id": i} for i in "aba"], "train", "demo")


def test_two_functions_are_an_environment():
    def tasks(split, num_tasks, seed, base=10):
        return ({"prompt": f"{split} {seed} {base + i}", "answer": str(i)} for i in range(num_tasks))

    env = FunctionEnvironment("demo", tasks, Plain(lambda task, completion: completion == task.answer), 5, {"base": 20})
    first, second = env.tasks("eval", 2)
    assert first.prompt[0].content == "eval 5 20"
    assert (first.id, second.id) == ("eval/0", "eval/1")
    assert env.gold(second) == "1"
    assert env.score(second, "<think>0</think>1") == Score(1.0)
    assert env.score(second, "<think>1") == Score(0.0, {"unclosed_thinking": 1.0})
    assert (env.name, env.max_turns, env.seed) == ("demo", 1, 5)


def test_tasks_that_loop_for_ever_are_ended(monkeypatch):
    def endless(split, num_tasks, seed):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    monkeypatch.setattr(single_turn, "TASKS_TIMEOUT_S", 0.2)
    environment = FunctionEnvironment("mine", endless, Plain(lambda task, completion: 0.0), 0, {})
    with pytest.raises(EnvironmentFault, match=r"did not return within 0\.2 s: does it loop for ever"):
        single_turn.make_tasks(environment, "train", 10)
