"""Importance sampling: off-policy corrections, and metrics of how far off-policy a batch is.

Pure. Importance weights are ratios of two policies: the update's initial one over the behaviour policy, the sampler.
They have no gradient. Sums for metrics add up over micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor

_NEAREST, _FARTHEST = 1e-4, 20.0
_BINS: dict[str, tuple[float, ...]] = {
    "position": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    "probability": (0.01, 0.1, 0.5, 0.9),
}
"""Lower bounds of the bins of `difference_sums`, but of the first: it begins at 0."""
_BOUNDS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""Boundaries of the ranges of `ratio_shares`; as many below 1 as above."""
Weighting = Literal["truncated", "sequence_truncated", "masked", "sequence_masked"]
_EDGES = 60 + len(_BOUNDS) // 2
"""Number of bin edges on either side of a ratio of 1."""


def importance_weights(
    old_logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    sequence_index_N: Tensor,
    num_sequences: int,
    kind: Weighting,
    floor: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Weights `[N]`, detached, and the mask of truncated or masked ones, bool `[N]`. They correct for
    differences between engine and trainer.

    `"truncated"`: `pi_old / pi_behaviour` of each token, clamped to `[floor, cap]` (Espeholt et al., arXiv 1802.01561;
    TRL's `token_truncate`). `"masked"`: the same, 0 outside (IcePop, Ling team, 2025; MIS). `"sequence_..."`: the
    product of a sequence's ratios, for each of its tokens. A sequence must not be split over micro-batches.
    """
    log_ratio_N = old_logprobs_N.detach() - behaviour_logprobs_N.detach()
    if kind == "truncated" and floor == 0.0:
        weights_N = torch.exp(log_ratio_N).clamp(max=cap)
        return weights_N, weights_N >= cap
    if kind in ("sequence_truncated", "sequence_masked"):
        log_ratio_N = sequence_sums(log_ratio_N, sequence_index_N, num_sequences)[sequence_index_N]
    ratio_N = torch.exp(log_ratio_N)
    outside_N = (ratio_N < floor) | (ratio_N > cap)
    if kind in ("masked", "sequence_masked"):
        return ratio_N.masked_fill(outside_N, 0.0), outside_N
    return ratio_N.clamp(floor, cap), outside_N


def sequence_lengths(sequence_index_N: Tensor, num_sequences: int) -> Tensor:
    """Tokens of each sequence, `[S]`, float32."""
    return sequence_sums(torch.ones_like(sequence_index_N, dtype=torch.float32), sequence_index_N, num_sequences)


def sequence_sums(values_N: Tensor, sequence_index_N: Tensor, num_sequences: int) -> Tensor:
    """The sum over each sequence's tokens, `[S]`; differentiable."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_index_N, values_N)


@cache
def _edges(device: torch.device | str = "cpu") -> Tensor:
    """Edges of the histogram's bins of log-ratios: fine around 0, and out to +-20."""
    count = _EDGES - len(_BOUNDS) // 2
    upward = torch.logspace(math.log10(_NEAREST), math.log10(_FARTHEST), count, dtype=torch.float64)
    bounds = torch.tensor(_BOUNDS, dtype=torch.float64).log()
    return torch.cat([-upward, bounds, upward]).sort().values.to(device)


def log_ratio_histogram(log_ratio_N: Tensor) -> Tensor:
    """Number of tokens in each bin, float64: histograms of micro-batches add up to the step's."""
    edges = _edges(log_ratio_N.device)
    bins_N = torch.bucketize(log_ratio_N.detach().double(), edges)
    # Not bincount: it synchronizes a GPU to find the largest bin. Integers in float64 add exactly in any order.
    counts = torch.zeros(len(edges) + 1, dtype=torch.float64, device=edges.device)
    return counts.index_add_(0, bins_N, torch.ones_like(log_ratio_N, dtype=torch.float64))


def ratio_quantiles(histogram: Tensor, quantiles: Sequence[float]) -> list[float]:
    """Quantiles of the ratio, as the bound nearer to 1 of the bin they are in: exact to a fifth of their distance
    from 1 (in logarithm), and exactly 1 within 1e-4 of it.
    """
    edges = _edges().tolist()
    cumulated = histogram.cpu().cumsum(0)
    found: list[float] = []
    for quantile in quantiles:
        place = int(torch.searchsorted(cumulated, quantile * cumulated[-1]).clamp(max=len(edges)))
        # Bins below the middle one end nearer to 0, bins above begin there.
        nearer = 0.0 if place == _EDGES else edges[place] if place < _EDGES else edges[place - 1]
        found.append(math.exp(nearer))
    return found


def ratio_shares(histogram: Tensor) -> dict[str, float]:
    """Fraction of tokens with a ratio in each of seven ranges, upper bounds included, by the range's name."""
    cumulated = histogram.cpu().cumsum(0)
    counts = cumulated[torch.searchsorted(_edges(), torch.tensor(_BOUNDS, dtype=torch.float64).log())]
    counts = torch.cat([counts.new_zeros(1), counts, cumulated[-1:]]).diff()
    inner = [f"{low:g}_to_{high:g}" for low, high in itertools.pairwise(_BOUNDS)]
    names = [f"below_{_BOUNDS[0]:g}", *inner, f"above_{_BOUNDS[-1]:g}"]
    return dict(zip(names, (counts / cumulated[-1].clamp(min=1)).tolist(), strict=True))


def difference_sums(difference_N: Tensor, position_N: Tensor, behaviour_logprobs_N: Tensor) -> dict[str, Tensor]:
    """Differences between engine and trainer, by the token's position and by its probability when drawn: float64
    `[2, bins]`, the sum of absolute differences of each bin's tokens, and their number. Sums of micro-batches add up
    to the step's."""
    size_N = difference_N.detach().abs().double()
    rows_2N = torch.stack([size_N, torch.ones_like(size_N)])
    found: dict[str, Tensor] = {}
    for name, value_N in (("position", position_N), ("probability", behaviour_logprobs_N.detach().exp())):
        bounds = torch.tensor(_BINS[name], dtype=torch.float64, device=size_N.device)
        bins_N = torch.bucketize(value_N.double(), bounds, right=True)
        found[f"difference_by_{name}"] = rows_2N.new_zeros(2, len(bounds) + 1).index_add_(1, bins_N, rows_2N)
    return found


def difference_means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean absolute difference of the tokens in each nonempty bin, from `difference_sums`: `at_position_64` is from
    position 64 on up to the next bound, `at_probability_0.1` is of tokens drawn with at least this probability."""
    means: dict[str, float] = {}
    for name, bounds in _BINS.items():
        if (both := sums.get(f"difference_by_{name}")) is not None:
            rows = zip((0, *bounds), *both.tolist(), strict=True)
            means |= {f"at_{name}_{low:g}": total / count for low, total, count in rows if count}
    return means
