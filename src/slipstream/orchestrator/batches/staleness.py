"""Bounded staleness: how far the generating version of the policy may be behind the trained one.

The batch of step k updates version k. Its first token may be of version k - `training.staleness`, so its rollouts wait
for this version's release; older tokens are refused, and the age of all others is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from slipstream.errors import TrainingError
from slipstream.records import Rollout, Version


def oldest_version(step: int, staleness: int, first: int, every: int = 1) -> int:
    """The published version to await before the batch of `step`: a multiple of `every`, or `first`, the beginning of
    the run or its resume."""
    return max(first, -(-(step - staleness) // every) * every)


def refuse_stale(
    rollouts: Sequence[Rollout], step: int, lineage: int, staleness: int, survivors: Mapping[int, int] | None = None
) -> None:
    """Raise TrainingError for a token of a version older than `staleness` allows, or of another lineage. `survivors`:
    earlier lineages with their last allowed step; this one's weights descend from them."""
    oldest = max(0, step - staleness)
    allowed = {Version(lineage, k).name for k in range(oldest, step + 1)}
    for earlier, newest in (survivors or {}).items():
        allowed |= {Version(earlier, k).name for k in range(oldest, min(step, newest) + 1)}
    for rollout in rollouts:
        for sequence in rollout.sequences:
            others = {span.version for span in sequence.versions} - allowed
            if others:
                raise TrainingError(
                    f"rollout {rollout.id} holds tokens of version {', '.join(sorted(others))} in the batch of "
                    f"step {step}: training.staleness = {staleness} allows only {', '.join(sorted(allowed))}"
                )


def staleness_metrics(step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Staleness of the sampled tokens, in versions behind `step`: mean over tokens, maximum, and histogram; and the
    fraction of rollouts with mixed versions."""
    ages: Counter[int] = Counter()
    mixed = 0
    for rollout in rollouts:
        for sequence in rollout.sequences:
            ages.update(sequence.ages(step))
        mixed += len({span.version for sequence in rollout.sequences for span in sequence.versions}) > 1
    total = sum(ages.values())
    if not total:
        return {}
    return {
        "staleness/mean": sum(age * count for age, count in ages.items()) / total,
        "staleness/max": float(max(ages)),
        "staleness/mixed_fraction": mixed / max(1, len(rollouts)),
        **_histogram(ages, total),
    }


def _histogram(ages: Mapping[int, int], total: int) -> dict[str, float]:
    """Parts of the tokens by age: each bin begins with the age in its name; from 8 on these are powers of 2."""
    shares = dict.fromkeys(map(_bin, range(max(ages) + 1)), 0.0)
    for age, count in ages.items():
        shares[_bin(age)] += count / total
    return {f"staleness/age_{begin}": share for begin, share in shares.items()}


def _bin(age: int) -> int:
    return max(0, age) if age < 8 else 1 << (age.bit_length() - 1)
