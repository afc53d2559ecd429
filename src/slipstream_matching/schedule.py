"""Which channel an optimizer step is trained by, and the seed of its rollouts.

Both are functions of the step's number alone, so that a resume goes on as if there had been no break, and all
micro-batches of a step agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

Channel = Literal["A", "B"]
"""A: teacher forcing. B: matched rollouts."""


def channel_by_pattern(step: int, pattern: Sequence[Channel]) -> Channel:
    """The channel of a step, the first being 0, where a pattern repeats."""
    return pattern[step % len(pattern)]


def channel_by_share(step: int, b_ratio: float) -> Channel:
    """The channel of a step where this share of all steps is B's: of the first n steps exactly `floor(n b_ratio)`.

    `b_ratio` is taken as the decimal number that it is written as: in floating point 100 * 0.29 is below 29.
    """
    share = Fraction(str(b_ratio))
    return "B" if (step + 1) * share // 1 > step * share // 1 else "A"


def rollout_seed(training_seed: int, step: int) -> int:
    """`seed_base`, the seed from which those of a step's requests count, from 0 to 2^31 - 1."""
    return (training_seed + step * 1_000_003) & 0x7FFF_FFFF
