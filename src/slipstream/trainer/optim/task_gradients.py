"""Whole gradients of several tasks, kept apart and combined before an optimizer step.

Over ranks each has its shard of every gradient: inner products are summed over the ranks, so that all combine alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.algo.gradient_surgery import Combination, project_conflicts

Gradients = dict[str, Tensor]
"""By parameter name, float32; a parameter that has none is left out."""


def combine(
    gradients: Sequence[Gradients], seed: str, over_ranks: Callable[[list[float]], list[float]] | None
) -> tuple[Gradients, Combination]:
    """The combined gradient, by PCGrad; those given are used up. `seed`, the same on all ranks, decides the order of
    the projections. `over_ranks`: all-reduces sums, for gradients that are divided."""
    size = len(gradients)
    flat = [inner(gradients[a], gradients[b]) for a in range(size) for b in range(size)]
    if over_ranks is not None:
        flat = over_ranks(flat)
    draw = random.Random(seed)
    orders = [draw.sample(range(size), size) for _ in range(size)]
    found = project_conflicts([flat[row * size : (row + 1) * size] for row in range(size)], orders)
    combined: Gradients = {}
    for weight, part in zip(found.weights, gradients, strict=True):
        for name in list(part):
            gradient = part.pop(name)
            if name in combined:
                combined[name].add_(gradient, alpha=weight)
            else:
                combined[name] = gradient.mul_(weight)
    return combined, found


@torch.no_grad()
def inner(a: Gradients, b: Gradients) -> float:
    """Their inner product: each tensor's in its own type, the sum in float64."""
    products = [torch.dot(a[name].flatten(), b[name].flatten()).double() for name in a.keys() & b.keys()]
    return torch.stack(products).sum().item() if products else 0.0
