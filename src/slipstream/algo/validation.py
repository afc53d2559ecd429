"""Figures of a validation with n samples a task: mean@n, std@n, best@k, worst@k, maj@k and pass@k, with intervals.

Guarantees: mean@n, std@n, best@k, worst@k and maj@k are defined as in verl's `process_validation_metrics`. best@k is
the largest value of k draws, with replacement, from a task's n samples, worst@k the smallest, and maj@k the value of
the most frequent vote of the k draws (of equal ones the first drawn). verl averages 1,000 such draws of a fixed seed.
Here is the exact expectation: the two differ by verl's noise alone. pass@k is another figure: the chance of a right one
among k *different* samples, without bias (Chen et al., arXiv 2107.03374). Draws with replacement may repeat a sample,
so best@k is at most pass@k.

A figure of a group of tasks is the mean over its tasks. Tasks are the unit of every interval: samples of one task are
not independent. All in float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.algo.statistics import UPPER, t_quantile, wilson_of

Floats = NDArray[np.float64]


class Figure(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Sampled:
    """One task's samples: a value and a vote of each."""

    values: tuple[float, ...]
    votes: tuple[Hashable, ...] | None = None
    """None: there is nothing to vote on. A vote may be None itself: a sample without an answer."""


def subset_sizes(num_samples: int) -> list[int]:
    """k = 2, 4, ..., n, as verl has them: the powers of two below n, and n."""
    powers = [2**power for power in range(1, num_samples.bit_length()) if 2**power < num_samples]
    return [*powers, num_samples] if num_samples > 1 else []


