"""PCGrad from inner products against the paper's algorithm on the vectors themselves, in float64."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algo.gradient_surgery import project_conflicts


def pcgrad(vectors, orders):
    """Algorithm 1 of arXiv 2001.06782."""
    projected = [vector.clone() for vector in vectors]
    for i, own in enumerate(projected):
        for j in orders[i]:
            if j != i and own @ vectors[j] < 0:
                own -= (own @ vectors[j]) / (vectors[j] @ vectors[j]) * vectors[j]
    return sum(projected)


@given(size=st.integers(1, 6), length=st.integers(2, 12), seed=st.integers(0, 10_000))
@settings(max_examples=200, deadline=None)
def test_it_is_the_papers_algorithm(size, length, seed):
    chance = torch.Generator().manual_seed(seed)
    vectors = torch.randn(size, length, generator=chance, dtype=torch.float64)
    draw = random.Random(seed)
    orders = [draw.sample(range(size), size) for _ in range(size)]
    found = project_conflicts((vectors @ vectors.T).tolist(), orders)
    combined = torch.tensor(found.weights, dtype=torch.float64) @ vectors
    torch.testing.assert_close(combined, pcgrad(vectors, orders), atol=1e-9, rtol=1e-9)


def test_without_conflicts_it_is_the_sum():
    found = project_conflicts([[1.0, 0.5], [0.5, 2.0]], [[0, 1], [1, 0]])
    assert found.weights == [1.0, 1.0]
    assert (found.conflict_fraction, found.lowest_cosine) == (0.0, pytest.approx(0.5 / 2**0.5))


def test_a_task_without_gradient_changes_nothing():
    found = project_conflicts([[4.0, 0.0], [0.0, 0.0]], [[0, 1], [1, 0]])
    assert found.weights == [1.0, 1.0]
    assert found.lowest_cosine == 1.0


def test_the_figures_of_three_small_gradients():
    """One pair conflicts, one is at a right angle."""
    vectors = torch.tensor([[0.2, 0.0], [-0.1, 0.1], [0.0, 0.3]], dtype=torch.float64)
    found = project_conflicts((vectors @ vectors.T).tolist(), [[0, 1, 2]] * 3)
    assert found.conflict_fraction == pytest.approx(1 / 3)
    assert found.lowest_cosine == pytest.approx(-(0.5**0.5))
    assert project_conflicts([[0.0, 0.0], [0.0, 4.0]], [[0, 1], [1, 0]]).lowest_cosine == 1.0
