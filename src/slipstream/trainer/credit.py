"""Who gets credit: from a batch's rewards to one advantage for each rollout, and which rollouts carry loss.

Guarantees: the rollouts' own rewards are not changed; rollouts that may not be trained on have no part in any baseline.
A critic would come in here: advantages for each token go into `records.Sequence.advantages`, which the loss prefers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.advantages import (
    BASELINES,
    best_of_group,
    group_advantages,
    length_reward,
    overlong_punishment,
    signal_fraction,
)
from slipstream.algo.custom import user_function
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig, Scale
from slipstream.errors import TrainingError


@dataclass(frozen=True)
class Credit:
    """For each rollout of the batch, in its order."""

    advantages: list[float]
    """0 for rollouts that cannot be trained on."""
    carries_loss: list[bool]
    metrics: dict[str, float]

    def of(self, place: int) -> dict[str, Any]:
        """What the rollout at `place` is trained with."""
        return {"advantage": self.advantages[place], "carries_loss": self.carries_loss[place]}

    @property
    def has_signal(self) -> bool:
        """Whether there is anything to learn."""
        return any(self.advantages)


def assign_credit(
    batch: records.Batch, config: RLConfig, max_tokens: int, kl_penalties: list[float] | None = None
) -> Credit:
    """Shape the rewards as `config` says and turn them into advantages. `kl_penalties`: of each rollout, to be taken
    from its reward."""
    config = resolved(config)
    usable = [i for i, rollout in enumerate(batch.rollouts) if rollout.outcome in records.TRAINABLE_OUTCOMES]
    if not usable:
        raise TrainingError(f"none of the {len(batch.rollouts)} rollouts of step {batch.step} can be trained on")
    rollouts = [batch.rollouts[i] for i in usable]
    numbers = {group: n for n, group in enumerate(dict.fromkeys(rollout.group_id for rollout in rollouts))}
    group_ids_S = torch.tensor([numbers[rollout.group_id] for rollout in rollouts])
    rewards_S, metrics = _shaped(rollouts, group_ids_S, config, max_tokens)
    if kl_penalties is not None:
        rewards_S = rewards_S - torch.tensor([kl_penalties[i] for i in usable], dtype=torch.float64)
    baseline = BASELINES.get(config.advantage) or user_function("advantage", config.advantage)
    advantages_S = group_advantages(rewards_S, group_ids_S, cast("Scale", config.scale_rewards), baseline)
    if not torch.isfinite(advantages_S).all():
        raise TrainingError(
            f"the advantages of step {batch.step} are not finite ({advantages_S.tolist()[:4]} ...): look at the rewards"
            f" and at algorithm.advantage = {config.advantage!r}"
        )
    best_S = torch.ones(len(usable), dtype=torch.bool)
    if config.best_of is not None:
        best_S = best_of_group(rewards_S, group_ids_S, config.best_of)
    advantages, carries_loss = [0.0] * len(batch.rollouts), [False] * len(batch.rollouts)
    for i, advantage, is_best in zip(usable, advantages_S.tolist(), best_S.tolist(), strict=True):
        advantages[i], carries_loss[i] = advantage if is_best else 0.0, is_best
    return Credit(
        advantages, carries_loss, metrics | {"reward/signal_fraction": signal_fraction(rewards_S, group_ids_S)}
    )


def _shaped(
    rollouts: list[records.Rollout], group_ids_S: Tensor, config: RLConfig, max_tokens: int
) -> tuple[Tensor, dict[str, float]]:
    """Rewards as they are trained on, and what their shaping took or gave on average."""
    rewards_S = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    metrics: dict[str, float] = {}
    right_S = None
    if config.reward_threshold is not None:
        right_S = rewards_S >= config.reward_threshold
        rewards_S = right_S.double()
    if float(config.overlong_buffer) > 0:
        longest_S = torch.tensor([max(map(_longest_turn, rollout.sequences), default=0) for rollout in rollouts])
        punishment_S = overlong_punishment(longest_S, max_tokens, float(config.overlong_buffer) * max_tokens)
        rewards_S = rewards_S + config.overlong_penalty * punishment_S
        metrics["reward/overlong"] = config.overlong_penalty * punishment_S.mean().item()
    if config.length_penalty > 0 and right_S is not None:
        lengths_S = torch.tensor([rollout.num_sampled for rollout in rollouts])
        shortness_S = length_reward(lengths_S, right_S, group_ids_S)
        rewards_S = rewards_S + config.length_penalty * shortness_S
        metrics["reward/length"] = config.length_penalty * shortness_S.mean().item()
    return rewards_S, metrics


def _longest_turn(sequence: records.Sequence) -> int:
    """Tokens of the longest completion in it: what `sampling.max_tokens` bounds."""
    return max((sum(1 for _ in run) for trained, run in groupby(sequence.mask) if trained), default=0)
