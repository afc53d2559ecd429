"""Confidence intervals of measured fractions."""

from __future__ import annotations

import math
from statistics import NormalDist

UPPER = 0.975
"""Probability below the upper bound of an interval of 95 %."""


def wilson_interval(num_right: int, num_total: int) -> tuple[float, float]:
    """Wilson's score interval (95 %) of a fraction (J. Am. Stat. Assoc. 22, 1927). It holds for small samples and for
    fractions near 0 or 1. Without samples (0.0, 1.0)."""
    if not 0 <= num_right <= num_total:
        raise ValueError(f"num_right {num_right} is not between 0 and num_total {num_total}")
    return wilson_of(num_right / num_total, num_total) if num_total else (0.0, 1.0)


def wilson_of(fraction: float, size: float) -> tuple[float, float]:
    """`wilson_interval` of a fraction measured on `size` samples; `size` need not be a whole number."""
    z = NormalDist().inv_cdf(UPPER)
    scale = 1.0 + z * z / size
    centre = (fraction + z * z / (2 * size)) / scale
    half = z / scale * math.sqrt(fraction * (1 - fraction) / size + (z / (2 * size)) ** 2)
    low = 0.0 if fraction == 0.0 else max(0.0, centre - half)
    high = 1.0 if fraction == 1.0 else min(1.0, centre + half)
    return low, high


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with `freedom` degrees of freedom: exact for 1 and 2, else by the expansion about the
    normal quantile (Abramowitz and Stegun 26.7.5). At 0.975 it is right to 0.2 % for 3 and to 1e-4 from 6 on."""
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