def best_and_worst(values: Sequence[float], k: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """(mean, standard deviation) of the largest and of the smallest of `k` draws with replacement."""
    ordered = np.sort(np.asarray(values, np.float64))
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** k
    weights = np.diff(below)  # probability of the i-th smallest as the largest drawn
    return _moments(ordered, weights), _moments(ordered[::-1], weights)


def majority(values: Sequence[float], votes: Sequence[Hashable], k: int) -> tuple[float, float]:
    """(mean, standard deviation) of the value of the most frequent vote of `k` draws with replacement: of equally
    frequent ones the first drawn, and of its samples the first drawn."""
    classes: dict[Hashable, list[float]] = {}
    for value, vote in zip(values, votes, strict=True):
        classes.setdefault(vote, []).append(value)
    found = sorted(classes.values(), key=len, reverse=True)
    weights = _chance_to_win(tuple(map(len, found)), k)
    # Whichever sample of a vote is drawn first, each is as likely as the others.
    spread = [weight / len(group) for group, weight in zip(found, weights, strict=True) for _ in group]
    return _moments(np.asarray([value for group in found for value in group], np.float64), np.asarray(spread))


def pass_at(num_right: int, num_samples: int, k: int) -> float:
    """The chance of a right one among `k` different samples out of `num_samples`."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _moments(values: Floats, weights: Floats) -> tuple[float, float]:
    mean = float(values @ weights)
    return mean, math.sqrt(max(0.0, float((values - mean) ** 2 @ weights)))


@lru_cache(maxsize=8192)
def _chance_to_win(sizes: tuple[int, ...], k: int) -> tuple[float, ...]:
    """The chance of each vote to be the most frequent one of `k` draws; `sizes`: the votes' samples.

    A vote wins with j draws if every other has at most j. With t others at j it wins one time in 1 + t: the integral of
    u^t over [0, 1]. The numbers of draws are multinomial: the chance is k! times a coefficient of the product of the
    others' truncated exponential series, with u at each series' last term. The integrand is a polynomial of degree
    k / j at most: Gauss-Legendre quadrature is exact. Up to k = 170: `k!` is a float64.
    """
    num_samples = sum(sizes)
    distinct = sorted(set(sizes))
    counts = {size: sizes.count(size) for size in distinct}
    chances = dict.fromkeys(distinct, 0.0)
    for j in range(1, k + 1):
        room = k - j
        nodes, node_weights = np.polynomial.legendre.leggauss(k // j // 2 + 1)
        for node, node_weight in zip((nodes + 1) / 2, node_weights / 2, strict=True):
            terms = {size: _series(size / num_samples, min(j, room), j, float(node)) for size in distinct}
            fewer = {size: _power(terms[size], counts[size] - 1, room) for size in distinct}
            whole = {size: _times(fewer[size], terms[size], room) for size in distinct}
            for size in distinct:
                others = fewer[size]
                for other in distinct:
                    if other != size:
                        others = _times(others, whole[other], room)
                if len(others) > room:
                    scale = math.factorial(k) / math.factorial(j) * (size / num_samples) ** j
                    chances[size] += float(node_weight * others[room] * scale)
    return tuple(chances[size] for size in sizes)


def _series(chance: float, degree: int, most: int, node: float) -> Floats:
    """The exponential series of `chance`, up to `degree`; its term number `most` is multiplied by `node`."""
    terms = [chance**i / math.factorial(i) for i in range(degree + 1)]
    if degree == most:
        terms[-1] *= node
    return np.asarray(terms, np.float64)


def _times(a: Floats, b: Floats, degree: int) -> Floats:
    return np.asarray(np.convolve(a, b)[: degree + 1], np.float64)


def _power(base: Floats, exponent: int, degree: int) -> Floats:
    result = np.ones(1)
    while exponent:
        if exponent & 1:
            result = _times(result, base, degree)
        base, exponent = _times(base, base, degree), exponent >> 1
    return result


def figures(tasks: Sequence[Sampled], *, is_fraction: bool) -> dict[str, Figure]:
    """The figures of a group of tasks by name (`mean@4`), each the mean over its tasks.

    `is_fraction`: the values are 0 or 1; pass@k is added if every task has k samples, and intervals are Wilson's;
    otherwise, and for std@n, Student's. A task with fewer samples than the most has figures of these; one without
    any must be left out. maj@k is added if every task has votes.
    """
    if not tasks:
        return {}
    most = max(len(task.values) for task in tasks)
    found: dict[str, list[float]] = {f"mean@{most}": [float(np.mean(task.values)) for task in tasks]}
    if most > 1:
        found[f"std@{most}"] = [float(np.std(task.values)) for task in tasks]
    for k in subset_sizes(most):
        pairs = [best_and_worst(task.values, k) for task in tasks]
        found[f"best@{k}"] = [best for (best, _), _ in pairs]
        found[f"worst@{k}"] = [worst for _, (worst, _) in pairs]
        if all(task.votes is not None for task in tasks):
            found[f"maj@{k}"] = [majority(task.values, task.votes or (), k)[0] for task in tasks]
        if is_fraction and all(len(task.values) >= k for task in tasks):
            found[f"pass@{k}"] = [pass_at(round(sum(task.values)), len(task.values), k) for task in tasks]
    made = {
        name: _figure(np.asarray(values), most / _draws(name), is_fraction=is_fraction and not name.startswith("std"))
        for name, values in found.items()
    }
    spread = made.get(f"std@{most}")
    if spread is not None and math.isfinite(spread.low):
        made[f"std@{most}"] = spread._replace(low=max(0.0, spread.low))
    return made


def _draws(name: str) -> float:
    """How many samples of a task one value of the figure takes."""
    kind, _, k = name.partition("@")
    return 1.0 if kind == "mean" else float(k)


def _figure(values: Floats, independent: float, *, is_fraction: bool) -> Figure:
    mean = float(np.mean(values))
    low, high = fraction_interval(values, independent) if is_fraction else mean_interval(values)
    return Figure(mean, low, high)


def fraction_interval(values: Floats, independent: float = 1.0) -> tuple[float, float]:
    """Interval of the mean of one number in [0, 1] for each task: Wilson's, for the number of independent samples with
    the tasks' observed variance. With one sample a task it is Wilson's own interval.

    `independent`: most independent samples in place of one task; without observed variance a task counts as one.
    """
    mean, variance, num_tasks = float(np.mean(values)), float(np.var(values)), len(values)
    worth = mean * (1.0 - mean) / variance if variance > 0.0 else 1.0
    return wilson_of(mean, num_tasks * min(worth, max(1.0, independent)))


def mean_interval(values: Floats) -> tuple[float, float]:
    """Student's interval of the mean of one number for each task; infinite for one task."""
    mean, num_tasks = float(np.mean(values)), len(values)
    if num_tasks < 2:
        return -math.inf, math.inf
    half = t_quantile(UPPER, num_tasks - 1) * float(np.std(values, ddof=1)) / math.sqrt(num_tasks)
    return mean - half, mean + half
