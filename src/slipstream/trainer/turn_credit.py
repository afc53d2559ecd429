"""Turns of an episode in the order of sampling, and credit for single turns, if the environment rewards them
(`algorithm.credit = "turn"`).

A rollout's sequences are stored in the order of their beginnings. An episode may continue an earlier one, as an agent
does after a conversation with a sub-agent. `records.Rollout.turn_spans` therefore has the order of the turns.

A rollout's `reward` is the sum of all its rewards, its turns' included. The return of turn t is this sum less
the rewards of the turns before t. Returns are compared within a group turn by turn, as in step-level group baselines
(GiGPO, arXiv 2505.10978, with the number of the turn as the anchor state).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.advantages import Baseline, group_advantages
from slipstream.algo.readiness import turn_returns, turns_have_signal
from slipstream.errors import TrainingError


def check_turns(rollouts: Sequence[records.Rollout], credit: str | None) -> bool:
    """Whether turns get credit of their own. Raises TrainingError if environment and setting disagree."""
    num_given = sum(bool(rollout.turn_rewards) for rollout in rollouts)
    if num_given and credit is None:
        raise TrainingError(
            'the environment rewards turns: set algorithm.credit = "turn", or "episode" to train on their sum'
        )
    if not num_given and credit == "turn":
        raise TrainingError(
            'algorithm.credit = "turn", and the environment rewards no turns: have score() return turn_rewards, or '
            "leave the setting out"
        )
    return credit == "turn"


def turn_advantages(
    rollouts: Sequence[records.Rollout],
    rewards_S: Tensor,
    group_ids_S: Tensor,
    scale: Literal["std", "batch", "whiten", "none"],
    baseline: Baseline,
    penalties: Sequence[Sequence[Tensor]] | None = None,
) -> Tensor:
    """An advantage for each turn `[K]` of all rollouts in order: its return against the returns of the group's other
    episodes from the same turn on. An episode without this turn is not in the baseline. If one episode of a group alone
    has the turn, baselines of groups give 0. `penalties`: of each rollout's sampled tokens, by sequence `[N]`. The
    penalties of a turn's own tokens and of later turns are subtracted from its return."""
    numbers: dict[tuple[int, int], int] = {}
    returns: list[float] = []
    groups: list[int] = []
    for place, (rollout, reward, group) in enumerate(
        zip(rollouts, rewards_S.tolist(), group_ids_S.tolist(), strict=True)
    ):
        own = turn_returns(reward, _turn_rewards(rollout))
        if penalties is not None:
            following = [*accumulate(reversed(_of_turns(rollout, penalties[place])))][::-1]
            own = [value - penalty for value, penalty in zip(own, following, strict=True)]
        returns += own
        groups += [numbers.setdefault((group, turn), len(numbers)) for turn in range(len(own))]
    return group_advantages(torch.tensor(returns, dtype=torch.float64), torch.tensor(groups), scale, baseline)


def turn_signal_fraction(rollouts: Sequence[records.Rollout], rewards_S: Tensor, group_ids_S: Tensor) -> float:
    """Fraction of the groups with different returns of any turn."""
    returns: dict[int, list[list[float]]] = {}
    for rollout, reward, group in zip(rollouts, rewards_S.tolist(), group_ids_S.tolist(), strict=True):
        returns.setdefault(group, []).append(turn_returns(reward, _turn_rewards(rollout)))
    return statistics.fmean(map(turns_have_signal, returns.values()))


def write_turn_advantages(rollouts: Sequence[records.Rollout], advantages_K: Tensor, carries_loss_S: Tensor) -> None:
    """Write each turn's advantage (see `turn_advantages`) to its sampled tokens (the stream `advantages`); 0 if a
    rollout carries no loss."""
    given = iter(advantages_K.tolist())
    for rollout, carries_loss in zip(rollouts, carries_loss_S.tolist(), strict=True):
        tokens = [[0.0] * len(sequence) for sequence in rollout.sequences]
        for span in turns_of(rollout):
            advantage = next(given)
            if carries_loss:
                tokens[span.sequence][span.start : span.end] = [advantage] * (span.end - span.start)
        for sequence, values in zip(rollout.sequences, tokens, strict=True):
            sequence.put("advantages", values)


def turns_of(rollout: records.Rollout) -> list[records.TurnSpan]:
    """The turns in the order of sampling. A rollout without spans (a record of an earlier version) has one turn for
    each sequence, in their stored order."""
    return rollout.turn_spans or [records.TurnSpan(i, 0, len(s)) for i, s in enumerate(rollout.sequences)]


def token_rewards(
    rollout: records.Rollout, reward: float, penalties: Sequence[Tensor] | None, *, by_turn: bool
) -> tuple[Tensor, Tensor]:
    """The number of each sampled token in the order of sampling, int64 `[T]`, see `sampling_order`. And the rewards in
    this order, float64 `[T]`: the episode's `reward` at the last token, or with `by_turn` each turn's at its last
    token, less the `penalties` of each sequence's tokens."""
    order = torch.tensor(sampling_order(rollout), dtype=torch.int64)
    rewards_T = torch.zeros(len(order), dtype=torch.float64)
    if penalties is not None and len(order):
        rewards_T -= torch.cat([*penalties])[order]
    if by_turn:
        reward -= sum(rollout.turn_rewards)
        for place, turn_reward in turn_ends(rollout):
            rewards_T[place] += turn_reward
    rewards_T[-1:] += reward
    return order, rewards_T


def sampling_order(rollout: records.Rollout) -> list[int]:
    """The sampled tokens in the order of sampling, each by its number in the sequences as stored. Raises TrainingError
    unless the turns hold each sampled token exactly once."""
    starts = [0, *accumulate(sequence.num_trainable for sequence in rollout.sequences)]
    order: list[int] = []
    for span in turns_of(rollout):
        mask = rollout.sequences[span.sequence].mask
        first = starts[span.sequence] + mask[: span.start].count(True)
        order += range(first, first + mask[span.start : span.end].count(True))
    if sorted(order) != list(range(starts[-1])):
        raise TrainingError(
            f"the turns of rollout {rollout.id} hold {len(order)} sampled tokens and its sequences {starts[-1]}: give "
            "each sampled token to exactly one of turn_spans, or give no turn_spans"
        )
    return order


def turn_ends(rollout: records.Rollout) -> Iterator[tuple[int, float]]:
    """Each turn's reward, with the number of the turn's last token in the order of sampling; for a turn without tokens,
    of the token before. A reward before the first token is left out: no token earned it."""
    num_tokens = 0
    for span, reward in zip(turns_of(rollout), _turn_rewards(rollout), strict=True):
        num_tokens += rollout.sequences[span.sequence].mask[span.start : span.end].count(True)
        if num_tokens:
            yield num_tokens - 1, reward


def _of_turns(rollout: records.Rollout, penalties: Sequence[Tensor]) -> list[float]:
    """The sum of the penalties of each turn's tokens."""
    found: list[float] = []
    for span in turns_of(rollout):
        mask = rollout.sequences[span.sequence].mask
        first = sum(mask[: span.start])
        found.append(penalties[span.sequence][first : first + sum(mask[span.start : span.end])].sum().item())
    return found


def _turn_rewards(rollout: records.Rollout) -> list[float]:
    return rollout.turn_rewards or [0.0] * len(turns_of(rollout))
