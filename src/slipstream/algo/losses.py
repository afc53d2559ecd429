"""Per-token terms of the policy-gradient losses, and the weights that make token terms a mean.

Pure and differentiable in `logprobs_N` only; whatever is divided by the size of the optimizer step is the
objective's business, so that no function here depends on how a step is cut into micro-batches.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class ClippedLoss(NamedTuple):
    """The clipped surrogate, to be minimised, and where the clip took the gradient away."""

    loss_N: Tensor
    clipped_low_N: Tensor
    """True where the ratio fell below 1 - clip_low under a negative advantage."""
    clipped_high_N: Tensor
    """True where the ratio rose above 1 + clip_high under a positive advantage."""


def clipped_policy_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> ClippedLoss:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprobs - old_logprobs)`.

    PPO's surrogate (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, equation 8).
    """
    ratio_N = torch.exp(logprobs_N - old_logprobs_N)
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -torch.min(ratio_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        low_N = (ratio_N < 1.0 - clip_low) & (advantages_N < 0)
        high_N = (ratio_N > 1.0 + clip_high) & (advantages_N > 0)
    return ClippedLoss(loss_N, low_N, high_N)


def truncated_importance_weights(old_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, cap: float) -> Tensor:
    """`min(pi_old / pi_behaviour, cap)` for each token, detached (Espeholt et al., arXiv 1802.01561; TRL's
    `token_truncate`). Corrects for what differs between the engine that sampled and the trainer that learns.
    """
    return torch.exp(old_logprobs_N.detach() - behaviour_logprobs_N.detach()).clamp(max=cap)


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """One-sample estimates of KL(policy, reference) from tokens drawn from the policy.

    With `d = reference - logprobs`: k1 is `-d`, k2 is `d**2 / 2`, k3 is `exp(d) - d - 1` (Schulman,
    "Approximating KL divergence", 2020).
    """
    difference_N = reference_logprobs_N - logprobs_N
    if kind == "k1":
        return -difference_N
    if kind == "k2":
        return 0.5 * difference_N.square()
    return torch.expm1(difference_N) - difference_N


def token_weights(sequence_index_N: Tensor, num_sequences: int, normalize: Literal["token", "sequence"]) -> Tensor:
    """Weights whose sum over an optimizer step is the step's divisor, float32.

    `"token"`: 1 for every token, so the divisor is the number of tokens. `"sequence"`: 1 / (tokens of the
    token's own sequence), so the divisor is the number of sequences. A sequence must not be spread over
    micro-batches. `sequence_index_N` counts from 0 to `num_sequences - 1`.
    """
    if normalize == "token":
        return torch.ones(sequence_index_N.shape, dtype=torch.float32, device=sequence_index_N.device)
    lengths_S = torch.bincount(sequence_index_N, minlength=num_sequences)
    return (1.0 / lengths_S.to(torch.float32))[sequence_index_N]


def effective_sample_size(log_ratio_N: Tensor) -> float:
    """Kish's `(sum w)**2 / (N sum w**2)` of `w = exp(log_ratio)`, in (0, 1]; 1 is on-policy.

    Safe for any size of ratio: the largest is taken out first. `log_ratio_N` must not be empty.
    """
    log_ratio_N = log_ratio_N.detach().to(torch.float64)
    twice = 2.0 * torch.logsumexp(log_ratio_N, 0) - torch.logsumexp(2.0 * log_ratio_N, 0)
    return min(1.0, (twice.exp() / log_ratio_N.numel()).item())
