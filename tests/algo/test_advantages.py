import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algo.advantages import (
    BASELINES,
    group_advantages,
    signal_fraction,
)
from slipstream.algo.shaping import best_of_group, length_reward, overlong_punishment

GROUPS = st.lists(st.lists(st.integers(-20, 20), min_size=1, max_size=6), min_size=1, max_size=5)


def flat(groups):
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    return rewards, torch.tensor([number for number, group in enumerate(groups) for _ in group])


def reference(groups, scale, baseline="group_mean"):
    """The papers' formulas, one reward at a time, with Python's own statistics."""

    def spread(values):
        return statistics.stdev(values) + 1e-4 if len(values) > 1 else 1e-4

    every = [reward for group in groups for reward in group]
    advantages = []
    for group in groups:
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            if baseline == "group_mean":
                compared = group
            else:
                compared = every if baseline == "batch_mean" else others or [reward]
            advantages.append(0.0 if baseline == "none" else reward - statistics.fmean(compared))
    if scale == "std":
        spreads = [spread(group) for group in groups for _ in group]
        advantages = [a / s for a, s in zip(advantages, spreads, strict=True)]
    elif scale == "batch":
        advantages = [a / spread(every) for a in advantages]
    elif scale == "whiten":
        mean = statistics.fmean(advantages)
        advantages = [(a - mean) / spread(advantages) for a in advantages]
    return torch.tensor(advantages, dtype=torch.float64)


SCALES = st.sampled_from(["std", "batch", "whiten", "none"])
NAMES = st.sampled_from(sorted(BASELINES))


@settings(deadline=None)
@given(GROUPS, SCALES, NAMES, st.integers(-1000, 1000), st.randoms(use_true_random=False))
def test_equals_the_formula(groups, scale, name, shift, random):
    """In whatever order the samples come, and whatever is added to all rewards."""
    rewards, ids = flat(groups)
    order = list(range(len(rewards)))
    random.shuffle(order)
    advantages = group_advantages(rewards[order] + shift, ids[order], scale, BASELINES[name])
    torch.testing.assert_close(advantages.double(), reference(groups, scale, name)[order], rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(GROUPS, st.integers(1, 6))
def test_the_best_of_a_group(groups, num_best):
    rewards, ids = flat(groups)
    kept = best_of_group(rewards, ids, num_best).tolist()
    start = 0
    for group in groups:
        own = kept[start : start + len(group)]
        start += len(group)
        order = sorted(range(len(group)), key=lambda i: (-group[i], i))
        assert own == [i in order[:num_best] for i in range(len(group))]


def test_length_reward_by_kimis_formula():
    lengths, right = [10, 30, 20, 30, 7, 7], [True, True, False, False, True, False]
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    # 0.5 - (length - 10) / 20 in the first group, at most 0 where wrong; equal lengths say nothing.
    found = length_reward(torch.tensor(lengths), torch.tensor(right), ids)
    assert found.tolist() == [0.5, -0.5, 0.0, -0.5, 0.0, 0.0]
    for right, wanted in (([True, True], [0.5, -0.5]), ([False, True], [0.0, -0.5])):
        assert length_reward(torch.tensor([10, 11]), torch.tensor(right), torch.zeros(2).long()).tolist() == wanted


def test_overlong_punishment_by_dapos_formula():
    lengths = torch.tensor([1, 16, 17, 18, 20, 21])
    assert overlong_punishment(lengths, 20, 4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_punishment(lengths, 20, 0).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    ids = torch.arange(4).repeat_interleave(torch.tensor([1, 3, 6, 10]))  # of some sizes sums are rounded
    rewards = torch.full((20,), 0.1, dtype=torch.float64)
    assert torch.equal(group_advantages(rewards, ids, scale), torch.zeros(20))
    assert signal_fraction(rewards, ids) == 0.0


def test_signal_fraction_counts_groups_not_samples():
    assert signal_fraction(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([4, 4, 9, 9, 9])) == 0.5
    assert signal_fraction(torch.zeros(0), torch.zeros(0, dtype=torch.long)) == 0.0


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="equally long"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long), "std")


def test_of_many_equal_rewards_the_first_are_best():
    kept = best_of_group(torch.ones(300), torch.zeros(300, dtype=torch.long), 3)
    assert kept.nonzero()[:, 0].tolist() == [0, 1, 2]


def test_a_baseline_by_itself():
    found = BASELINES["group_mean"](torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))
    assert found.tolist() == [-1.0, 1.0, 0.0]
