"""`environment.num_examples` and `environment.graded_text`: what prompts, targets and rewards make of them."""

import pytest
from tests.inline_scorer import InlineScorer

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.answers import graded_part
from slipstream.envs.registry import load_environment
from slipstream.envs.single_turn import gold_of, make_tasks
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message

SUMS = {"name": "reasoning_gym/chain_sum", "settings": {"min_terms": 2, "max_terms": 2}}


def loaded(**settings):
    return load_environment(EnvironmentConfig(**settings))


def test_examples_are_the_first_training_tasks_with_their_answers():
    plain, shown = loaded(**SUMS), loaded(**SUMS, num_examples=4)
    first = make_tasks(plain, "train", 4)
    solved = [message for task in first for message in (task.prompt[0], Message("assistant", task.answer))]
    for split in ("train", "eval"):
        for task in make_tasks(shown, split, 20):
            assert list(task.prompt[:-1]) == solved
            assert task.prompt[-1].role == "user"
    trained_on = {task.id for task in make_tasks(shown, "train", 20)}
    assert not trained_on & {task.id for task in first}
    assert [task.id for task in make_tasks(shown, "eval", 20)] == [task.id for task in make_tasks(plain, "eval", 20)]


async def test_the_question_alone_is_graded():
    shown = loaded(**SUMS, num_examples=2)
    (task,) = make_tasks(shown, "eval", 1)
    assert (await InlineScorer(shown).score(task, task.answer)).reward == 1.0


def test_a_system_message_stays_first_and_each_part_of_a_mixture_has_its_own_examples():
    parts = {"sums": {**SUMS, "system_prompt": "Add."}, "words": {"name": "reasoning_gym/spell_backward"}}
    mixture = loaded(name="mixture", mixture=parts, num_examples=1, graded_text="tag")
    sums, words = make_tasks(mixture, "train", 2)
    assert [message.role for message in sums.prompt] == ["system", "user", "assistant", "user"]
    assert [message.role for message in words.prompt] == ["user", "assistant", "user"]
    assert words.prompt[1].content.startswith("<answer>")
    assert gold_of(mixture, words) == f"<answer>{words.answer}</answer>"


def test_tasks_without_an_answer_are_no_examples(tmp_path):
    file = tmp_path / "guess.py"
    file.write_text(
        "def tasks(split, num_tasks, seed):\n"
        "    return [{'prompt': f'{split} {n}'} for n in range(min(num_tasks, 3))]\n"
        "def reward(task, completion):\n"
        "    return 1.0\n"
    )
    with pytest.raises(
        DataError, match=r"environment\.num_examples = 2, and task train/0 of guess is not one question"
    ):
        make_tasks(loaded(name=str(file), num_examples=2), "train", 5)
    with pytest.raises(DataError, match=r"environment\.num_examples = 8, and guess has 3 training tasks: use fewer"):
        make_tasks(loaded(name=str(file), num_examples=8), "eval", 5)


@pytest.mark.parametrize(
    ("completion", "part", "text"),
    [
        ("<think>no</think> 12\n", "all", "<think>no</think> 12\n"),
        ("5? <answer>\n7 </answer> or <ANSWER>12</ANSWER>.", "tag", "12"),
        ("<answer>1</answer><think>wait</think> 12", "tag", None),
        ("12", "tag", None),
        ("<answer>12", "tag", None),
        ("5 + 7\n= 12 \n\n", "last_line", "= 12"),
        ("<think>\n5", "last_line", "<think>\n5"),
        (" \n", "last_line", None),
    ],
)
def test_the_graded_part_of_a_completion(completion, part, text):
    assert graded_part(completion, part) == text


@pytest.mark.parametrize("part", ["tag", "last_line"])
async def test_an_answer_after_reasoning_counts(part):
    environment = loaded(**SUMS, graded_text=part)
    (task,) = make_tasks(environment, "train", 1)
    gold = gold_of(environment, task)
    scorer = InlineScorer(environment)
    assert (await scorer.score(task, f"First I add the ones.\n{gold}")).reward == 1.0
    assert (await scorer.score(task, "<think>I add" if part == "tag" else " ")).reward == 0.0
    without = await scorer.score(task, "" if part == "last_line" else task.answer)
    assert (without.reward, without.metrics) == (0.0, {"no_answer": 1.0})
    assert (await InlineScorer(loaded(**SUMS)).score(task, f"First I add the ones.\n{gold}")).reward < 1.0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def score_episode(self, task, episode): return 1.0", "grades whole episodes"),
        ("scores_groups = True\n    def score_group(self, task, episodes): return [1.0]", "grades groups"),
    ],
)
def test_a_part_is_refused_where_no_text_is_graded(source, reason, tmp_path):
    file = tmp_path / "whole.py"
    file.write_text(
        "from slipstream.envs import SingleTurn\n"
        "class Whole(SingleTurn):\n"
        "    def tasks(self, split, num_tasks): return []\n"
        f"    {source}\n"
    )
    with pytest.raises(ConfigError, match=rf"environment\.graded_text = 'tag' has no effect: Whole {reason}"):
        loaded(name=str(file), graded_text="tag")
