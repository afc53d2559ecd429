"""Divides a run's ranks and engines over the nodes of a cluster. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.config import RunConfig
from slipstream.config.traits import num_engines, starts_engines
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts
from slipstream.plan.memory.gpu_shares import place


@dataclass(frozen=True)
class Assignment:
    """Nodes by number; 0 is the run's own host."""

    ranks: tuple[int, ...]
    """Of each of the trainer's ranks."""
    engines: tuple[int, ...]
    """Of each engine; empty without any."""


def assign(config: RunConfig) -> Assignment:
    """Ranks come first and engines last: by GPUs in order, or evenly over nodes without GPUs."""
    ranks, nodes = config.training.ranks, config.cluster.nodes
    replicas, gpus = num_engines(config) if starts_engines(config) else 0, config.cluster.gpus_per_node
    if nodes == 1:
        return Assignment((0,) * ranks, (0,) * replicas)
    if isinstance(gpus, int) and gpus:
        placement = place(
            ranks=ranks,
            replicas=replicas,
            tensor_parallel_size=config.inference.tensor_parallel_size,
            separate=config.run.placement == "separate",
            gpus_per_node=gpus,
        )
        of_engines = tuple(own[0] // gpus for own in placement.engines)
        return Assignment(tuple(gpu // gpus for gpu in placement.trainer), of_engines)
    every = [number * nodes // (ranks + replicas) for number in range(ranks + replicas)]
    return Assignment(tuple(every[:ranks]), tuple(every[ranks:]))


def most_on_a_node(nodes: Sequence[int]) -> int:
    """How many of a kind the fullest node has."""
    return max(Counter(nodes).values(), default=0)


def ranks_of_a_node(config: RunConfig) -> int:
    """How many of the trainer's ranks share a node's cores, at most."""
    return most_on_a_node(assign(config).ranks)


def engine_workers_of_a_node(config: RunConfig) -> int:
    """How many workers of engines share a node's cores, at most."""
    return max(1, most_on_a_node(assign(config).engines)) * config.inference.tensor_parallel_size


def node_name(number: int) -> str:
    """As launchers have it; empty: the run's own host."""
    return f"node-{number}" if number else ""


def with_all_nodes(config: RunConfig, facts: Facts) -> Facts:
    """The facts with the GPUs of all nodes. Raises ConfigError where this host has another number."""
    nodes, asked = config.cluster.nodes, config.cluster.gpus_per_node
    if nodes == 1:
        return facts
    if asked not in ("auto", facts.num_gpus):
        raise ConfigError(
            f"cluster.gpus_per_node = {asked}, and this host has {facts.num_gpus}: correct it, or start the run on a "
            "host like the others"
        )
    return replace(facts, num_gpus=nodes * facts.num_gpus)
