"""The command `slipstream node`."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from slipstream.cli.output import tell

if TYPE_CHECKING:
    from slipstream.config.schema import ClusterConfig
    from slipstream.nodes.places import Place


def node(
    *,
    join: Annotated[str, Parameter(help="HOST:PORT of the run (cluster.address).")],
    run_id: Annotated[str, Parameter(help="The run's cluster.run_id.")],
    name: Annotated[str, Parameter(help="node-1, node-2 ...; default: the next free one.")] = "",
    attempt: Annotated[int, Parameter(help="Join this attempt of the run only; -1: any.")] = -1,
    wait: Annotated[float, Parameter(help="Seconds to wait for the run.")] = 300.0,
) -> int:
    """Be the agent of this node: start its part of a run.

    The processes of the agent end with it, and with its connection to the run. After a failure of the run, or a lost
    connection, the agent joins the next attempt. It ends with the run. It needs the run's token in the variable
    SLIPSTREAM_CLUSTER_TOKEN, and the run folder at the same path as on the run's host. Under `--attempt` it ends with
    that attempt, with the run's exit code, or 1 for a lost connection.
    """
    from slipstream.nodes.agent import Agent
    from slipstream.nodes.protocol import JOIN_AGAIN

    agent = Agent(_address(join), token(), run_id, node=name, attempt=attempt)
    while True:
        agent.join(wait)
        tell(f"{socket.gethostname()} is {agent.node} of {run_id}")
        code = agent.serve()
        if code == 0:
            tell("the run is over")
            return 0
        if code == JOIN_AGAIN:
            continue
        tell(f"{agent.node} has lost the run: all its processes were ended" if code is None else _failed(code))
        if attempt >= 0:
            return code or 1


def serve_place(place: Place, cluster: ClusterConfig) -> int:
    """Be the agent of this place for one attempt of the run. Returns the run's exit code, or 1 for a lost
    connection."""
    from slipstream.nodes.agent import Agent
    from slipstream.nodes.protocol import JOIN_AGAIN
    from slipstream.processes.lifeline import leave_signals_to_trainer

    agent = Agent(_address(cluster.address), token(), cluster.run_id, node=place.name)
    code: int | None = JOIN_AGAIN
    while code == JOIN_AGAIN:
        agent.join(cluster.join_timeout_s)
        leave_signals_to_trainer()  # it saves a checkpoint and ends, and then this agent
        tell(f"{socket.gethostname()} is {agent.node} of {cluster.run_id}", flush=True)
        code = agent.serve(is_last=True)
    if code is None:
        tell(f"{agent.node} has lost the run: all its processes were ended", file=sys.stderr)
        return 1
    tell(_failed(code) if code else "the run is over")
    return code


def token() -> str:
    """The run's token. Raises ConfigError without one."""
    from slipstream.errors import ConfigError
    from slipstream.nodes.protocol import TOKEN_VARIABLE

    if not (found := os.environ.get(TOKEN_VARIABLE)):
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: give it the run's token")
    return found


def _address(text: str) -> tuple[str, int]:
    from slipstream.errors import ConfigError

    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{text} is no HOST:PORT: use the run's cluster.address")
    return host, int(port)


def _failed(code: int) -> str:
    return f"the run ended with exit code {code}"
