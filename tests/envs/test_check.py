import pytest
from tests.envs.environments import Behaving
from tests.inline_scorer import InlineScorer

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import RewardTimeout
from slipstream.envs.check import KindResult, check_environment, completions, judge_results
from slipstream.envs.from_python import FunctionEnvironment
from slipstream.envs.registry import load_environment
from slipstream.envs.rewards.contract import Plain
from slipstream.records import Message, Task


def environment(reward, answers=None, num=40):
    answers = answers or [f"number {i * 7919 % 997}" for i in range(num)]
    rows = {
        split: [{"prompt": f"{asked} {i}", "answer": answer} for i, answer in enumerate(answers)]
        for split, asked in (("train", "question"), ("eval", "held-out question"))
    }
    return FunctionEnvironment("demo", lambda split, num_tasks, seed: rows[split][:num_tasks], Plain(reward), 0, {})


async def check(reward, answers=None, **options):
    env = environment(reward, answers)
    return await check_environment(env, InlineScorer(env), **options)


async def test_a_strict_reward_passes():
    result = await check(lambda task, completion: completion == task.answer)
    assert not result.failures
    assert [(r.kind, r.accuracy, r.mean_reward) for r in result.results] == [
        ("gold", 1.0, 1.0),
        ("empty", 0.0, 0.0),
        ("shuffled", 0.0, 0.0),
        ("other_row", 0.0, 0.0),
        ("prompt", 0.0, 0.0),
    ]
    assert result.num_tasks == 40


async def test_answers_end_with_a_stop_string_as_completions_do():
    answers = [f"<a>{i}</a> is right" for i in range(40)]
    seen = []

    def reward(task, completion):
        seen.append(completion)
        return completion == task.answer.removesuffix(" is right")

    assert not (await check(reward, answers, stop=("right", "</a>"))).failures
    assert seen[:40] == [f"<a>{i}</a>" for i in range(40)]
    exact = await check(lambda task, completion: completion == task.answer, answers, stop=("</a>",))
    assert "40 of 40" in next(failure for failure in exact.failures if "sampling.stop" in failure)


@pytest.mark.parametrize("answers", [["yes", "no"] * 20, ["a", "b", "c", "d"] * 10, ["True"] * 39 + ["False"]])
async def test_choices_pass(answers):
    found = await check(lambda task, completion: completion.strip().lower() == task.answer.lower(), answers)
    assert not found.failures


async def test_order_may_be_free():
    answers = [f"{i} {i + 50} {i + 100}" for i in range(40)]
    found = await check(lambda task, completion: sorted(completion.split()) == sorted(task.answer.split()), answers)
    assert not found.failures


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda task, completion: 1.0, "the reward is 1 whatever the completion"),
        (lambda task, completion: 0.0, "gold answers reach the threshold 1 in 0.0%"),
        (lambda task, completion: completion != task.answer, "gold answers reach the threshold 1 in 0.0%"),
        (lambda task, completion: completion in task.answer, "an empty answer counts as right in 100.0%"),
        (lambda task, completion: sorted(completion) == sorted(task.answer), "characters shuffled counts as right in"),
        (lambda task, completion: completion.startswith("number"), "another task's answer counts as right in 100.0%"),
        (
            lambda task, completion: "question" in completion or completion == task.answer,
            "the question repeated counts",
        ),
        (
            lambda task, completion: 0.99 + 0.01 * (completion == task.answer) if completion else 0.0,
            "hardly less than gold's 1",
        ),
        (
            lambda task, completion: 1 / len(completion) * 0 + (completion == task.answer),
            "the reward failed on 40 of 40",
        ),
    ],
)
async def test_a_reward_that_cannot_tell_fails_with_the_reason(reward, said):
    result = await check(reward)
    assert result.failures
    assert any(said in failure for failure in result.failures), result.failures


async def test_the_threshold_counts():
    def reward(task, completion):
        return 0.8 if completion == task.answer else 0.1

    assert (await check(reward)).failures
    assert not (await check(reward, threshold=0.8)).failures


async def test_an_environment_that_ignores_the_split_fails():
    rows = [{"prompt": f"question {i}", "answer": f"number {i * 7919 % 997}"} for i in range(40)]
    reward = Plain(lambda task, completion: completion == task.answer)
    env = FunctionEnvironment("demo", lambda split, num_tasks, seed: rows[:num_tasks], reward, 0, {})
    result = await check_environment(env, InlineScorer(env))
    assert "8 of 8 held-out prompts are training prompts too, first 'question 0'" in " ".join(result.failures)
    assert not (await check_environment(env, InlineScorer(env), held_out=False)).failures


