"""Every loss, normalisation and correction against the papers' formulas, token by token in float64; and how little a
loss depends on the way its step is cut."""

import itertools
import math

import pytest
import torch
from tests.algo.problem import LENGTHS, MAX_TOKENS, make_problem, stream
from tests.recipe_settings import rl

from slipstream.algo.importance_sampling import log_ratio_histogram, ratio_shares
from slipstream.algo.surrogate_losses import LOSSES, LossInputs
from slipstream.config.recipes import RECIPES, resolved

NUM_TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def problem():
    return make_problem()


def paper(problem, config):
    """Loss and gradients: loops over sequences and tokens, scalars in float64."""
    config = resolved(config)
    batch, total = problem.batch, torch.zeros((), dtype=torch.float64)
    for s, length in enumerate(LENGTHS):
        sequence, advantage = batch.sequences[s], torch.tensor(batch.advantages[s], dtype=torch.float32).item()
        new, entropy = [], []
        for t in range(length):
            row = problem.logits[s][t]
            log_p = row - torch.log(sum(torch.exp(x) for x in row))
            new.append(log_p[sequence.token_ids[2 + t]])
            entropy.append(-sum(torch.exp(x) * x for x in log_p))
        behaviour = [torch.tensor(x).item() for x in sequence.logprobs[2:]]
        old = behaviour if config.old_policy == "engine" else sequence.values("old_logprobs")
        reference = sequence.values("reference_logprobs")
        for t in range(length):
            term = token_loss(config, new, old, advantage, t)
            term = term * correction(config, old, behaviour, t)
            if config.kl_coef and config.arguments.kl_in == "loss":
                d = reference[t] - new[t]
                estimate = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[config.arguments.kl_estimator]
                term = term + config.kl_coef * estimate
            share = {"token": NUM_TOKENS, "sequence": len(LENGTHS) * length, "constant": len(LENGTHS) * MAX_TOKENS}
            total = total + term / share[config.normalize] - config.entropy_coef * entropy[t] / NUM_TOKENS
    gradients = torch.autograd.grad(total, problem.logits, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, problem.logits, strict=True)]
    return total.item(), torch.cat(gradients)


