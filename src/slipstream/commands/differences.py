"""Differences between two measurements, with 95 % intervals: of two fractions, or of means over the same tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.algo.statistics import UPPER, t_quantile

_SAME = 1e-12
"""Differences that lie as close are equal but for rounding."""
_POWER = 0.8
Measured = tuple[float, float, float]
"""A fraction, and the bounds of its interval."""


class PairedDifference(NamedTuple):
    """`after - before` on the same tasks, in means over tasks."""

    value: float
    low: float
    high: float
    detectable: float
    """The smallest true difference to be found in 80 % of all cases."""
    num_tasks: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0.0 or self.high < 0.0


def paired_difference(before: Sequence[float], after: Sequence[float]) -> PairedDifference:
    """The difference of two means over the same tasks, one number in each for each task, with Student's interval of
    their differences: the difficulty of a task cancels.

    If every task has the same difference, at most `3 / num_tasks` of further ones are expected to have another (the
    rule of three): the half width of the interval. Raises `ValueError` for fewer than two tasks.
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
