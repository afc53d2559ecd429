"""Credit assignment: from a batch's rewards to one advantage per rollout, or with a critic per token, and the
rollouts with a contribution to the loss.

Guarantees: rollouts' rewards are not modified; untrainable rollouts enter no baseline. A critic's
advantages are the stream `advantages` of sequences: it takes precedence over the rollout's. `old_values` and
`returns` are streams, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.advantages import BASELINES, group_advantages, signal_fraction
from slipstream.algo.custom import user_function
from slipstream.algo.gae import explained_variance, generalized_advantages, whitened
from slipstream.algo.shaping import carries_loss, shaped_rewards
from slipstream.config.planned import PlannedRL
from slipstream.errors import TrainingError
from slipstream.trainer.critic import Critic
from slipstream.trainer.packing import stream_of
from slipstream.trainer.turn_credit import (
    check_turns,
    token_rewards,
    turn_advantages,
    turn_signal_fraction,
    write_turn_advantages,
)


@dataclass(frozen=True)
class Credit:
    """The result, for each rollout of the batch in order."""

    advantages: list[float | None]
    """0 for rollouts without loss; None if each token has one."""
    carries_loss: list[bool]
    metrics: dict[str, float]
    has_signal: bool
    """Whether any advantage is nonzero because of the rewards; a KL term alone does not count."""

    def of(self, place: int) -> dict[str, Any]:
        """Fields for the samples' record of rollout number `place`; no advantage if its tokens have their own."""
        advantage, carries = self.advantages[place], {"carries_loss": self.carries_loss[place]}
        return carries if advantage is None else {"advantage": advantage, **carries}


def assign_credit(
    batch: records.Batch,
    config: PlannedRL,
    max_tokens: int,
    kl_penalties: list[list[Tensor]] | None = None,
    critic: Critic | None = None,
) -> Credit:
    """Shape the rewards according to `config` and compute advantages. `kl_penalties`: per rollout and sequence, `[N]`,
    subtracted from the rewards. `critic`: its values are the baseline of `gae`. Raises TrainingError if no rollout can
    be trained on, or if advantages are not finite."""
    usable = [i for i, rollout in enumerate(batch.rollouts) if rollout.outcome in records.TRAINABLE_OUTCOMES]
    if not usable:
        lost = Counter(batch.dropped) + Counter(str(rollout.outcome) for rollout in batch.rollouts)
        listed = ", ".join(f"{number} by {outcome}" for outcome, number in lost.items())
        raise TrainingError(
            f"no rollout of step {batch.step} can be trained on ({listed or 'there is none'}): read the errors in "
            "samples.jsonl"
        )
    rollouts = [batch.rollouts[i] for i in usable]
    numbers = {group: n for n, group in enumerate(dict.fromkeys(rollout.group_id for rollout in rollouts))}
    group_ids_S = torch.tensor([numbers[rollout.group_id] for rollout in rollouts])
    gives_turns = check_turns(rollouts, config.credit)
    rewards_S, metrics = shaped_rewards(rollouts, group_ids_S, config.arguments, max_tokens)
    metrics["reward/signal_fraction"] = (
        turn_signal_fraction(rollouts, rewards_S, group_ids_S)
        if gives_turns
        else signal_fraction(rewards_S, group_ids_S)
    )
    if critic is not None:
        carries_S = carries_loss(rollouts, rewards_S, group_ids_S, config.arguments)
        rewards = dict(zip(usable, rewards_S.tolist(), strict=True))
        trained = [i for i, carries in zip(usable, carries_S.tolist(), strict=True) if carries]
        return _by_critic(batch, config, critic, rewards, kl_penalties, trained, metrics)
    baseline = BASELINES.get(config.advantage) or user_function("advantage", config.advantage)
    advantages_S = group_advantages(rewards_S, group_ids_S, config.scale_rewards, baseline)
    has_signal = bool(advantages_S.any())
    earned_S, of_usable = rewards_S, None if kl_penalties is None else [kl_penalties[i] for i in usable]
    if of_usable is not None:
        sums = [sum(penalty.sum().item() for penalty in penalties) for penalties in of_usable]
        rewards_S = rewards_S - torch.tensor(sums, dtype=torch.float64)
        advantages_S = group_advantages(rewards_S, group_ids_S, config.scale_rewards, baseline)
    _check_finite(advantages_S, batch, config)
    carries_S = carries_loss(rollouts, rewards_S, group_ids_S, config.arguments)
    if gives_turns:
        of_turns = partial(turn_advantages, rollouts, earned_S, group_ids_S, config.scale_rewards, baseline)
        advantages_K = of_turns(of_usable)
        _check_finite(advantages_K, batch, config)
        write_turn_advantages(rollouts, advantages_K, carries_S)
        has_signal = bool((advantages_K if of_usable is None else of_turns()).any())
    advantages: list[float | None] = [None if gives_turns else 0.0] * len(batch.rollouts)
    carried = [False] * len(batch.rollouts)
    for i, advantage, carries in zip(usable, advantages_S.tolist(), carries_S.tolist(), strict=True):
        of_rollout = batch.rollouts[i].sequences
        has_own = bool(of_rollout) and all("advantages" in sequence.streams for sequence in of_rollout)
        advantages[i], carried[i] = None if gives_turns or has_own else advantage if carries else 0.0, carries
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    has_own = any(any(sequence.values("advantages") or ()) for sequence in sequences)
    taught = any("teacher_logprobs" in sequence.streams for sequence in sequences) or (has_own and not gives_turns)
    has_signal &= any(advantages) or (has_own and gives_turns)
    return Credit(advantages, carried, metrics, taught or has_signal)


