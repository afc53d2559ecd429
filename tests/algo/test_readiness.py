"""What groups of completions say about the chances of reinforcement learning."""

import itertools
import math
from dataclasses import replace

import pytest
from tests.recipe_settings import rl

from slipstream.algo.readiness import (
    GroupStatistics,
    group_statistics,
    has_signal,
    judge,
    signal_rule,
    turn_returns,
    turns_have_signal,
)
from slipstream.records import Rollout, Sequence


def rollout(group, reward, *, text="", outcome="done", length=3, answer=""):
    sequence = Sequence(list(range(length + 1)), [False] + [True] * length)
    made = Rollout(f"r{group}", f"t{group}", f"g{group}", [sequence], reward, outcome, completion=text or str(reward))
    made.answer = answer
    return made


def test_the_figures():
    """Four groups of four: all right, half right, all wrong with two texts, and one with a failed rollout."""
    rollouts = [
        *(rollout(0, 1.0, text="a") for _ in range(4)),
        *(rollout(1, reward, text=f"b{i}") for i, reward in enumerate((1.0, 0.0, 1.0, 0.5))),
        *(rollout(2, 0.25, text="cd"[i % 2], outcome="truncated", length=7) for i in range(4)),
        *(rollout(3, 0.0, text="e") for _ in range(3)),
        rollout(3, 1.0, outcome="reward_error"),
    ]
    found = group_statistics(rollouts, threshold=1.0)
    assert (found.num_groups, found.group_size, found.num_failed) == (4, 4, 1)
    assert found.pass_at_1 == (1 + 0.5 + 0 + 0) / 4
    assert found.pass_at_k == 2 / 4
    assert found.signal_fraction == 1 / 4
    assert found.mean_reward == (4 + 2.5 + 1) / 15
    assert found.truncated_fraction == 4 / 15
    assert found.mean_length == (11 * 3 + 4 * 7) / 15
    assert found.distinct_fraction == pytest.approx((1 / 4 + 1 + 2 / 4 + 1 / 3) / 4)
    deviation = math.sqrt(sum((x - 0.375) ** 2 for x in (1, 0.5, 0, 0)) / 3)
    assert found.pass_at_1_interval == pytest.approx((0.0, 0.375 + 1.96 * deviation / 2))
    assert group_statistics(rollouts, threshold=0.25).pass_at_1 == (1 + 0.75 + 1 + 0) / 4


def test_a_threshold_of_rewards_decides_which_groups_differ():
    rollouts = [rollout(0, 0.2), rollout(0, 0.4), rollout(1, 0.2), rollout(1, 0.9)]
    assert group_statistics(rollouts, 1.0).signal_fraction == 1.0
    rule = signal_rule(rl(reward_threshold=0.5))
    assert group_statistics(rollouts, 1.0, rule).signal_fraction == 0.5


def test_a_group_in_which_no_completion_is_trained_on_has_no_signal():
    """Under `train_on_truncated = false` all of it must not be truncated."""
    cut = [rollout(0, reward, outcome="truncated") for reward in (0.0, 1.0)]
    for one, expected in ((rollout(0, 0.0, outcome="reward_error"), False), (rollout(0, 0.0), True)):
        assert signal_rule(rl(train_on_truncated=False))([*cut, one]) is expected
        assert signal_rule(rl())([*cut, one])


def test_without_a_usable_rollout_there_is_nothing_to_say():
    assert group_statistics([rollout(0, 0.0, outcome="engine_error")], 1.0) is None
    assert group_statistics([rollout(0, 1.0)], 1.0).pass_at_1_interval == (0.0, 1.0)


def found(pass_at_1, signal, *, pass_at_k=None, truncated=0.0, distinct=0.9, reward=None, full=0.0):
    k = pass_at_1 if pass_at_k is None else pass_at_k
    made = GroupStatistics(64, 8, 0, pass_at_1, (0.0, 1.0), k, signal, reward or pass_at_1, 5.0, truncated, distinct)
    return replace(made, context_full_fraction=full)


@pytest.mark.parametrize(
    ("statistics", "verdict", "says"),
    [
        (found(0.3, 0.6, pass_at_k=0.7), "ready for RL", "pass@1 30 %, pass@8 70 %; 60 % of the groups"),
        (found(0.05, 0.15, pass_at_k=0.15), "ready, but slow", "learning is faster after"),
        (found(0.0, 0.0), "more SFT first", "more training.steps of SFT"),
        (found(0.0, 0.9), "more SFT first", "partial credit alone"),
        (found(0.0, 0.05, truncated=0.9), "more SFT first", "cut at sampling.max_tokens"),
        (found(0.0, 0.05, truncated=0.9, full=0.5), "more SFT first", "inference.max_model_len"),
        (found(0.0, 0.05, truncated=0.9, full=0.4), "more SFT first", "cut at sampling.max_tokens"),
        (found(0.3, 0.05, distinct=0.13), "more SFT first", "says nearly the same"),
        (found(0.96, 0.3), "task too easy", "hardly anything left"),
        (found(0.85, 0.2), "task too easy", "only 20 % of the groups"),
        (found(0.85, 0.4), "ready for RL", "pass@1 85 %"),
        (found(0.95, 0.3), "task too easy", "hardly anything left"),
        (found(1.0, 0.0), "task too easy", "pass@1 100 %, pass@8 100 %: "),
        (found(0.8, 0.2), "task too easy", "only 20 % of the groups"),
        (found(0.3, 0.25), "ready for RL", "pass@8 30 %; 25 % of the groups"),
        (found(0.05, 0.1, pass_at_k=0.15), "ready, but slow", "only 10 % of the groups"),
        (found(0.0, 0.05, truncated=0.5), "more SFT first", "cut at sampling.max_tokens"),
        (found(0.3, 0.05, distinct=0.35), "more SFT first", "and only 5 % of the groups"),
        (found(0.0, 0.0), "more SFT first", "pass@1 0 %, pass@8 0 %"),
        (found(0.01, 0.6, pass_at_k=0.995), "ready for RL", "pass@1 1 %, pass@8 99.5 %"),
        (found(0.005, 0.6, pass_at_k=0.99), "ready for RL", "pass@1 0.5 %, pass@8 99 %"),
    ],
)
def test_the_verdicts(statistics, verdict, says):
    judgement = judge(statistics, gold_reward=1.0)
    assert judgement.verdict == verdict
    assert says in judgement.text
    assert judgement.is_ready == (verdict == "ready for RL")


