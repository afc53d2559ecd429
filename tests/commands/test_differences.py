import numpy as np
import pytest

from slipstream.algo.statistics import wilson_interval
from slipstream.commands.differences import PairedDifference, difference_interval, paired_difference


def test_the_paired_difference_by_value():
    found = paired_difference([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0])
    assert found.value == 0.25
    assert (found.high - found.low) / 2 == pytest.approx(3.1824 * 0.5 / 2, rel=2e-3)
    assert not found.differs
    # Tables, 3 degrees of freedom: 3.1824 at 97.5 %, 0.9785 at 80 %.
    assert found.detectable == pytest.approx((3.1824 + 0.9785) * 0.5 / 2, rel=2e-3)
    with pytest.raises(ValueError, match="two or more"):
        paired_difference([0.0], [1.0])


def test_tasks_that_all_differ_alike_leave_doubt():
    same = paired_difference([0.1] * 60, [0.3] * 60)
    assert (same.low, same.high) == pytest.approx((0.15, 0.25))
    assert same.differs
    none = paired_difference([0.5] * 60, [0.5] * 60)
    assert (none.low, none.value, none.high) == pytest.approx((-0.05, 0.0, 0.05))
    assert not none.differs


def called_different(rng, before, after, num_samples):
    """Whether two models with these chances to solve each task are called different."""
    first, second = rng.binomial(num_samples, before), rng.binomial(num_samples, after)
    return paired_difference((first / num_samples).tolist(), (second / num_samples).tolist())


@pytest.mark.parametrize("num_samples", [1, 4])
def test_equal_models_are_called_different_as_often_as_the_level_says(num_samples):
    rng = np.random.default_rng(1)
    count = 0
    for _ in range(1000):
        chances = rng.beta(0.5, 0.5, size=500)
        count += called_different(rng, chances, chances, num_samples).differs
    assert 30 <= count <= 70


@pytest.mark.parametrize("num_samples", [1, 4])
def test_ten_points_on_500_tasks_are_found(num_samples):
    rng = np.random.default_rng(2)
    count, detectable = 0, 0.0
    for _ in range(300):
        chances = 0.9 * rng.beta(0.5, 0.5, size=500)
        found = called_different(rng, chances, chances + 0.1, num_samples)
        count += found.low > 0.0
        detectable += found.detectable / 300
    assert count >= 0.95 * 300
    # A true difference of the size that could have been found is found in 80 % of the cases.
    count = 0
    for _ in range(600):
        chances = (1 - detectable) * rng.beta(0.5, 0.5, size=500)
        count += called_different(rng, chances, chances + detectable, num_samples).differs
    assert 0.74 <= count / 600 <= 0.86


def test_the_difference_of_independent_fractions_by_value():
    # Newcombe (1998), Stat. Med. 17, table II: 56 of 70 and 48 of 80, method 10.
    before, after = (48 / 80, *wilson_interval(48, 80)), (56 / 70, *wilson_interval(56, 70))
    assert difference_interval(before, after) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_bound_at_0_is_no_difference():
    assert not PairedDifference(0.5, 0.0, 1.0, 1.0, 9).differs
    assert not PairedDifference(-0.5, -1.0, 0.0, 1.0, 9).differs
    assert PairedDifference(-0.5, -0.9, -0.1, 1.0, 9).differs


def test_two_tasks_are_enough():
    found = paired_difference([0.0, 0.0], [1.0, 0.0])
    assert found.high - found.value == pytest.approx(12.7062 * 0.5, rel=1e-4)
