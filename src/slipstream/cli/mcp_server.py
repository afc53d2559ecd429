"""The command `mcp`."""

from __future__ import annotations

from slipstream.cli.service import queued_runs
from slipstream.errors import ConfigError


def mcp() -> int:
    """Serve the queue to a coding agent, by the Model Context Protocol over standard input and output.

    Tools: plan, submit, status, logs, cancel, runs, checkpoints, gpus, deploy, undeploy, deployments. With
    SLIPSTREAM_SERVICE=URL the queue is a service's. In the configuration of a client the command is `slipstream mcp`.
    """
    try:
        from slipstream.service.deployments.deployments import deployments_here
        from slipstream.service.mcp_tools import make_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'slipstream[mcp]'") from None

    # Nothing but the protocol may write to standard output, and the check of a checkpoint imports much.
    make_server(queued_runs(), deployments_here(is_service=True)).run("stdio")
    return 0