def test_a_model_that_guesses_the_majority_answer_has_to_learn_more_first():
    """Three of five tasks have the answer 1; the completions do not depend on the task."""
    answers = ["1", "1", "2", "1", "3"]
    rollouts = [
        rollout(g, float(said == answer), text=said, answer=answer)
        for g, answer in enumerate(answers)
        for said in "1123"
    ]
    found = group_statistics(rollouts, 1.0)
    assert (found.majority_answer, found.majority_fraction) == ("1", 0.6)
    assert found.pass_at_1 == pytest.approx(0.4)
    judgement = judge(found, 1.0)
    assert judgement.verdict == "more SFT first"
    assert "always answering '1' would be right in 60 % of the tasks" in judgement.text
    knows = [rollout(g, 1.0 if i < 3 else 0.0, answer=a, text=str(i)) for g, a in enumerate(answers) for i in range(4)]
    assert judge(group_statistics(knows, 1.0), 1.0).verdict == "ready for RL"
    same = [rollout(g, float(said == "1"), text=said, answer="1") for g in range(5) for said in "1123"]
    assert judge(group_statistics(same, 1.0), 1.0).verdict == "ready for RL", "one answer is the solution"
    different = [rollout(g, 1.0, answer=str(g)) for g in range(5)]
    assert group_statistics(different, 1.0).majority_answer == ""


def test_a_model_that_earns_more_than_the_gold_answers_is_paid_for_something_else():
    assert judge(found(0.3, 0.6, reward=1.2), gold_reward=1.0).verdict == "reward broken"
    assert judge(found(0.3, 0.6, reward=1.04), gold_reward=1.0).verdict == "ready for RL", "style may count a little"
    assert judge(found(0.3, 0.6, reward=1.2)).verdict == "ready for RL"


def test_where_no_gold_answer_is_known_rewards_need_not_reach_the_threshold():
    judgement = judge(found(0.0, 0.9, reward=17.0))
    assert judgement.verdict == "ready for RL"
    assert "no reward reaches evaluation.threshold" in judgement.text


def test_every_policy_gets_one_verdict():
    grid = [i / 10 for i in range(11)]
    for right, signal, cut, distinct in itertools.product(grid, grid, (0.0, 0.7), (0.1, 0.9)):
        judgement = judge(found(right, signal, truncated=cut, distinct=distinct), gold_reward=1.0)
        assert judgement.text.count("\n") == 0
        assert signal < 0.25 or right >= 0.95 or right == 0 or judgement.is_ready


def test_a_return_is_all_that_was_earned_from_that_turn_on():
    assert turn_returns(3.0, [1.0, 0.5, 1.5]) == [3.0, 2.0, 1.5]
    assert turn_returns(2.0, [2.0]) == [2.0]
    assert turn_returns(2.0, []) == []


@pytest.mark.parametrize(
    ("returns", "differ"),
    [
        ([], False),
        ([[1.0, 2.0], [1.0, 2.0]], False),
        ([[1.0, 2.0], [1.0]], False),
        ([[1.0, 2.0], [1.0, 3.0]], True),
        ([[1.0, 2.0, 5.0], [1.0, 2.0], [2.0]], True),
    ],
)
def test_turns_teach_where_those_that_several_have_differ(returns, differ):
    assert turns_have_signal(returns) is differ


def test_a_reward_at_the_threshold_counts():
    assert has_signal([0.4, 0.5], 0.5)
    assert not has_signal([0.5, 0.6], 0.5)


def test_two_groups_have_an_interval():
    rollouts = [rollout(group, reward) for group in range(2) for reward in (0.0, 1.0)]
    assert group_statistics(rollouts, 1.0).pass_at_1_interval == (0.5, 0.5)


def test_two_tasks_of_the_same_answer_make_a_majority():
    for each, majority, fraction in (("7788", "7", 0.5), ("7123", "", 0.0)):
        found = group_statistics([rollout(g, 0.0, answer=answer) for g, answer in enumerate(each)], 1.0)
        assert (found.majority_answer, found.majority_fraction) == (majority, fraction)
    assert group_statistics([rollout(0, 0.0)], 1.0).majority_fraction == 0.0


def test_guessing_begins_at_a_tenth_of_the_tasks_and_is_not_better_than_the_majority():
    at_bound = replace(found(0.1, 0.3), majority_answer="1", majority_fraction=0.1)
    assert at_bound.is_guessing
    assert not replace(at_bound, pass_at_1=0.11).is_guessing
    never_right = replace(found(0.0, 0.3), majority_answer="1", majority_fraction=0.5)
    assert "no reward reaches" in judge(never_right).text


def test_the_margin_over_gold_answers_is_a_part_of_what_they_earn():
    assert judge(found(0.3, 0.6, reward=2.09), gold_reward=2.0).verdict == "ready for RL"
    assert judge(found(0.3, 0.6, reward=2.11), gold_reward=2.0).verdict == "reward broken"
    assert judge(replace(found(0.3, 0.6), mean_reward=0.0), gold_reward=0.0).verdict == "ready for RL"
