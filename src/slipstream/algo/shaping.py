"""Shapers: pure functions to change the rewards of completions, or to choose the completions with loss.

`shaped_rewards` and `carries_loss` compose them, by [algorithm.arguments]. A class of hooks may call them in `credit`,
or leave them out. `[S]`: one element per rollout; group ids are integers, equal within a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.advantages import grouped, least
from slipstream.config.planned import PlannedArguments


def overlong_punishment(lengths_S: Tensor, max_tokens: int, buffer: float) -> Tensor:
    """0 up to `max_tokens - buffer` tokens, falling to -1 at `max_tokens` and staying there (DAPO, arXiv 2503.14476,
    equation 13). A `buffer` of 0 punishes what is longer than `max_tokens` only."""
    over_S = lengths_S.to(torch.float64) - (max_tokens - buffer)
    if buffer == 0.0:
        return -(over_S > 0).to(torch.float64)
    return -(over_S / buffer).clamp(0.0, 1.0)


def length_reward(lengths_S: Tensor, right_S: Tensor, group_ids_S: Tensor) -> Tensor:
    """From 0.5 for the shortest of a group to -0.5 for the longest; a wrong answer gets no more than 0, and equal
    lengths give 0 (Kimi k1.5, arXiv 2501.12599, section 2.3.3)."""
    groups_S, sizes_G = grouped(lengths_S, group_ids_S)
    lengths_S = lengths_S.to(torch.float64)
    least_S = least(lengths_S, groups_S, sizes_G)[groups_S]
    range_S = -least(-lengths_S, groups_S, sizes_G)[groups_S] - least_S
    reward_S = 0.5 - (lengths_S - least_S) / range_S.clamp(min=1.0)
    reward_S = torch.where(right_S, reward_S, reward_S.clamp(max=0.0))
    return torch.where(range_S > 0, reward_S, torch.zeros_like(reward_S))


def best_of_group(rewards_S: Tensor, group_ids_S: Tensor, num_best: int) -> Tensor:
    """True for the `num_best` highest rewards of each group; of equal ones the first in the batch."""
    groups_S, sizes_G = grouped(rewards_S, group_ids_S)
    order_S = torch.argsort(rewards_S, descending=True, stable=True)
    order_S = order_S[torch.argsort(groups_S[order_S], stable=True)]
    starts_G = (sizes_G.cumsum(0) - sizes_G).long()
    ranks_S = torch.empty_like(order_S)
    ranks_S[order_S] = torch.arange(len(order_S), device=order_S.device) - starts_G[groups_S[order_S]]
    return ranks_S < num_best


def shaped_rewards(
    rollouts: Sequence[records.Rollout], group_ids_S: Tensor, arguments: PlannedArguments, max_tokens: int
) -> tuple[Tensor, dict[str, float]]:
    """Shaped rewards `[S]`, float64, and the mean contribution of each shaping term."""
    rewards_S = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    terms: dict[str, Tensor] = {}
    right_S = None
    if arguments.reward_threshold is not None:
        right_S = rewards_S >= arguments.reward_threshold
        rewards_S = right_S.double()
    if arguments.overlong_buffer > 0:
        longest_S = torch.tensor([max(map(_longest_turn, rollout.sequences), default=0) for rollout in rollouts])
        punishment_S = overlong_punishment(longest_S, max_tokens, arguments.overlong_buffer * max_tokens)
        terms["overlong"] = arguments.overlong_penalty * punishment_S
    if arguments.thinking_budget is not None and arguments.thinking_budget < max_tokens:
        thinking_S = torch.tensor([rollout.num_thinking for rollout in rollouts])
        punishment_S = overlong_punishment(thinking_S, max_tokens, float(max_tokens - arguments.thinking_budget))
        terms["thinking"] = arguments.thinking_penalty * punishment_S
    if arguments.length_penalty > 0 and right_S is not None:
        lengths_S = torch.tensor([rollout.num_sampled for rollout in rollouts])
        terms["length"] = arguments.length_penalty * length_reward(lengths_S, right_S, group_ids_S)
    for term_S in terms.values():
        rewards_S = rewards_S + term_S
    return rewards_S, {f"reward/{name}": term_S.mean().item() for name, term_S in terms.items()}


def carries_loss(
    rollouts: Sequence[records.Rollout], rewards_S: Tensor, group_ids_S: Tensor, arguments: PlannedArguments
) -> Tensor:
    """Whether each rollout is trained on, bool `[S]`; the others are in the baseline only."""
    kept = [arguments.train_on_truncated or rollout.outcome != "truncated" for rollout in rollouts]
    carries_S = torch.tensor(kept, dtype=torch.bool)
    best = arguments.best_of
    return carries_S if best is None else carries_S & best_of_group(rewards_S, group_ids_S, best)


def _longest_turn(sequence: records.Sequence) -> int:
    """Tokens of the longest completion in the sequence, which `sampling.max_tokens` bounds."""
    return max((sum(1 for _ in run) for trained, run in groupby(sequence.mask) if trained), default=0)
