"""Figures of several samples a task: by definition, against verl's own function, and their intervals by simulation."""

import ast
import itertools
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.algo.statistics import wilson_interval, wilson_of
from slipstream.algo.validation import (
    Sampled,
    best_and_worst,
    figures,
    fraction_interval,
    majority,
    mean_interval,
    pass_at,
    subset_sizes,
)

REFERENCE = Path(os.environ.get("SLIPSTREAM_REFERENCE", Path(sys.prefix) / "reference"))
VERL = REFERENCE / "verl/trainer/ppo/metric_utils.py"
NUM_DRAWS = 1000
"""verl's."""


def drawn_majority(values, votes):
    """The value of the vote that most of these draws gave; of equal ones the first, and of its draws the first."""
    classes = {}
    for value, vote in zip(values, votes, strict=True):
        classes.setdefault(vote, []).append(value)
    return max(classes.values(), key=len)[0]


def over(draws, values, votes):
    """Mean and standard deviation of best, worst and majority over these draws, by their definitions."""
    rows = [(values[draw], [votes[place] for place in draw]) for draw in np.asarray(draws)]
    found = {
        "best": [row.max() for row, _ in rows],
        "worst": [row.min() for row, _ in rows],
        "maj": [drawn_majority(row, voted) for row, voted in rows],
    }
    return {name: (np.mean(each), np.std(each)) for name, each in found.items()}


def exact(values, votes, k):
    best, worst = best_and_worst(values, k)
    return {"best": best, "worst": worst, "maj": majority(values, votes, k)}


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_is_the_mean_over_all_draws(num_samples):
    rng = np.random.default_rng(num_samples)
    for k, num_votes in itertools.product((1, 2, 3, 4, 5), (1, 2, 4)):
        values, votes = rng.random(num_samples), rng.integers(0, num_votes, num_samples).tolist()
        every = over(list(itertools.product(range(num_samples), repeat=k)), values, votes)
        for name, found in exact(values, votes, k).items():
            assert found == pytest.approx(every[name], abs=1e-12), (name, k, votes)


def test_by_value():
    found = figures([Sampled((1.0, 0.0, 0.0, 0.0), ("a", "b", "b", "c"))], is_fraction=True)
    assert found["mean@4"].value == 0.25
    assert found["std@4"].value == pytest.approx(np.std([1, 0, 0, 0]))
    assert found["best@2"].value == pytest.approx(1 - 0.75**2)
    assert found["best@4"].value == pytest.approx(1 - 0.75**4)
    assert found["worst@2"].value == pytest.approx(0.25**2)
    assert found["pass@2"].value == pytest.approx(0.5)
    assert found["pass@4"].value == 1.0
    # Of two draws both are "a" (1/16), or one is and the other, drawn later, is not (2 * 1/4 * 3/4 / 2).
    assert found["maj@2"].value == pytest.approx(1 / 16 + 3 / 16)
    assert list(figures([Sampled((1.0,))], is_fraction=True)) == ["mean@1"]
    assert not any(name.startswith(("maj", "pass")) for name in figures([Sampled((0.5, 2.0))], is_fraction=False))


