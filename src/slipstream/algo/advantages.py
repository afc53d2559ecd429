"""From rewards to advantages: baselines and scales.

Pure. The caller decides the groups of rollouts and their contribution to the loss. Computed in float64. `[S]`: one
element per rollout; group ids are integers, equal within a group, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""


def grouped(rewards_S: Tensor, group_ids_S: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each reward's group, and the groups' sizes in float64."""
    if rewards_S.shape != group_ids_S.shape or rewards_S.ndim != 1:
        raise ValueError(
            f"rewards {tuple(rewards_S.shape)} and group ids {tuple(group_ids_S.shape)} must be "
            "two equally long vectors"
        )
    _, groups_S, sizes_G = torch.unique(group_ids_S, return_inverse=True, return_counts=True)
    return groups_S, sizes_G.to(torch.float64)


def least(values_S: Tensor, groups_S: Tensor, sizes_G: Tensor) -> Tensor:
    """The least value of each group, `[G]`."""
    return torch.zeros_like(sizes_G).scatter_reduce(0, groups_S, values_S, "amin", include_self=False)


def _centred(rewards_S: Tensor, group_ids_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean, the group's index of each, and the groups' sizes; in float64."""
    groups_S, sizes_G = grouped(rewards_S, group_ids_S)
    rewards_S = rewards_S.to(torch.float64)
    # Without the shift equal rewards would not give exactly 0: 0.1 summed n times is not n * 0.1.
    shifted_S = rewards_S - least(rewards_S, groups_S, sizes_G)[groups_S]
    means_G = torch.zeros_like(sizes_G).index_add_(0, groups_S, shifted_S) / sizes_G
    return shifted_S - means_G[groups_S], groups_S, sizes_G


def group_mean(rewards_S: Tensor, group_ids_S: Tensor) -> Tensor:
    """Each reward less the mean of its group (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return _centred(rewards_S, group_ids_S)[0]


def leave_one_out(rewards_S: Tensor, group_ids_S: Tensor) -> Tensor:
    """Each reward less the mean of the others in its group (RLOO, arXiv 2402.14740, equation 8); 0 for one alone."""
    centred_S, groups_S, sizes_G = _centred(rewards_S, group_ids_S)
    return centred_S * (sizes_G / (sizes_G - 1).clamp(min=1))[groups_S]


def batch_mean(rewards_S: Tensor, group_ids_S: Tensor) -> Tensor:
    """Each reward less the mean of the batch, for any group (REINFORCE++, arXiv 2501.03262)."""
    return _centred(rewards_S, torch.zeros_like(group_ids_S))[0]


def no_advantage(rewards_S: Tensor, group_ids_S: Tensor) -> Tensor:
    """Exactly 0 for each: rewards are only measured."""
    return torch.zeros_like(rewards_S)


Baseline = Callable[[Tensor, Tensor], Tensor]
"""(rewards `[S]` in float64, group numbers `[S]`) -> advantages `[S]`."""
BASELINES: dict[str, Baseline] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_mean": batch_mean,
    "none": no_advantage,
}


def group_advantages(
    rewards_S: Tensor,
    group_ids_S: Tensor,
    scale: Literal["std", "batch", "whiten", "none"],
    baseline: Baseline = group_mean,
) -> Tensor:
    """Advantages by `baseline`, divided by an unbiased standard deviation plus 1e-4 (TRL's convention).

    `"std"`: of the rewards of each group (GRPO). `"batch"`: of all rewards (arXiv 2508.08221). `"whiten"`: of the
    advantages themselves, less their mean (REINFORCE++, arXiv 2501.03262). `"none"`: not divided (Dr. GRPO,
    arXiv 2503.20783). Equal rewards, in the group or for `batch_mean` in the batch, give exactly 0 (but
    `"whiten"` may shift them). Returned as float32 `[S]`.
    """
    centred_S, groups_S, sizes_G = _centred(rewards_S, group_ids_S)
    advantages_S = centred_S if baseline is group_mean else baseline(rewards_S.to(torch.float64), group_ids_S)
    if scale == "std":
        sums_G = torch.zeros_like(sizes_G).index_add_(0, groups_S, centred_S.square())
        std_G = (sums_G / (sizes_G - 1).clamp(min=1)).sqrt()
        advantages_S = advantages_S / (std_G[groups_S] + STD_EPSILON)
    elif scale == "batch":
        advantages_S = advantages_S / (_std(batch_mean(rewards_S, group_ids_S)) + STD_EPSILON)
    elif scale == "whiten":
        advantages_S = batch_mean(advantages_S, group_ids_S)
        advantages_S = advantages_S / (_std(advantages_S) + STD_EPSILON)
    return advantages_S.to(torch.float32)


def _std(centred_S: Tensor) -> Tensor:
    """Unbiased, of values with mean 0."""
    return (centred_S.square().sum() / max(1, len(centred_S) - 1)).sqrt()


def signal_fraction(rewards_S: Tensor, group_ids_S: Tensor) -> float:
    """Fraction of the groups with any reward variance; the others have advantage 0. 0.0 without groups."""
    if rewards_S.numel() == 0:
        return 0.0
    centred_S, groups_S, sizes_G = _centred(rewards_S, group_ids_S)
    spread_G = torch.zeros_like(sizes_G).scatter_reduce(0, groups_S, centred_S.abs(), "amax")
    return (spread_G > 0).to(torch.float64).mean().item()