def token_loss(config, new, old, advantage, t):
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio = torch.exp(new[t] - old[t])
    if config.loss == "policy_gradient":
        return -ratio * advantage
    if config.loss == "cispo":
        weight = min(max(ratio.item(), low), high)
        return -weight * advantage * new[t]
    if config.loss == "gspo":
        # Equation 7: (pi(y) / pi_old(y)) ** (1 / |y|), from probabilities of whole sequences.
        probability, before = torch.exp(sum(new)), math.exp(sum(old))
        ratio = (probability / before) ** (1 / len(new))
    if config.loss == "gspo_token":
        value = math.exp(sum(a.item() - b for a, b in zip(new, old, strict=True)) / len(new))
        ratio = value * torch.exp(new[t]) / torch.exp(new[t]).detach()
    clipped = torch.clamp(ratio, low, high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    dual = config.arguments.clip_dual
    if dual is not None and advantage < 0 and objective.item() < dual * advantage:
        objective = torch.tensor(dual * advantage, dtype=torch.float64)
    return -objective


def correction(config, old, behaviour, t):
    kind = config.importance_sampling
    if kind == "none":
        return 1.0
    ratios = [math.exp(a - b) for a, b in zip(old, behaviour, strict=True)]
    weight = math.prod(ratios) if kind.startswith("sequence") else ratios[t]
    if kind.endswith("masked"):
        return weight if config.arguments.importance_floor <= weight <= config.arguments.importance_cap else 0.0
    return min(max(weight, config.arguments.importance_floor), config.arguments.importance_cap)


CONFIGS = {
    **{f"recipe {kind}": rl(kind=kind) for kind in RECIPES},
    **{
        f"{loss} {normalize}": rl(loss=loss, normalize=normalize)
        for loss, normalize in itertools.product(LOSSES, ("token", "sequence", "constant"))
    },
    **{
        f"{kind} floor {floor}": rl(importance_sampling=kind, importance_floor=floor, importance_cap=1.5)
        for kind in ("truncated", "masked", "sequence_truncated", "sequence_masked")
        for floor in ("auto", 0.7)
    },
    "IcePop": rl(importance_sampling="masked"),
    "no correction": rl(importance_sampling="none"),
    "symmetric clip": rl(clip_low=0.2, clip_high=0.2),
    "dual clip": rl(clip_dual=1.5),
    "decoupled PPO": rl(importance_cap=1e9),
    "ratio to the engine": rl(old_policy="engine"),
    "policy gradient to the engine": rl(old_policy="engine", loss="policy_gradient"),
    **{f"kl {k}": rl(kl_coef=0.3, kl_estimator=k, normalize="sequence") for k in ("k1", "k2", "k3")},
    "kl in the reward": rl(kl_coef=0.3, kl_in="reward"),
    "entropy": rl(entropy_coef=0.2, normalize="sequence"),
    "all at once": rl(
        loss="gspo", kl_coef=0.1, entropy_coef=0.1, importance_sampling="sequence_truncated", normalize="constant"
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_value_and_gradient_are_the_papers_however_the_step_is_cut(name, problem):
    expected_loss, expected = paper(problem, CONFIGS[name])
    whole = problem.ours(CONFIGS[name], max_tokens=1000)
    for loss, gradients, metrics in (whole, problem.ours(CONFIGS[name]), problem.ours(CONFIGS[name], packing=False)):
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
        assert metrics == pytest.approx(whole[2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_plain_policy_gradient(name):
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.3], requires_grad=True)
    advantages, index = torch.tensor([1.0, 1.0, -0.5, 2.0]), torch.tensor([0, 0, 1, 2])
    result = LOSSES[name](LossInputs(logprobs, logprobs.detach(), advantages, index, 3, 0.2, 0.28))
    (gradient,) = torch.autograd.grad(result.loss_N.sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages)
    assert all(not mask.any() for mask in result.counts.values())


def test_metrics_by_value(problem):
    batch = problem.batch
    _, _, metrics = problem.ours(rl(importance_sampling="masked", clip_dual=1.5))
    old = torch.cat(stream(batch, "old_logprobs")).double()
    behaviour = torch.tensor([x for s in batch.sequences for x in s.logprobs[2:]], dtype=torch.float64)
    targets = [torch.tensor(s.token_ids[2:]) for s in batch.sequences]
    new = torch.cat([x.detach().log_softmax(-1) for x in problem.logits])
    new = new.gather(1, torch.cat(targets)[:, None])[:, 0]
    weights = torch.exp(new - behaviour)
    ratio = torch.exp(new - old)
    assert metrics["effective_sample_size"] == pytest.approx((weights.sum() ** 2 / (weights**2).sum() / 21).item())
    assert metrics["ratio"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    d = old - behaviour
    assert metrics["mismatch/kl"] == pytest.approx((torch.exp(d) - 1 - d).mean().item(), rel=1e-5)
    outside = (d.exp() < 0.5) | (d.exp() > 5)
    assert metrics["importance_capped_fraction"] == pytest.approx(outside.double().mean().item())
    least, most = math.log(metrics["ratio_p01"]), math.log(metrics["ratio_p99"])
    assert 0.8 * ratio.min().log() >= least >= ratio.min().log()
    assert 0.8 * ratio.max().log() <= most <= ratio.max().log()
    bounds = [0.0, 0.5, 0.8, 0.95, 1.05, 1.25, 2.0, math.inf]
    for prefix, values in (("", ratio), ("mismatch/", d.exp())):
        told = [metrics[f"{prefix}ratio_{name}"] for name in ratio_shares(log_ratio_histogram(ratio))]
        exact = [((values > a) & (values <= b)).double().mean().item() for a, b in itertools.pairwise(bounds)]
        assert told == pytest.approx(exact)
        assert sum(told) == pytest.approx(1.0)
    advantages = torch.tensor(batch.advantages).repeat_interleave(torch.tensor(LENGTHS))
    assert metrics["clip_fraction_dual"] == pytest.approx(((ratio > 1.5) & (advantages < 0)).double().mean().item())
    assert metrics["clip_fraction_low"] == pytest.approx(((ratio < 0.8) & (advantages < 0)).double().mean().item())
