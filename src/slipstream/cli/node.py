"""The command `slipstream node`."""

from __future__ import annotations

import os
import socket
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.output import tell


def node(
    *,
    join: Annotated[str, Parameter(help="HOST:PORT of the run (cluster.address).")],
    run_id: Annotated[str, Parameter(help="The run's cluster.run_id.")],
    name: Annotated[str, Parameter(help="node-1, node-2 ...; default: the next free one.")] = "",
    attempt: Annotated[int, Parameter(help="Join this attempt of the run only; -1: any.")] = -1,
    wait: Annotated[float, Parameter(help="Seconds to wait for the run.")] = 300.0,
) -> int:
    """Be the agent of this node: start its part of a run.

    The processes of the agent end with it, and with its connection to the run. After a lost connection the agent joins
    the run's next attempt. It ends with the run. It needs the run's token in the variable SLIPSTREAM_CLUSTER_TOKEN, and
    the run folder at the same path as on the run's host. The exit code is 1 for a lost connection of `--attempt`.
    """
    from slipstream.errors import ConfigError
    from slipstream.nodes.agent import Agent
    from slipstream.nodes.protocol import TOKEN_VARIABLE

    host, _, port = join.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--join {join} is no HOST:PORT: use the run's cluster.address")
    if not (token := os.environ.get(TOKEN_VARIABLE)):
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: give it the run's token")
    agent = Agent((host, int(port)), token, run_id, node=name, attempt=attempt)
    while True:
        agent.join(wait)
        tell(f"{socket.gethostname()} is {agent.node} of {run_id}")
        if agent.serve():
            tell("the run is over")
            return 0
        tell(f"{agent.node} has lost the run: all its processes were ended")
        if attempt >= 0:
            return 1
