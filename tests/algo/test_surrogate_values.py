"""Every loss by value: two sequences, ratios inside and outside the clip bounds, advantages of both signs."""

import math

import pytest
import torch

from slipstream.algo.surrogate_losses import LOSSES, LossInputs, kl_estimate, token_weights

RATIOS = [0.5, 0.5, 1.0, 2.0, 2.0, 8.0]
ADVANTAGES = [-1.0, 1.0, 2.0, -1.0, 1.0, -2.0]
INDEX = [0, 0, 0, 1, 1, 1]


def inputs(**changes):
    old = torch.full((6,), -3.0, dtype=torch.float64)
    given = {
        "logprobs_N": (old + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_(),
        "old_logprobs_N": old,
        "advantages_N": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "sequence_index_N": torch.tensor(INDEX),
        "num_sequences": 2,
        "clip_low": 0.2,
        "clip_high": 0.3,
    }
    return LossInputs(**given | changes)


def computed(name, **changes):
    """Loss, gradient, and the places of each mask."""
    given = inputs(**changes)
    found = LOSSES[name](given)
    assert not found.log_ratio_N.requires_grad
    (gradient,) = torch.autograd.grad(found.loss_N.sum(), given.logprobs_N)
    places = {key: mask.nonzero()[:, 0].tolist() for key, mask in found.counts.items()}
    return found.loss_N.tolist(), gradient.tolist(), places, found.log_ratio_N.exp().tolist()


def test_clip():
    loss, gradient, places, ratios = computed("clip")
    assert loss == pytest.approx([0.8, -0.5, -2.0, 2.0, -1.3, 16.0])
    assert gradient == pytest.approx([0.0, -0.5, -2.0, 2.0, 0.0, 16.0])
    assert places == {"clip_fraction_low": [0], "clip_fraction_high": [4]}
    assert ratios == pytest.approx(RATIOS)


def test_dual_clip_bounds_what_a_negative_advantage_costs():
    loss, gradient, places, ratios = computed("clip", clip_dual=3.0)
    assert loss == pytest.approx([0.8, -0.5, -2.0, 2.0, -1.3, 6.0])
    assert gradient == pytest.approx([0.0, -0.5, -2.0, 2.0, 0.0, 0.0])
    assert places == {"clip_fraction_low": [0], "clip_fraction_high": [4], "clip_fraction_dual": [5]}
    assert ratios == pytest.approx(RATIOS)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo(name):
    loss, gradient, places, ratios = computed(name)
    low, high = 0.25 ** (1 / 3), 32 ** (1 / 3)
    assert ratios == pytest.approx([low] * 3 + [high] * 3)
    assert loss == pytest.approx([0.8, -low, -2 * low, high, -1.3, 2 * high])
    assert places == {"clip_fraction_low": [0], "clip_fraction_high": [4]}
    if name == "gspo":  # each token's share of its sequence's mean
        assert gradient == pytest.approx([-low] * 3 + [high] * 3)
    else:
        assert gradient == pytest.approx([0.0, -low, -2 * low, high, 0.0, 2 * high])


def test_cispo():
    loss, gradient, places, ratios = computed("cispo")
    weights = [0.8, 0.8, 1.0, 1.3, 1.3, 1.3]
    logprobs = [-3.0 + math.log(ratio) for ratio in RATIOS]
    assert gradient == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES, strict=True)])
    assert loss == pytest.approx([g * logprob for g, logprob in zip(gradient, logprobs, strict=True)])
    assert places == {"clip_fraction_low": [0, 1], "clip_fraction_high": [3, 4, 5]}
    assert ratios == pytest.approx(RATIOS)


def test_policy_gradient():
    loss, gradient, places, ratios = computed("policy_gradient")
    assert loss == gradient == pytest.approx([0.5, -0.5, -2.0, 2.0, -2.0, 16.0])
    assert (places, ratios) == ({}, pytest.approx(RATIOS))


@pytest.mark.parametrize("name", ["clip", "gspo", "gspo_token", "cispo"])
def test_an_advantage_of_0_or_a_ratio_within_the_bounds_is_not_clipped(name):
    old = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    changes = {"old_logprobs_N": old, "sequence_index_N": torch.arange(3), "num_sequences": 3}
    changes |= {"logprobs_N": old.clone().requires_grad_(), "clip_low": 0.0, "clip_high": 0.0, "clip_dual": 1.0}
    changes |= {"advantages_N": torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)}
    _, _, places, _ = computed(name, **changes)
    assert not any(places.values())
    within = {"logprobs_N": (old + torch.tensor([0.9, 1.1, 0.9]).double().log()).requires_grad_(), "clip_dual": None}
    within |= {"clip_low": 0.2, "clip_high": 0.3, "advantages_N": torch.tensor([-1.0, -1.0, 1.0]).double()}
    assert not any(computed(name, **changes | within)[2].values())
    if name != "cispo":
        for shift in (-2.0, 2.0):
            moved = changes | {"logprobs_N": (old + shift).requires_grad_(), "advantages_N": torch.zeros(3).double()}
            assert not any(computed(name, **moved)[2].values())


@pytest.mark.parametrize(("kind", "value"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_estimates_of_the_divergence(kind, value):
    found = kl_estimate(torch.tensor([-2.0, -2.0]).double(), torch.tensor([-1.5, -2.0]).double(), kind)
    assert found.tolist() == pytest.approx([value, 0.0])


@pytest.mark.parametrize(
    ("normalize", "weights"), [("token", [1.0] * 4), ("constant", [1.0] * 4), ("sequence", [1 / 3] * 3 + [1.0])]
)
def test_weights_of_tokens(normalize, weights):
    found = token_weights(torch.tensor([0, 0, 0, 1]), 2, normalize)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(weights)


def test_k3_is_never_negative_and_exact_for_tiny_differences():
    difference = torch.logspace(-12, 0, 25, dtype=torch.float64)
    k3 = kl_estimate(torch.zeros_like(difference), difference, "k3")
    assert (k3 >= 0).all()
    torch.testing.assert_close(k3[12:], torch.exp(difference[12:]) - difference[12:] - 1, rtol=1e-4, atol=0.0)
