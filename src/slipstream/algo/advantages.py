"""Group-relative advantages (GRPO, arXiv 2402.03300, equation 3; without the division: Dr. GRPO, 2503.20783).

Pure: which rollouts form a group and which of them carry loss is the caller's business.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""


def _group_means(values_S: Tensor, groups_S: Tensor, sizes_G: Tensor) -> Tensor:
    return torch.zeros_like(sizes_G).index_add_(0, groups_S, values_S) / sizes_G


def _centred(rewards_S: Tensor, group_ids_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean, the group's index of each, and the groups' sizes; in float64."""
    if rewards_S.shape != group_ids_S.shape or rewards_S.ndim != 1:
        raise ValueError(
            f"rewards {tuple(rewards_S.shape)} and group ids {tuple(group_ids_S.shape)} must be "
            "two equally long vectors"
        )
    _, groups_S, sizes_G = torch.unique(group_ids_S, return_inverse=True, return_counts=True)
    sizes_G = sizes_G.to(torch.float64)
    rewards_S = rewards_S.to(torch.float64)
    # Without the shift equal rewards would not give exactly 0: 0.1 summed n times is not n * 0.1.
    least_G = torch.zeros_like(sizes_G).scatter_reduce(0, groups_S, rewards_S, "amin", include_self=False)
    shifted_S = rewards_S - least_G[groups_S]
    return shifted_S - _group_means(shifted_S, groups_S, sizes_G)[groups_S], groups_S, sizes_G


def group_advantages(rewards_S: Tensor, group_ids_S: Tensor, scale: Literal["std", "none"]) -> Tensor:
    """Each reward less the mean of its group, divided by the group's spread if `scale` is `"std"`.

    The spread is the unbiased standard deviation plus 1e-4 (TRL's convention). A group of one, or one whose
    rewards are all equal, gets exactly 0. `group_ids_S`: integers, equal within a group, in any order.
    Computed in float64, returned as float32 `[S]`.
    """
    centred_S, groups_S, sizes_G = _centred(rewards_S, group_ids_S)
    if scale == "std":
        sums_G = torch.zeros_like(sizes_G).index_add_(0, groups_S, centred_S.square())
        std_G = (sums_G / (sizes_G - 1).clamp(min=1)).sqrt()
        centred_S = centred_S / (std_G[groups_S] + STD_EPSILON)
    return centred_S.to(torch.float32)


def signal_fraction(rewards_S: Tensor, group_ids_S: Tensor) -> float:
    """Part of the groups in which rewards differ: the others teach nothing. 0.0 when there are no groups."""
    if rewards_S.numel() == 0:
        return 0.0
    centred_S, groups_S, sizes_G = _centred(rewards_S, group_ids_S)
    spread_G = torch.zeros_like(sizes_G).scatter_reduce(0, groups_S, centred_S.abs(), "amax")
    return (spread_G > 0).to(torch.float64).mean().item()