async def test_no_gold_cannot_be_checked():
    env = Behaving(gold=False)
    result = await check_environment(env, InlineScorer(env))
    assert not result.failures
    assert result.without_gold.startswith("8 of 8 tasks have no gold answer")


async def test_a_hanging_reward_costs_three_deadlines():
    class Late:
        num_asked = 0

        async def score(self, task, episode):
            self.num_asked += 1
            raise RewardTimeout("killed after 0.3 s")

    late = Late()
    result = await check_environment(Behaving(size=30), late)
    assert late.num_asked == 3
    assert [r.kind for r in result.results] == ["gold"]
    assert any("killed after 0.3 s" in failure for failure in result.failures)


def test_junk_is_never_the_gold_answer():
    known = [
        (Task(str(i), (Message("user", gold),)), gold) for i, gold in enumerate(["aa", "7", "Ab", "ab", "", "x y"])
    ]
    plays = completions(known)
    golds = {task.id: gold for task, gold in known}
    for kind, rows in plays.items():
        for task, text in rows:
            assert (text == golds[task.id]) == (kind == "gold")
    assert {task.id for task, _ in plays["shuffled"]} == {"2", "3", "5"}
    assert {task.id for task, _ in plays["empty"]} == {"0", "1", "2", "3", "5"}
    assert plays["prompt"] == []
    assert completions(known) == plays


def test_partial_credit_with_a_slope_passes():
    results = [
        KindResult("gold", [1.0] * 20, 1.0),
        KindResult("shuffled", [0.4] * 19 + [1.0], 1.0),
        KindResult("other_row", [1.0] * 8 + [0.5] * 12, 1.0),
        KindResult("empty", [0.0] * 20, 1.0),
    ]
    assert judge_results(results) == []
    assert judge_results([]) == []


@pytest.mark.parametrize(("gives", "num_failures"), [(0.0, 0), (1.0, 2), (ZeroDivisionError, 1)])
async def test_without_gold_answers_what_can_be_checked_is(gives, num_failures):
    def reward(task, completion):
        if gives is ZeroDivisionError:
            raise gives
        return gives

    def tasks(split, n, seed):
        return [{"prompt": f"{split} {i}"} for i in range(40)][:n]

    env = FunctionEnvironment("demo", tasks, Plain(reward), 0, {})
    result = await check_environment(env, InlineScorer(env), 20)
    assert len(result.failures) == num_failures
    assert "20 of 20 tasks have no gold answer" in result.without_gold
    assert {each.kind for each in result.results} == {"empty", "prompt"}


@pytest.mark.parametrize("task", ["gcd", "coin_flip", "word_sorting"])
async def test_real_tasks_pass(task):
    env = load_environment(EnvironmentConfig(name=f"reasoning_gym/{task}"))
    result = await check_environment(env, InlineScorer(env), 60)
    assert not result.failures


async def test_a_real_reward_that_accepts_everything_is_found():
    env = load_environment(EnvironmentConfig(name="reasoning_gym/game_of_life_halting"))
    assert (await check_environment(env, InlineScorer(env), 20)).failures


async def test_each_part_of_a_mixture_is_judged_by_itself(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    part = {"name": f"{tmp_path}/parts.py", "settings": {"asks": "a"}}
    mixture = {
        "good": part,
        "lenient": part | {"settings": {"asks": "b", "is_lenient": True}},
        "silent": part | {"settings": {"asks": "c", "has_gold": False}},
    }
    environment = load_environment(EnvironmentConfig.model_validate({"name": "mixture", "mixture": mixture}))
    result = await check_environment(environment, InlineScorer(environment), 8)
    assert result.failures == ["lenient: the reward is 1 whatever the completion: nothing can be learnt from it"]
    assert result.without_gold.startswith("8 of 24 tasks have no gold answer (of silent: 8): ")
    assert {(r.part, r.num_scored) for r in result.results if r.kind == "gold"} == {("good", 8), ("lenient", 8)}


PARTS = """
def tasks(split, num_tasks, seed, asks, is_lenient=False, has_gold=True):
    answers = [f"{asks}{7919 * number % 997}" for number in range(num_tasks)]
    return [
        {"prompt": f"{split} {asks} {number}", "right": answer, "is_lenient": is_lenient}
        | ({"answer": answer} if has_gold else {})
        for number, answer in enumerate(answers)
    ]


def reward(task, completion):
    return task.info["is_lenient"] or completion == task.info["right"]
"""
