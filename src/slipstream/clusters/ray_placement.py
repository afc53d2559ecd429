"""Chooses the nodes of a Ray cluster for a run's agents, and says why they cannot be had. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError

_UNIT = 10_000
"""Ray counts ten-thousandths."""
_SHOWN = 8
"""Nodes in a message."""


@dataclass(frozen=True)
class RayNode:
    """A living node. Two of them may have one address and one host name."""

    id: str
    address: str
    cpus: float = 0.0
    gpus: float = 0.0
    free_cpus: float = 0.0
    free_gpus: float = 0.0

    @property
    def name(self) -> str:
        """For messages."""
        return f"Ray node {self.id[:8]} at {self.address}"

    @property
    def state(self) -> str:
        """For messages."""
        return f"{self.free_cpus:g} of {self.cpus:g} CPUs and {self.free_gpus:g} of {self.gpus:g} GPUs free"


@dataclass(frozen=True)
class Bundle:
    """An agent's share of a node. The actor asks exactly this."""

    node: RayNode
    cpus: float
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """For Ray."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def waits_for(self, now: RayNode | None) -> str:
        """Why the agent cannot be placed now; empty if it can."""
        if now is None:
            return f"{self.node.name} is gone"
        if now.free_cpus >= self.cpus and now.free_gpus >= self.gpus:
            return ""
        return f"{self.cpus:g} CPUs and {self.gpus} GPUs asked, {now.name} has {now.state}"


def choose(nodes: Sequence[RayNode], num: int, gpus: int) -> list[Bundle]:
    """An agent's bundle on each of `num` nodes, most free CPUs first. It asks for the free CPUs, or a fraction of one;
    on a node without free ones it waits for all. Raises ConfigError if there are too few nodes."""
    fit = [node for node in nodes if node.cpus > 0 and node.gpus >= gpus]
    if len(fit) < num:
        seen = "; ".join(f"{node.name}: {node.state}" for node in nodes[:_SHOWN]) or "no further node"
        more = f"; and {len(nodes) - _SHOWN} more nodes" if len(nodes) > _SHOWN else ""
        asked = f"{num} node{'s' * (num > 1)} beside this one, each with some CPUs and {gpus} GPUs"
        raise ConfigError(
            f"cluster.nodes = {num + 1} asks Ray for {asked}, and it has {len(fit)} ({seen}{more}): lower it, or add "
            "nodes (ray start)"
        )
    by_room = sorted(fit, key=lambda node: (not _has_room(node, gpus), -node.free_cpus, node.address, node.id))
    return [Bundle(node, _floor(node.free_cpus) or node.cpus, gpus) for node in by_room[:num]]


def not_placed(bundles: Sequence[Bundle], now: Mapping[str, RayNode], state: str, seconds: float) -> str:
    """The error after a wait: the waiting bundles and their requests."""
    waits = [(number, bundle.waits_for(now.get(bundle.node.id))) for number, bundle in enumerate(bundles, 1)]
    waiting = [f"node-{number}: {why}" for number, why in waits if why]
    more = f"; and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
    shown = "; ".join(waiting[:_SHOWN]) or "every node has room"
    return (
        f"Ray has not placed all agents after {seconds:.0f} s, its placement group is {state} ({shown}"
        f"{more}): end other work there, or raise cluster.join_timeout_s"
    )


def _has_room(node: RayNode, gpus: int) -> bool:
    return _floor(node.free_cpus) > 0 and node.free_gpus >= gpus


def _floor(cpus: float) -> float:
    return math.floor(cpus * _UNIT + 1e-6) / _UNIT
