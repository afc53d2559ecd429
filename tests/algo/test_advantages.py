import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algo.advantages import group_advantages, signal_fraction

GROUPS = st.lists(st.lists(st.integers(-20, 20), min_size=1, max_size=6), min_size=1, max_size=5)


def flat(groups):
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    return rewards, torch.tensor([number for number, group in enumerate(groups) for _ in group])


def reference(groups, scale):
    """GRPO's formula, one group at a time, with Python's own statistics."""
    import statistics

    advantages = []
    for group in groups:
        mean = statistics.fmean(group)
        spread = statistics.stdev(group) if len(group) > 1 else 0.0
        divisor = spread + 1e-4 if scale == "std" else 1.0
        advantages += [(reward - mean) / divisor for reward in group]
    return torch.tensor(advantages, dtype=torch.float64)


@settings(deadline=None)
@given(GROUPS, st.sampled_from(["std", "none"]))
def test_equals_the_formula(groups, scale):
    advantages = group_advantages(*flat(groups), scale)
    torch.testing.assert_close(advantages.double(), reference(groups, scale), rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(GROUPS, st.integers(-1000, 1000), st.sampled_from(["std", "none"]))
def test_adding_a_constant_to_all_rewards_changes_nothing(groups, shift, scale):
    rewards, ids = flat(groups)
    assert torch.equal(group_advantages(rewards, ids, scale), group_advantages(rewards + shift, ids, scale))


@settings(deadline=None)
@given(GROUPS, st.randoms(use_true_random=False))
def test_order_of_the_samples_does_not_matter(groups, random):
    rewards, ids = flat(groups)
    order = list(range(len(rewards)))
    random.shuffle(order)
    torch.testing.assert_close(
        group_advantages(rewards[order], ids[order], "std"), group_advantages(rewards, ids, "std")[order]
    )


@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    rewards, ids = torch.full((7,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    assert torch.equal(group_advantages(rewards, ids, scale), torch.zeros(7))
    assert signal_fraction(rewards, ids) == 0.0


def test_signal_fraction_counts_groups_not_samples():
    assert signal_fraction(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([4, 4, 9, 9, 9])) == 0.5
    assert signal_fraction(torch.zeros(0), torch.zeros(0, dtype=torch.long)) == 0.0


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="equally long"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long), "std")
