"""Weights at their bounds, and the figures of a step's ratios, by value."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algo.importance_sampling import (
    difference_means,
    difference_sums,
    importance_weights,
    log_ratio_histogram,
    ratio_quantiles,
    ratio_shares,
    sequence_lengths,
)


def weights_of(ratios, kind, floor, cap):
    logs = torch.tensor(ratios, dtype=torch.float64).log()
    weights, outside = importance_weights(
        logs, torch.zeros_like(logs), torch.arange(len(ratios)), len(ratios), kind, floor, cap
    )
    return weights.tolist(), outside.tolist()


@pytest.mark.parametrize("kind", ["masked", "sequence_masked", "sequence_truncated"])
def test_a_ratio_at_a_bound_is_inside(kind):
    assert weights_of([1.0], kind, 1.0, 1.0) == ([1.0], [False])


def test_truncated_weights_are_told():
    weights, outside = weights_of([0.5, 1.5, 3.0], "truncated", 0.0, 2.0)
    assert weights == pytest.approx([0.5, 1.5, 2.0])
    assert outside == [False, False, True]
    weights, outside = weights_of([0.5, 1.5, 3.0], "truncated", 1.0, 2.0)
    assert weights == pytest.approx([1.0, 1.5, 2.0])
    assert outside == [True, False, True]


def test_lengths_of_sequences():
    lengths = sequence_lengths(torch.tensor([0, 0, 2]), 3)
    assert lengths.tolist() == [2.0, 0.0, 1.0]
    assert lengths.dtype == torch.float32


@given(st.floats(-19.9, 19.9))
def test_a_quantile_is_exact_to_a_fifth_of_its_distance_from_1(log_ratio):
    (found,) = ratio_quantiles(log_ratio_histogram(torch.tensor([log_ratio], dtype=torch.float64)), [0.5])
    if abs(log_ratio) < 0.99e-4:
        assert found == 1.0
    elif abs(log_ratio) > 1.01e-4:
        assert 0.8 * abs(log_ratio) <= math.log(found) * math.copysign(1.0, log_ratio) <= abs(log_ratio) + 1e-9


def test_quantiles_and_shares_of_a_step():
    histogram = log_ratio_histogram(torch.tensor([0.0, 0.0, 0.0, -50.0]))
    histogram += log_ratio_histogram(torch.tensor([math.log(1.5), 50.0, 50.0, 50.0]))
    assert histogram.sum() == 8
    found = ratio_quantiles(histogram, [0.1, 0.4, 0.9])
    assert found == pytest.approx([math.exp(-20), 1.0, math.exp(20)])
    shares = ratio_shares(histogram)
    assert shares == {
        "below_0.5": 0.125,
        "0.5_to_0.8": 0.0,
        "0.8_to_0.95": 0.0,
        "0.95_to_1.05": 0.375,
        "1.05_to_1.25": 0.0,
        "1.25_to_2": 0.125,
        "above_2": 0.375,
    }
    assert sum(ratio_shares(log_ratio_histogram(torch.zeros(1))).values()) == 1.0
    assert not any(ratio_shares(log_ratio_histogram(torch.zeros(0))).values())


def test_differences_by_position_and_probability():
    positions = torch.tensor([1, 63, 64, 127, 128, 40_000])
    logprobs = torch.tensor([0.5, 0.05, 0.95, 0.005, 0.2, 0.2]).log()
    differences = torch.tensor([1.0, -3.0, 5.0, 7.0, -9.0, 11.0])
    halves = [difference_sums(differences[h], positions[h], logprobs[h]) for h in (slice(0, 4), slice(4, 6))]
    assert difference_means({name: halves[0][name] + halves[1][name] for name in halves[0]}) == {
        "at_position_0": 2.0,
        "at_position_64": 6.0,
        "at_position_128": 9.0,
        "at_position_32768": 11.0,
        "at_probability_0": 7.0,
        "at_probability_0.01": 3.0,
        "at_probability_0.1": 10.0,
        "at_probability_0.5": 1.0,
        "at_probability_0.9": 5.0,
    }
    assert difference_means({}) == {}
