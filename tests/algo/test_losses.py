import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algo.importance_sampling import effective_sample_size, truncated_importance_weights
from slipstream.algo.surrogate_losses import clipped_policy_loss, kl_estimate, token_weights

LOGPROB = st.floats(-8.0, 0.0)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3.0, 3.0)), min_size=1, max_size=12)


def columns(tokens):
    return (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))


@settings(deadline=None)
@given(TOKENS)
def test_clipped_loss_is_ppos_surrogate(tokens):
    loss = clipped_policy_loss(*columns(tokens), clip_low=0.2, clip_high=0.28)
    for i, (new, old, advantage) in enumerate(tokens):
        ratio = math.exp(new - old)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        assert loss.loss_N[i].item() == pytest.approx(-surrogate, rel=1e-9, abs=1e-12)
        assert loss.clipped_low_N[i].item() == (ratio < 0.8 and advantage < 0)
        assert loss.clipped_high_N[i].item() == (ratio > 1.28 and advantage > 0)


def test_no_gradient_flows_exactly_where_the_clip_is_reported():
    new = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    loss = clipped_policy_loss(new, torch.zeros(5), advantages, 0.2, 0.28)
    loss.loss_N.sum().backward()
    assert new.grad is not None
    clipped = loss.clipped_low_N | loss.clipped_high_N
    assert clipped.tolist() == [True, True, False, False, False]
    assert (new.grad == 0).tolist() == clipped.tolist()
    # On-policy the gradient is that of plain policy gradient.
    assert new.grad[4].item() == -1.0


def test_a_ratio_at_the_bound_is_not_clipped():
    loss = clipped_policy_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]), 0.0, 0.0)
    assert not (loss.clipped_low_N | loss.clipped_high_N).any()


def test_importance_weights_are_capped_and_carry_no_gradient():
    old = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    weights = truncated_importance_weights(old, torch.zeros(3), cap=2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(-1.0)]))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_average_to_the_divergence_or_its_second_order(kind):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.45, 0.33, 0.22], dtype=torch.float64)
    estimate = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close(estimate, exact, rtol=0.1 if kind == "k2" else 1e-12, atol=0.0)


def test_k3_is_never_negative_and_exact_for_tiny_differences():
    difference = torch.logspace(-12, 0, 25, dtype=torch.float64)
    k3 = kl_estimate(torch.zeros_like(difference), difference, "k3")
    assert (k3 >= 0).all()
    torch.testing.assert_close(k3[12:], torch.exp(difference[12:]) - difference[12:] - 1, rtol=1e-4, atol=0.0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["token", "sequence"]))
def test_token_weights_add_up_to_the_divisor(lengths, normalize):
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    weights = token_weights(index, len(lengths), normalize)
    divisor = sum(lengths) if normalize == "token" else len(lengths)
    assert weights.sum().item() == pytest.approx(divisor)


@settings(deadline=None)
@given(st.lists(st.floats(-30.0, 30.0), min_size=1, max_size=30), st.floats(-500.0, 500.0))
def test_effective_sample_size_is_a_fraction_and_ignores_scale(ratios, shift):
    log_ratio = torch.tensor(ratios, dtype=torch.float64)
    size = effective_sample_size(log_ratio)
    assert 0.0 < size <= 1.0
    assert effective_sample_size(log_ratio + shift) == pytest.approx(size, rel=1e-6)


def test_effective_sample_size_by_value():
    assert effective_sample_size(torch.zeros(5)) == pytest.approx(1.0)
    # Weights 1 and 3: 16 / (2 * 10).
    assert effective_sample_size(torch.tensor([0.0, math.log(3.0)])) == pytest.approx(0.8)
    assert effective_sample_size(torch.tensor([0.0, 800.0])) == pytest.approx(0.5)
