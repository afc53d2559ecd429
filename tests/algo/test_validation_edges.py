"""Figures of validation where there is little to average: groups of no, one or unlike tasks, and their intervals."""

import math

import numpy as np
import pytest

from slipstream.algo.statistics import wilson_interval, wilson_of
from slipstream.algo.validation import Sampled, best_and_worst, figures, fraction_interval, majority, mean_interval


def test_of_no_tasks_there_are_no_figures():
    assert figures([], is_fraction=True) == {}


def test_of_unequal_votes_the_chances_go_with_their_samples():
    """In whatever order the votes come, with the value of each."""
    values, votes = [1.0, 0.0, 0.0, 0.0], ["b", "a", "a", "a"]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3]):
        mean, spread = majority([values[i] for i in order], [votes[i] for i in order], 3)
        # Two or three of three draws are b; with three draws and two votes there are no ties.
        chance = 3 * (1 / 4) ** 2 * (3 / 4) + (1 / 4) ** 3
        assert (mean, spread) == pytest.approx((chance, math.sqrt(chance * (1 - chance))))


def test_tasks_of_fewer_samples_count_as_what_they_have():
    tasks = [Sampled((1.0, 0.0, 0.0, 0.0), ("a", "b", "b", "b")), Sampled((1.0, 0.0), ("a", "b"))]
    found = figures(tasks, is_fraction=True)
    assert list(found) == ["mean@4", "std@4", "best@2", "worst@2", "maj@2", "pass@2", "best@4", "worst@4", "maj@4"]
    assert found["mean@4"].value == (0.25 + 0.5) / 2
    assert found["std@4"].value == pytest.approx((math.sqrt(3 / 16) + 0.5) / 2)
    assert found["best@2"].value == pytest.approx((1 - 9 / 16 + 3 / 4) / 2)
    assert found["worst@4"].value == pytest.approx((1 / 256 + 1 / 16) / 2)
    assert found["pass@2"].value == pytest.approx((0.5 + 1.0) / 2)
    unvoted = figures([tasks[0], Sampled((1.0, 0.0))], is_fraction=True)
    assert not any(name.startswith("maj") for name in unvoted), "all or none"


def test_the_interval_of_each_figure_counts_the_samples_that_it_takes():
    """Eight tasks of four samples: a mean is worth up to four a task, best@2 two, and best@4 one."""
    tasks = [Sampled((1.0, 0.0, 0.0, 1.0)), Sampled((1.0, 0.0, 0.0, 0.0))] * 4
    found = figures(tasks, is_fraction=True)
    mean = found["mean@4"]
    assert (mean.low, mean.high) == pytest.approx(wilson_of(0.375, 8 * 4))
    for name, worth in (("best@2", 2), ("worst@4", 1), ("pass@2", 2), ("pass@4", 1)):
        figure = found[name]
        assert (figure.low, figure.high) == pytest.approx(wilson_of(figure.value, 8 * worth)), name
    spread = found["std@4"]
    values = [float(np.std(task.values)) for task in tasks]
    assert (spread.low, spread.high) == pytest.approx(mean_interval(np.array(values))), "it is no fraction"
    other = figures(tasks, is_fraction=False)
    assert (other["mean@4"].low, other["mean@4"].high) == pytest.approx(mean_interval(np.array([0.5, 0.25] * 4)))


def test_where_no_variance_is_seen_a_task_counts_once():
    assert fraction_interval(np.full(10, 0.5), 8.0) == pytest.approx(wilson_interval(5, 10))
    assert fraction_interval(np.array([1.0, 0.0]), 0.25) == pytest.approx(wilson_interval(1, 2))


def test_two_tasks_have_students_interval():
    low, high = mean_interval(np.array([1.0, 3.0]))
    assert (low, high) == pytest.approx((2 - 12.7062, 2 + 12.7062), rel=1e-4)


def test_equal_values_have_no_spread():
    assert best_and_worst([0.3] * 3, 2) == (pytest.approx((0.3, 0.0), abs=1e-8), pytest.approx((0.3, 0.0), abs=1e-8))
    assert majority([0.7], [None], 3) == pytest.approx((0.7, 0.0), abs=1e-8)
