"""Generalized advantage estimation from a critic's values, and the value loss.

Pure. A trajectory is the T sampled tokens of one rollout, in order; a token's value is predicted before it is sampled.
The value after the last token is 0, whether the completion ended or was truncated.
"""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8
"""Added to the variance, as in TRL's PPO."""


def generalized_advantages(rewards_T: Tensor, values_T: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """`sum over l of (gamma lambda)**l delta(t + l)`, `delta(t) = r(t) + gamma V(t + 1) - V(t)` (arXiv 1506.02438,
    equations 12 and 16), of one trajectory; float64 `[T]`. With the values added they are the critic's targets."""
    rewards, values = rewards_T.tolist(), values_T.tolist()
    advantages = [0.0] * len(rewards)
    advantage = next_value = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * advantage
        next_value = values[t]
    return torch.tensor(advantages, dtype=torch.float64)


def whitened(values_N: Tensor) -> Tensor:
    """Normalize to mean 0 and (unbiased) variance 1; float64 `[N]`. Equal values give exactly 0."""
    if values_N.numel() < 2:
        return torch.zeros_like(values_N, dtype=torch.float64)
    # Without the shift equal values would not give exactly 0: 0.1 summed n times is not n * 0.1.
    shifted_N = values_N.double() - values_N.min().double()
    centred_N = shifted_N - shifted_N.mean()
    return centred_N * torch.rsqrt(centred_N.square().sum() / (len(centred_N) - 1) + VARIANCE_EPSILON)


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error of each token, `[N]`, and the mask of gradients zeroed by clipping, bool `[N]`.

    The larger of the errors of `V` and of `V` brought within `clip` of the old one (PPO2, in OpenAI's Baselines;
    arXiv 2005.12729, section 3): a prediction gains nothing by going further. A `clip` of 0 leaves it alone.
    """
    error_N = (values_N - returns_N).square()
    if clip == 0.0:
        return 0.5 * error_N, torch.zeros_like(error_N, dtype=torch.bool)
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    clipped_error_N = (clipped_N - returns_N).square()
    return 0.5 * torch.maximum(error_N, clipped_error_N), clipped_error_N > error_N


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float | None:
    """`1 - Var(returns - values) / Var(returns)`: 1 is perfect, 0 no better than a constant. None when all returns are
    equal, and there is nothing to explain."""
    returns_N, values_N = returns_N.double(), values_N.double()
    total = (returns_N - returns_N.mean()).square().sum().item()
    error_N = returns_N - values_N
    return 1.0 - (error_N - error_N.mean()).square().sum().item() / total if total > 0.0 else None
