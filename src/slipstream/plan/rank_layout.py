"""The nodes of the trainer's ranks; rows and copies of the weights shared by neighbours. Pure."""

from __future__ import annotations

from collections import Counter

from slipstream.config import RunConfig
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts
from slipstream.plan.nodes import assign


def num_copies(config: RunConfig) -> int:
    """How many copies of the weights the ranks hold: one, or under hybrid sharding one on each node."""
    return len(set(assign(config).ranks)) if config.training.sharding == "hybrid" else 1


def hybrid_obstacle(config: RunConfig) -> str:
    """Why nodes cannot hold a copy each; empty: they can."""
    counts = Counter(assign(config).ranks)
    if len(counts) == 1:
        return "the ranks are on one node"
    if len(set(counts.values())) > 1:
        found = ", ".join(str(counts[node]) for node in sorted(counts))
        return f"nodes have unequal numbers of ranks ({found})"
    return ""


def check_context_parallel(config: RunConfig, facts: Facts) -> None:
    """Raises ConfigError if nodes, model or data do not allow `training.context_parallel`."""
    model, size = facts.model, config.training.context_parallel
    if size == 1:
        return
    what, heads, kv_heads = f"training.context_parallel = {size}", model.num_heads, model.num_kv_heads
    nodes = assign(config).ranks
    if any(len(set(nodes[first : first + size])) > 1 for first in range(0, len(nodes), size)):
        raise ConfigError(f"{what} ranks hold a row on one node, and here on two: make it a divisor of a node's ranks")
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"{what} does not divide the model's {heads} attention heads (and {kv_heads} of keys and values) evenly: "
            "use a divisor of both"
        )
    if model.unpackable:
        raise ConfigError(f"{what} needs the attention of packed rows, and the model has {model.unpackable}: use 1")
    if facts.tower is not None:
        raise ConfigError(f"{what} divides rows, but not yet rows with images: use 1")