def _check_finite(advantages: Tensor, batch: records.Batch, config: PlannedRL) -> None:
    if not torch.isfinite(advantages).all():
        raise TrainingError(
            f"the advantages of step {batch.step} are not finite ({advantages.tolist()[:4]} ...): look at the rewards"
            f" and at algorithm.advantage = {config.advantage!r}"
        )


def _by_critic(
    batch: records.Batch,
    config: PlannedRL,
    critic: Critic,
    rewards: dict[int, float],
    kl_penalties: list[list[Tensor]] | None,
    trained: list[int],
    metrics: dict[str, float],
) -> Credit:
    """Compute GAE and write an advantage for each trainable token into the batch. A rollout's sampled tokens, over all
    its sequences in the order of sampling, are one trajectory with the reward at the last token. `rewards`, `trained`:
    by index in the batch."""
    all_values, gae = critic.values(batch), critic.config
    values_of: dict[int, Tensor] = {}
    advantages_of: dict[int, Tensor] = {}
    for i, reward in rewards.items():
        values_of[i] = torch.cat([torch.zeros(0), *all_values[i]]).double()
        penalties = kl_penalties[i] if kl_penalties is not None else None
        order, rewards_T = token_rewards(batch.rollouts[i], reward, penalties, by_turn=config.credit == "turn")
        advantages_T = generalized_advantages(rewards_T, values_of[i][order], gae.gamma, gae.gae_lambda)
        advantages_of[i] = torch.empty_like(advantages_T).index_copy_(0, order, advantages_T)
    empty = torch.zeros(0, dtype=torch.float64)
    values_N = torch.cat([empty, *(values_of[i] for i in trained)])
    advantages_N = torch.cat([empty, *(advantages_of[i] for i in trained)])
    returns_N = advantages_N + values_N
    scaled_N = whitened(advantages_N) if config.scale_rewards == "whiten" else advantages_N
    _check_finite(scaled_N, batch, config)
    start = 0
    for i in trained:
        for sequence, old_values in zip(batch.rollouts[i].sequences, all_values[i], strict=True):
            end = start + len(old_values)
            own = {"advantages": scaled_N[start:end], "old_values": old_values, "returns": returns_N[start:end]}
            sequence.streams |= {name: stream_of(values) for name, values in own.items()}
            start = end
    metrics |= _value_metrics(values_N, returns_N)
    has_signal = bool(scaled_N.any())
    carried = [i in set(trained) for i in range(len(batch.rollouts))]
    return Credit([None] * len(carried), carried, metrics, has_signal)


def _value_metrics(values_N: Tensor, returns_N: Tensor) -> dict[str, float]:
    """Means of values and returns, and explained variance, before the critic is trained on this batch."""
    if not len(values_N):
        return {}
    metrics = {"value/mean": values_N.mean().item(), "value/return": returns_N.mean().item()}
    explained = explained_variance(values_N, returns_N)
    return metrics if explained is None else metrics | {"value/explained_variance": explained}
