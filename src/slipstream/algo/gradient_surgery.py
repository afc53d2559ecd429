"""PCGrad: gradients of several tasks, combined without what conflicts (Yu et al., arXiv 2001.06782, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Combination:
    """Of P gradients."""

    weights: list[float]
    """The combined gradient is the sum of weight * gradient, `[P]`."""
    conflict_fraction: float
    """Of the pairs of gradients, those with a negative inner product."""
    lowest_cosine: float
    """Between two of them; 1 where fewer than two are nonzero."""


def project_conflicts(gram: Sequence[Sequence[float]], orders: Sequence[Sequence[int]]) -> Combination:
    """Each gradient is projected onto the normal plane of each other one with which its inner product is negative, one
    after the other; the results are summed up.

    `gram`: the inner products of the gradients, `[P, P]`. `orders`: for each gradient the order in which the others are
    looked at, which the paper draws at random. A projected gradient is a combination of the gradients, so that
    inner products with it follow from `gram`.
    """
    size = len(gram)
    weights = [0.0] * size
    for own in range(size):
        mix = [float(other == own) for other in range(size)]
        for other in orders[own]:
            inner = sum(part * gram[place][other] for place, part in enumerate(mix))
            if other != own and inner < 0.0 and gram[other][other] > 0.0:
                mix[other] -= inner / gram[other][other]
        weights = [total + part for total, part in zip(weights, mix, strict=True)]
    pairs = [(a, b) for a in range(size) for b in range(a) if gram[a][a] > 0.0 and gram[b][b] > 0.0]
    cosines = [gram[a][b] / (gram[a][a] * gram[b][b]) ** 0.5 for a, b in pairs]
    conflicts = sum(cosine < 0.0 for cosine in cosines) / max(1, len(cosines))
    return Combination(weights, conflicts, min(cosines, default=1.0))
