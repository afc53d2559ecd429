"""A length-aware advantage: of two right answers the shorter one is better."""

from slipstream import Rollout

WEIGHT = 0.2


def credit(group: list[Rollout]) -> list[float]:
    """One advantage for each rollout of a complete group."""
    longest = max(rollout.num_sampled for rollout in group)
    scores = [rollout.reward * (1 - WEIGHT * rollout.num_sampled / max(longest, 1)) for rollout in group]
    mean = sum(scores) / len(scores)
    return [score - mean for score in scores]
