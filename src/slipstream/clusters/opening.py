"""Opens the nodes of a run by its launcher (`cluster.launcher`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slipstream.config.schema import ClusterConfig
from slipstream.nodes.launcher import Nodes
from slipstream.nodes.protocol import TOKEN_VARIABLE


def open_nodes(
    cluster: ClusterConfig,
    run_id: str,
    attempt: int = 0,
    log: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Nodes:
    """The run's nodes; they join in `wait`. `log`: of the launcher's process, if it has one."""
    if cluster.launcher == "ray":
        from slipstream.clusters.ray import RayNodes

        return RayNodes(cluster, run_id, attempt, log, should_stop)
    return Nodes(cluster.nodes, cluster.host_and_port, os.environ.get(TOKEN_VARIABLE, ""), run_id, attempt)
