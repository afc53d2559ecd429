"""Confidence intervals of measured fractions, and of the difference between two of them; measured on the same tasks,
the difference has an interval of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

_SAME = 1e-12
"""Differences that lie as close are equal but for rounding."""
UPPER = 0.975
"""Probability below the upper bound of an interval of 95 %."""
_POWER = 0.8
Measured = tuple[float, float, float]
"""A fraction, and the bounds of its interval."""


def wilson_interval(num_right: int, num_total: int) -> tuple[float, float]:
    """Wilson's score interval (95 %) of a fraction (J. Am. Stat. Assoc. 22, 1927), which holds for small samples and
    for fractions near 0 or 1. Without samples (0.0, 1.0)."""
    if not 0 <= num_right <= num_total:
        raise ValueError(f"num_right {num_right} is not between 0 and num_total {num_total}")
    return wilson_of(num_right / num_total, num_total) if num_total else (0.0, 1.0)


def wilson_of(fraction: float, size: float) -> tuple[float, float]:
    """`wilson_interval` of a fraction that was measured on `size` samples, which need not be a whole number."""
    z = NormalDist().inv_cdf(UPPER)
    scale = 1.0 + z * z / size
    centre = (fraction + z * z / (2 * size)) / scale
    half = z / scale * math.sqrt(fraction * (1 - fraction) / size + (z / (2 * size)) ** 2)
    low = 0.0 if fraction == 0.0 else max(0.0, centre - half)
    high = 1.0 if fraction == 1.0 else min(1.0, centre + half)
    return low, high


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with `freedom` degrees of freedom: exact for 1 and 2, else by the expansion about the
    normal quantile (Abramowitz and Stegun 26.7.5), which at 0.975 is right to 0.2 % for 3 and to 1e-4 from 6 on."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z**3 + z,
        5 * z**5 + 16 * z**3 + 3 * z,
        3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z,
        79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z,
    )
    return z + sum(
        term / (scale * freedom**power)
        for power, (term, scale) in enumerate(zip(terms, (4, 96, 384, 92160), strict=True), start=1)
    )


class PairedDifference(NamedTuple):
    """`after - before` on the same tasks, in means over tasks."""

    value: float
    low: float
    high: float
    detectable: float
    """The smallest true difference that such a comparison finds in 80 % of all cases."""
    num_tasks: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0.0 or self.high < 0.0


def paired_difference(before: Sequence[float], after: Sequence[float]) -> PairedDifference:
    """The difference of two means over the same tasks, one number in each for each task, with Student's interval of
    their differences: what makes a task hard for both cancels.

    Where every task has the same difference, none of more than `3 / num_tasks` of them can be expected to be another
    (the rule of three), and that is the interval's half width. Raises `ValueError` for fewer than two tasks.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    num_tasks = len(differences)
    if num_tasks < 2:
        raise ValueError(f"{num_tasks} tasks have no difference with an interval: give two or more")
    value = math.fsum(differences) / num_tasks
    variance = math.fsum((difference - value) ** 2 for difference in differences) / (num_tasks - 1)
    quantile = t_quantile(UPPER, num_tasks - 1)
    half = quantile * math.sqrt(variance / num_tasks)
    if max(differences) - min(differences) < _SAME:
        half = 3.0 / num_tasks
    detectable = half * (1.0 + t_quantile(_POWER, num_tasks - 1) / quantile)
    return PairedDifference(value, value - half, value + half, detectable, num_tasks)


def difference_interval(before: Measured, after: Measured) -> Measured:
    """`after - before` and its interval, from the two intervals (Newcombe, Statist. Med. 17, 1998, method 10).

    For independent measurements; on the same tasks it is rather too wide.
    """
    (old, old_low, old_high), (new, new_low, new_high) = before, after
    difference = new - old
    low = difference - math.hypot(new - new_low, old_high - old)
    high = difference + math.hypot(new_high - new, old - old_low)
    return difference, low, high
