"""Per-token terms of the policy-gradient losses, and the weights for a mean of token terms.

Pure, and differentiable in `logprobs_N` only. The objective divides by the size of the optimizer step: no
function here depends on the split into micro-batches. A loss is a function of `LossInputs`; `LOSSES` maps the names of
a run file to losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.algo.importance_sampling import sequence_lengths, sequence_sums


class Streams(dict[str, Tensor]):
    """Per-token values by name; an unknown name is a LookupError with the remedy."""

    def __missing__(self, name: str) -> Tensor:
        raise LookupError(
            f"there is no stream {name!r}, only {', '.join(sorted(self))}: write it in `credit`, or let `reads` name it"
        )


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss: N trainable tokens of S whole sequences of a micro-batch."""

    logprobs_N: Tensor
    """By the current weights; the only input with a gradient."""
    old_logprobs_N: Tensor
    """The denominator of the importance ratio."""
    advantages_N: Tensor
    sequence_index_N: Tensor
    """Sequence of each token, 0 to S - 1."""
    num_sequences: int
    clip_low: float
    clip_high: float
    clip_dual: float | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """All per-token values of the micro-batch by name, `[N]` or `[N, k]`."""
    entropy_N: Tensor | None = None
    """The policy's entropy; it has a gradient."""

    def sequence_means(self, values_N: Tensor) -> Tensor:
        """The mean over a token's own sequence, `[N]`; differentiable."""
        lengths_S = sequence_lengths(self.sequence_index_N, self.num_sequences)
        sums_S = sequence_sums(values_N, self.sequence_index_N, self.num_sequences)
        return (sums_S / lengths_S)[self.sequence_index_N]


class PolicyLoss(NamedTuple):
    """A loss and its clip metrics; the objective averages them over tokens."""

    loss_N: Tensor
    log_ratio_N: Tensor
    """Detached log of the clipped ratio."""
    counts: Mapping[str, Tensor] = {}
    """Masks `[N]` by metric: `clip_fraction_low`, ..."""


def clip_loss(inputs: LossInputs) -> PolicyLoss:
    """PPO's clipped surrogate for each token; with `clip_dual` = c, under a negative advantage at most `c |A|` (dual
    clip, arXiv 1912.09729, equation 5)."""
    policy = _clipped(inputs.logprobs_N - inputs.old_logprobs_N, inputs)
    if inputs.clip_dual is None:
        return policy
    bound_N = -inputs.clip_dual * inputs.advantages_N
    dual_N = (inputs.advantages_N < 0) & (policy.loss_N > bound_N)
    loss_N = torch.where(dual_N, bound_N, policy.loss_N)
    return PolicyLoss(loss_N, policy.log_ratio_N, {**policy.counts, "clip_fraction_dual": dual_N})


def gspo_loss(inputs: LossInputs) -> PolicyLoss:
    """The clipped surrogate of `s = exp(mean of the sequence's log-ratios)`, the same for all its tokens (GSPO, arXiv
    2507.18071, equations 5 and 7)."""
    return _clipped(inputs.sequence_means(inputs.logprobs_N - inputs.old_logprobs_N), inputs)


def gspo_token_loss(inputs: LossInputs) -> PolicyLoss:
    """GSPO's ratio in value, with each token's own gradient: `sg[s] pi / sg[pi]` (GSPO-token, arXiv 2507.18071,
    equations 13 and 14). For advantages that differ within a sequence."""
    mean_N = inputs.sequence_means(inputs.logprobs_N.detach() - inputs.old_logprobs_N)
    return _clipped(mean_N + (inputs.logprobs_N - inputs.logprobs_N.detach()), inputs)


def _clipped(log_ratio_N: Tensor, inputs: LossInputs) -> PolicyLoss:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, and the masks of gradients zeroed by clipping.

    PPO's surrogate (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, equation 8).
    """
    low, high, advantages_N = 1.0 - inputs.clip_low, 1.0 + inputs.clip_high, inputs.advantages_N
    ratio_N = torch.exp(log_ratio_N)
    loss_N = -torch.min(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    counts = {
        "clip_fraction_low": (ratio_N < low) & (advantages_N < 0),
        "clip_fraction_high": (ratio_N > high) & (advantages_N > 0),
    }
    return PolicyLoss(loss_N, log_ratio_N.detach(), counts)


def cispo_loss(inputs: LossInputs) -> PolicyLoss:
    """`-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi`: every token keeps a gradient (CISPO, arXiv 2506.13585,
    equations 4 and 5)."""
    log_ratio_N = inputs.logprobs_N.detach() - inputs.old_logprobs_N
    ratio_N = torch.exp(log_ratio_N)
    low, high = 1.0 - inputs.clip_low, 1.0 + inputs.clip_high
    loss_N = -ratio_N.clamp(low, high) * inputs.advantages_N * inputs.logprobs_N
    return PolicyLoss(loss_N, log_ratio_N, {"clip_fraction_low": ratio_N < low, "clip_fraction_high": ratio_N > high})


def policy_gradient_loss(inputs: LossInputs) -> PolicyLoss:
    """`-r A`: the importance-weighted policy gradient (Williams, 1992), never clipped."""
    log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
    return PolicyLoss(-torch.exp(log_ratio_N) * inputs.advantages_N, log_ratio_N.detach())


LossFunction = Callable[[LossInputs], PolicyLoss | Tensor]
"""A user's own may return the loss of each token, `[N]`, alone."""
LOSSES: dict[str, Callable[[LossInputs], PolicyLoss]] = {
    "clip": clip_loss,
    "gspo": gspo_loss,
    "gspo_token": gspo_token_loss,
    "cispo": cispo_loss,
    "policy_gradient": policy_gradient_loss,
}


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


def token_weights(
    sequence_index_N: Tensor,
    num_sequences: int,
    normalize: Literal["token", "sequence", "constant"],
    rollout_tokens_S: Tensor | None = None,
) -> Tensor:
    """The weight of each token, float32 `[N]`; the optimizer step gives the divisor.

    `"token"`: 1, and the divisor is the number of tokens. `"sequence"`: 1 / (tokens of the token's own rollout), and
    the divisor is the number of rollouts. `"constant"`: 1, and the divisor is the number of rollouts times a length
    that is the same for all. `rollout_tokens_S`: trainable tokens of each sequence's rollout, float32; without it a
    sequence is a rollout, and must not be split over micro-batches. `sequence_index_N` counts from 0 to
    `num_sequences - 1`.
    """
    if normalize != "sequence":
        return torch.ones(sequence_index_N.shape, dtype=torch.float32, device=sequence_index_N.device)
    if rollout_tokens_S is None:
        rollout_tokens_S = sequence_lengths(sequence_index_N, num_sequences)
    return (1.0 / rollout_tokens_S)[sequence_index_N]