def test_sizes_are_verls():
    assert [subset_sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def test_pass_at_counts_subsets():
    for num_right, k in itertools.product(range(6), range(1, 6)):
        subsets = list(itertools.combinations([1] * num_right + [0] * (5 - num_right), k))
        assert pass_at(num_right, 5, k) == pytest.approx(np.mean([max(subset) for subset in subsets]))


def test_majorities_of_many_samples_stay_exact():
    rng = np.random.default_rng(0)
    votes = rng.integers(0, 60, 128).tolist()
    mean, spread = majority([1.0] * 128, votes, 128)
    assert mean == pytest.approx(1.0, abs=1e-12)
    assert spread == pytest.approx(0.0, abs=1e-6)


@pytest.fixture(scope="module")
def verl():
    """verl's functions, from its source: its module imports all of verl."""
    if not VERL.is_file():
        pytest.skip("verl's source is not there: scripts/install.py brings it with the extra dev")
    names = {"bootstrap_metric", "calc_maj_val", "process_validation_metrics"}
    tree = ast.parse(VERL.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in wanted} == names
    module = {"np": np, "defaultdict": defaultdict, "partial": partial, "Any": Any, "Callable": Callable}
    exec(compile(ast.Module(wanted, []), str(VERL), "exec"), module)
    return module


def samples(num_tasks, num_samples):
    """Data sources, task ids, rewards and votes, one of each for a sample, in a mixed order."""
    rng = np.random.default_rng(num_samples)
    rows = [
        (f"source{task % 3}", f"task{task}", float(rng.choice([0.0, 0.25, 1.0])), str(rng.integers(0, 3)))
        for _ in range(num_samples)
        for task in range(num_tasks)
    ]
    return [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("num_samples", [1, 3, 8])
def test_agrees_with_verl(verl, num_samples):
    """On the same numbers: means and standard deviations exactly; what verl draws, by our definitions exactly with its
    draws, and within the error of its draws with the expectation that is reported."""
    sources, tasks, rewards, votes = samples(12, num_samples)
    theirs = verl["process_validation_metrics"](sources, tasks, {"reward": rewards, "pred": votes})
    assert set(theirs) == {"source0", "source1", "source2"}
    for source, found in theirs.items():
        ids = list(dict.fromkeys(t for s, t in zip(sources, tasks, strict=True) if s == source))
        held = [[place for place, task in enumerate(tasks) if task == each] for each in ids]
        grouped = [
            (np.array([rewards[place] for place in places]), [votes[place] for place in places]) for places in held
        ]
        ours = figures([Sampled(tuple(values), tuple(voted)) for values, voted in grouped], is_fraction=False)
        expected = {
            name for each in ours for name in [each if each[0] in "ms" and "maj" not in each else f"{each}/mean"]
        }
        assert expected <= set(found["reward"])
        assert len(found["reward"]) == len(ours) + sum("/std" in name for name in found["reward"])
        for name in (f"mean@{num_samples}", f"std@{num_samples}")[: 1 + (num_samples > 1)]:
            assert ours[name].value == pytest.approx(found["reward"][name], abs=1e-15)
        for k in subset_sizes(num_samples):
            np.random.seed(42)
            draws = np.random.choice(num_samples, size=(NUM_DRAWS, k), replace=True)
            by_draws = [over(draws, values, voted) for values, voted in grouped]
            by_all = [exact(values, voted, k) for values, voted in grouped]
            for name in ("best", "worst", "maj"):
                for part, moment in enumerate(("mean", "std")):
                    value = found["reward"][f"{name}@{k}/{moment}"]
                    assert value == pytest.approx(np.mean([each[name][part] for each in by_draws]), abs=1e-15)
                value = found["reward"][f"{name}@{k}/mean"]
                assert ours[f"{name}@{k}"].value == pytest.approx(np.mean([each[name][0] for each in by_all]))
                # verl draws the same places for every task, so its errors may add up.
                error = np.mean([each[name][1] for each in by_all]) / np.sqrt(NUM_DRAWS)
                assert abs(ours[f"{name}@{k}"].value - value) < 4 * error + 1e-12


def test_of_one_sample_a_task_the_interval_is_wilsons():
    for num_right, num_tasks in ((0, 20), (7, 20), (20, 20), (1, 1)):
        values = np.array([1.0] * num_right + [0.0] * (num_tasks - num_right))
        assert fraction_interval(values) == pytest.approx(wilson_interval(num_right, num_tasks), abs=1e-12)


def test_more_samples_of_a_task_are_worth_no_more_than_they_tell():
    same = np.array([1.0, 0.0] * 50)  # every task is always or never right
    assert fraction_interval(same, 8.0) == pytest.approx(wilson_interval(50, 100))
    low, high = fraction_interval(np.array([0.5, 0.375, 0.625, 0.5] * 25), 8.0)
    assert (low, high) == pytest.approx(wilson_interval(400, 800))
    assert fraction_interval(np.ones(30), 8.0) == pytest.approx(wilson_interval(30, 30))


def test_intervals_hold_the_true_value_as_often_as_they_say():
    """Tasks of different difficulty, 4 samples of each; the truth is that of all tasks."""
    rng = np.random.default_rng(7)
    truth_mean, truth_best = 0.3, None
    chances = rng.beta(0.6, 1.4, size=200_000)
    truth_best = np.mean(1 - (1 - np.stack([chances] * 2)).prod(0))
    held = {"mean": 0, "pass": 0, "naive": 0}
    rounds = 1000
    for _ in range(rounds):
        right = rng.binomial(4, rng.beta(0.6, 1.4, size=100))
        low, high = fraction_interval(right / 4, 4.0)
        held["mean"] += low <= truth_mean <= high
        low, high = wilson_interval(int(right.sum()), 400)
        held["naive"] += low <= truth_mean <= high
        low, high = fraction_interval(np.array([pass_at(int(n), 4, 2) for n in right]), 2.0)
        held["pass"] += low <= truth_best <= high
    assert 0.93 < held["mean"] / rounds < 0.97
    assert 0.93 < held["pass"] / rounds < 0.97
    assert held["naive"] / rounds < 0.9, "as if samples of one task were independent"


def test_the_mean_of_rewards_has_students_interval():
    values = np.array([1.0, 2.0, 4.0])
    low, high = mean_interval(values)
    assert (low + high) / 2 == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(4.30265 * values.std(ddof=1) / np.sqrt(3), rel=1e-5)
    assert mean_interval(values[:1]) == (-np.inf, np.inf)


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
    few = figures([Sampled((1.0, 0.0)), Sampled((1.0, 1.0)), Sampled((0.0, 0.0))], is_fraction=True)["std@2"]
    assert few.low == 0.0 < few.high, "no deviation is below 0"
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
