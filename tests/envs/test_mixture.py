"""Several environments as one: which part does what."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.environment import EnvironmentConfig
from slipstream.envs.base import Environment, Episode, Limits, Score
from slipstream.envs.mixed import Mixture, shares
from slipstream.envs.registry import load_environment
from slipstream.envs.single_turn import SingleTurn, gold_turns, make_tasks
from slipstream.errors import ConfigError, EnvironmentFault

PART = """
from slipstream.envs import SingleTurn, Task, Message

class Part(SingleTurn):
    def __init__(self, seed=0, number=0, size=1000):
        super().__init__(seed)
        self.number, self.size, self.log = number, size, []
        self.tools, self.max_turns = ((add,), 4) if number == 1 else ((), 1)

    def tasks(self, split, num_tasks):
        info = {"data_source": "x"} if self.number else {}
        prompts = [(Message("user", f"{self.number} {split} {i}"),) for i in range(min(num_tasks, self.size))]
        return [Task(f"{split}{i}", prompt, str(self.number), info) for i, prompt in enumerate(prompts)]

    def reward(self, task, completion):
        assert task.part == "" and "/" not in task.id
        return float(completion == task.answer) + self.number

    async def setup(self):
        self.log.append("setup")

    async def close(self):
        self.log.append("close")

def add(a: int, b: int) -> int:
    "Adds."
    return a + b
"""


def load(tmp_path, **parts):
    (tmp_path / "part.py").write_text(PART)
    mixture = {name: {"name": str(tmp_path / "part.py"), **part} for name, part in parts.items()}
    return load_environment(EnvironmentConfig.model_validate({"name": "mixture", "mixture": mixture}))


@pytest.fixture
def mixture(tmp_path):
    second = {"settings": {"number": 1, "size": 5}, "system_prompt": "Be brief.", "group_size": 2, "max_tokens": 7}
    return load(tmp_path, first={}, second=second)


@given(number=st.integers(0, 60), most=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_shares_are_those_of_taking_turns(number, most):
    given_out, place = [0] * len(most), 0
    while sum(given_out) < min(number, sum(most)):
        if given_out[place] < most[place]:
            given_out[place] += 1
        place = (place + 1) % len(most)
    assert shares(number, most) == given_out


def test_tasks_of_all_parts_in_turn(mixture):
    tasks = make_tasks(mixture, "train", 12)
    assert [task.id for task in tasks][:4] == ["first/train0", "second/train0", "first/train1", "second/train1"]
    assert [task.source for task in tasks[:2]] == ["first", "second/x"]
    assert sum(task.part == "second" for task in tasks) == 5
    held_out = make_tasks(mixture, "eval", 6)
    assert [task.part for task in held_out] == ["first", "second"] * 3
    assert mixture.num_train_tasks == 20_000, "part.num_train_tasks, or the part's own"


def test_prompts_have_the_parts_own_system_message_and_tools(mixture):
    first, second = make_tasks(mixture, "train", 2)
    assert [message.role for message in first.prompt] == ["user"]
    assert [message.role for message in second.prompt] == ["system", "user"]
    assert second.prompt[0].content == "Be brief."
    assert not first.prompt[0].tools
    assert second.prompt[0].tools[0]["function"]["name"] == "add"
    assert not second.prompt[1].tools
    assert mixture.max_turns == 4, "of the part with tools"


def test_the_turns_of_a_part_are_asked_for_when_they_are_needed():
    """An environment of `verifiers` starts a process to say them."""
    asked = []

    class Slow(SingleTurn):
        @property
        def max_turns(self):
            asked.append(1)
            return 3

        def tasks(self, split, num_tasks):
            return []

        def reward(self, task, completion):
            return 0.0

    config = EnvironmentConfig.model_validate({"name": "mixture", "mixture": {"slow": {"name": "part"}}})
    mixture = Mixture(config, lambda section: Slow(0))
    assert asked == []
    assert (mixture.max_turns, mixture.max_turns, asked) == (3, 3, [1])


def test_everything_is_the_parts(mixture):
    first, second = make_tasks(mixture, "train", 2)
    assert [mixture.score(task, "1").reward for task in (first, second)] == [0.0, 2.0]
    assert mixture.score_episode(second, Episode("0")).reward == 1.0
    assert [gold_turns(mixture, task)[0].content for task in (first, second)] == ["0", "1"]
    assert mixture.call_tool("add", {"a": 1, "b": 2}, second) == 3
    assert [mixture.limits(task) for task in (first, second)] == [Limits(), Limits(2, 7)]
    assert [mixture.has_tools(task) for task in (first, second)] == [False, True]
    assert not mixture.grades_groups(first)


def test_groups_are_graded_where_the_part_does(mixture):
    part = mixture.parts["second"]
    part.scores_groups = True
    part.score_group = lambda task, episodes: [Score(float(task.id == "train0"))] * len(episodes)
    first, second = make_tasks(mixture, "train", 2)
    assert [mixture.grades_groups(task) for task in (first, second)] == [False, True]
    assert [score.reward for score in mixture.score_group(second, [Episode("a")] * 2)] == [1.0, 1.0]


def test_parts_are_set_up_once_and_closed_whatever_one_of_them_raises(mixture):
    warnings = []
    mixture.attach(warnings.append)

    async def raises():
        raise ValueError("no")

    async def use():
        for _ in range(3):
            await mixture.setup()
        mixture.parts["first"].close = raises
        await mixture.close()
        assert mixture.parts["second"].log == ["setup", "close"]
        await mixture.setup()

    asyncio.run(use())
    assert mixture.parts["second"].log == ["setup", "close", "setup"], "a run of a smaller plan sets up again"
    assert len(warnings) == 1
    assert "close() of Part raised ValueError: no" in warnings[0]


def test_errors_name_the_part(tmp_path, mixture):
    with pytest.raises(ConfigError, match=r"^environment\.mixture\.odd\.settings\.size_of: .* no such setting"):
        load(tmp_path, odd={"settings": {"size_of": 3}})
    mixture.parts["second"].tasks = lambda split, number: 1 / 0
    with pytest.raises(EnvironmentFault, match=r"^environment\.mixture\.second: tasks\('train', 2\) of Part raised"):
        make_tasks(mixture, "train", 4)
    assert isinstance(mixture, Mixture)
    assert isinstance(mixture, Environment)
