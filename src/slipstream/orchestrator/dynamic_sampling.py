"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): which groups make a batch, and what is drawn for those that
teach nothing.

Guarantees: what is chosen and drawn follows from the rewards and the order of the tasks, never from what was ready
first; a group that is left out is counted, by reason. In a batch without any signal the first groups stay, so that the
trainer sees and counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.records import TRAINABLE_OUTCOMES, Rollout, Task


@dataclass(frozen=True)
class Refills:
    """How a batch gets further groups."""

    tasks: Callable[[int, int], Sequence[Task]]
    """(step, number of the refill, from 1) -> as many tasks as a batch has, or fewer."""
    max_refills: int
    threshold: float | None = None
    """`algorithm.reward_threshold`: rewards count as 1 or 0."""

    def has_signal(self, group: Sequence[Rollout]) -> bool:
        """Whether the rewards of a group differ, before any shaping by length."""
        rewards = [rollout.reward for rollout in group if rollout.outcome in TRAINABLE_OUTCOMES]
        return len({reward if self.threshold is None else reward >= self.threshold for reward in rewards}) > 1

    def num_wanted(self, groups: Sequence[Sequence[Rollout]], size: int) -> int:
        """How many tasks to draw so that about as many groups have signal as a batch of `size` lacks: 0 when it has
        enough."""
        found = sum(map(self.has_signal, groups))
        return min(size, math.ceil((size - found) * len(groups) / found)) if 0 < found < size else size * (found == 0)


@dataclass(frozen=True)
class Choice:
    """The groups of a batch, in the order in which they were drawn, and rollouts left out by reason."""

    groups: list[list[Rollout]]
    left_out: dict[str, int]
    metrics: dict[str, float]


def choose(refills: Refills, groups: list[list[Rollout]], size: int, num_refills: int) -> Choice:
    """The first `size` of `groups` that have signal. The first `size` of all were drawn for the batch itself."""
    with_signal = [place for place, group in enumerate(groups) if refills.has_signal(group)]
    chosen = with_signal[:size] or list(range(min(size, len(groups))))
    surplus = set(with_signal[size:])
    left_out = {"surplus": 0, "no_signal": 0}
    for place in set(range(len(groups))) - set(chosen):
        usable = sum(rollout.outcome in TRAINABLE_OUTCOMES for rollout in groups[place])
        left_out["surplus" if place in surplus else "no_signal"] += usable
    rewards = [r.reward for group in groups for r in group if r.outcome in TRAINABLE_OUTCOMES]
    metrics = {
        "rollout/refills": float(num_refills),
        "rollout/drawn_groups": float(len(groups)),
        "rollout/refilled_groups": float(sum(place >= size for place in chosen)),
        "rollout/groups": float(len(chosen)),
    }
    if rewards:
        metrics["reward/drawn_mean"] = sum(rewards) / len(rewards)
    return Choice([groups[place] for place in chosen], {k: n for k, n in left_out.items() if n}, metrics)
