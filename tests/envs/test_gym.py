import subprocess
import sys

import pytest
from tests.inline_scorer import InlineScorer

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Score
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.split import split_of
from slipstream.errors import ConfigError, DataError, EnvironmentFault
from slipstream.records import Task, decode, encode


def gym(task, seed=0, **settings):
    return load_environment(EnvironmentConfig(name=f"reasoning_gym/{task}", seed=seed, settings=settings))


def questions(tasks):
    return [task.prompt[0].content for task in tasks]


def test_the_splits_are_disjoint_distinct_and_stable():
    env = gym("spell_backward")
    train, held_out = questions(env.tasks("train", 1500)), questions(env.tasks("eval", 200))
    assert len(set(train)) == 1500
    assert len(set(held_out)) == 200
    assert not set(train) & set(held_out)
    assert {split_of(q) for q in held_out} == {"eval"}
    fresh = gym("spell_backward")
    assert questions(fresh.tasks("eval", 50)) == held_out[:50], "however many are asked for, and first or last"
    assert questions(fresh.tasks("eval", 200)) == held_out
    assert questions(fresh.tasks("train", 20)) == train[:20]
    assert len({task.id for task in env.tasks("train", 1500) + env.tasks("eval", 200)}) == 1700


def test_no_seed_trains_on_what_another_holds_out():
    held_out = set(questions(gym("spell_backward", seed=1, max_word_len=3).tasks("eval", 50)))
    train = set(questions(gym("spell_backward", seed=2, max_word_len=3).tasks("train", 500)))
    assert not held_out & train
    assert questions(gym("spell_backward", seed=1).tasks("train", 50)) != questions(
        gym("spell_backward", seed=2).tasks("train", 50)
    )


def test_settings_reach_the_task():
    tasks = gym("spell_backward", min_word_len=4, max_word_len=4).tasks("train", 50)
    assert {len(task.answer) for task in tasks} == {4}
    assert tasks[0].prompt[0].content.endswith(f": {tasks[0].answer[::-1]}")


def test_too_few_questions():
    env = gym("coin_flip", min_trials=3, max_trials=12)
    few = env.tasks("train", 100_000)
    assert 5 < len(few) < 1000
    assert env.tasks("train", 100_000) == few
    with pytest.raises(DataError, match=r"has only \d+ distinct eval questions and 500000 were asked for: set eval"):
        env.tasks("eval", 500_000)


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("spell_backward", {"min_word_length": 3}, r"settings.min_word_length: .*did you mean 'min_word_len'\?"),
        ("spell_backward", {"min_word_len": "3"}, "settings.min_word_len = '3' is a str: give a whole number"),
        ("spell_backward", {"min_word_len": 3.5}, "settings.min_word_len = 3.5 is a float: give a whole number"),
        ("spell_backward", {"min_word_len": 9, "max_word_len": 4}, "min_word_len = 9.*max_word_len must be >="),
        ("spell_backward", {"size": 5}, "settings.size is not set here: use environment.num_train_tasks"),
        ("composite", {}, "composite refuses datasets = .*: Must specify at least one dataset"),
        ("composite", {"datasets": [{"name": "gdc"}]}, r"no task 'gdc': did you mean 'gcd'\?"),
        ("composite", {"datasets": [{"name": "gcd", "weigth": 1}]}, "has the key 'weigth'"),
        ("composite", {"datasets": ["gcd"]}, "has the entry 'gcd'"),
    ],
)
def test_bad_settings_are_said(task, settings, said):
    with pytest.raises(ConfigError, match=said):
        gym(task, **settings)


def test_the_seed_is_no_setting():
    config = EnvironmentConfig(name="reasoning_gym/spell_backward", settings={"seed": 5})
    with pytest.raises(ConfigError, match=r"settings.seed is not set here: use environment.seed"):
        load_environment(config)


def test_a_task_that_cannot_be_made_names_the_item():
    with pytest.raises(EnvironmentFault, match="spell_backward failed to make task 0 of seed 0: IndexError"):
        gym("spell_backward", min_word_len=60, max_word_len=60).tasks("train", 1)


@pytest.mark.parametrize(
    "task",
    # Tuples, integer keys, NumPy text, long entries, items that differ between processes, several right answers.
    [
        "spell_backward",
        "knights_knaves",
        "word_ladder",
        "codeio",
        "isomorphic_strings",
        "countdown",
        "maze",
        "shortest_path",
    ],
)
async def test_gold_is_right_after_a_trip_over_the_wire(task):
    env = gym(task)
    scorer = InlineScorer(gym(task))
    for sent in env.tasks("train", 8):
        received = decode(encode(sent), Task)
        assert (await scorer.score(received, f"<think>hm</think>\n{env.gold(sent)}")).reward == 1.0
        assert (await scorer.score(received, "")).reward < 0.5


async def test_a_mixture():
    datasets = [{"name": "gcd", "weight": 2.0}, {"name": "spell_backward", "config": {"max_word_len": 4}}]
    env = gym("composite", datasets=datasets)
    tasks = env.tasks("train", 60)
    kinds = ["Spell" in question for question in questions(tasks)]
    assert 5 < sum(kinds) < 40
    assert [env.score(task, task.answer).reward for task in tasks] == [1.0] * 60


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_counted():
    environment = gym("prime_factorization")
    (task,) = environment.tasks("train", 1)
    assert environment.score(task, task.answer) == Score(1.0, {"unreadable": 0.0})
    assert environment.score(task, "2 x x 3") == Score(0.0, {"unreadable": 1.0})


@pytest.mark.full
async def test_real_rewards_in_a_worker():
    config = EnvironmentConfig(name="reasoning_gym/spell_backward")
    env = load_environment(config)
    async with ScorerPool(config) as pool:
        for task in env.tasks("eval", 10):
            assert (await pool.score(task, task.answer)).reward == 1.0
            assert (await pool.score(task, task.answer[::-1] + "x")).reward < 1.0


@pytest.mark.full
def test_tasks_are_the_same_in_every_process():
    code = (
        "from slipstream.envs.registry import load_environment as l\n"
        "from slipstream.config.schema import EnvironmentConfig as C\n"
        "print([t.prompt[0].content for t in l(C(name='reasoning_gym/spell_backward', seed=4)).tasks('eval', 5)])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(questions(gym("spell_backward", seed=4).tasks("eval", 5)))
    assert "SyntaxWarning" not in said.stderr
