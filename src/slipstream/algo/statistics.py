"""Confidence intervals of measured fractions, and of the difference between two of them."""

from __future__ import annotations

import math
from statistics import NormalDist

Measured = tuple[float, float, float]
"""A fraction, and the bounds of its interval."""


def wilson_interval(num_right: int, num_total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a fraction (J. Am. Stat. Assoc. 22, 1927), which holds for small samples and for
    fractions near 0 or 1. Without samples (0.0, 1.0)."""
    if not 0 <= num_right <= num_total:
        raise ValueError(f"num_right {num_right} is not between 0 and num_total {num_total}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}: use a value between 0 and 1")
    if num_total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    fraction = num_right / num_total
    scale = 1.0 + z * z / num_total
    centre = (fraction + z * z / (2 * num_total)) / scale
    half = z / scale * math.sqrt(fraction * (1 - fraction) / num_total + (z / (2 * num_total)) ** 2)
    low = 0.0 if num_right == 0 else max(0.0, centre - half)
    high = 1.0 if num_right == num_total else min(1.0, centre + half)
    return low, high


def difference_interval(before: Measured, after: Measured) -> Measured:
    """`after - before` and its interval, from the two intervals (Newcombe, Statist. Med. 17, 1998, method 10).

    For independent measurements; on the same tasks it is rather too wide.
    """
    (old, old_low, old_high), (new, new_low, new_high) = before, after
    difference = new - old
    low = difference - math.hypot(new - new_low, old_high - old)
    high = difference + math.hypot(new_high - new, old - old_low)
    return difference, low, high
