"""The commands `deploy`, `undeploy` and `deployments`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from slipstream.cli.output import Json, print_json, print_table, tell
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.service.deployments.deployments import ShownDeployment

_END_S, _POLL_S = 60.0, 0.2


def deploy(
    run: Annotated[str, Parameter(help="Name or folder of a run.")],
    /,
    *,
    step: Annotated[int | None, Parameter(help="Step of the checkpoint; default: the best, or else the last.")] = None,
    room: Annotated[
        int | None, Parameter(help="Adapters in memory at a time, others are loaded on request; default: 8.")
    ] = None,
    max_model_len: Annotated[int | None, Parameter(help="Maximum tokens of a conversation; default: as chat.")] = None,
    gpu_memory_utilization: Annotated[float | None, Parameter(help="Fraction of GPU memory; default: 0.8.")] = None,
    host: Annotated[str | None, Parameter(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, Parameter(help="Default: 8701; 0: a free one.")] = None,
    json: Json = False,
) -> int:
    """Deploy a checkpoint of a run, and wait until it is ready.

    Adapters of one base share one vLLM server, and a whole model has its own. All deployments have one OpenAI address;
    the name there is RUN-step-N. The address, its servers and the deployments outlive this command and the service.
    Beside this user's processes on this machine, clients need the key in the printed file. Ctrl-C leaves the
    deployment alone.

        slipstream deploy my-run
        slipstream chat my-run-step-100
    """
    from slipstream.service.deployments.deployments import LocalDeployments, deployments_here, wait_ready
    from slipstream.service.deployments.records import Options

    there = deployments_here()
    if isinstance(there, LocalDeployments):
        there.listen(host, port)
    elif host is not None or port is not None:
        raise ConfigError("the service chooses the address of deployments: leave --host and --port out")
    made = there.deploy(run, step, Options(room, max_model_len, gpu_memory_utilization))
    if not json:
        tell(f"deployment: {made.name} ({made.state})", flush=True)
    try:
        found = wait_ready(there, made.name)
    except KeyboardInterrupt:
        tell(f"{made.name} continues: slipstream deployments", file=sys.stderr)
        raise
    if found.state == "failed":
        raise SlipstreamError(f"{found.name} has failed: {found.reason}")
    if json:
        print_json(_as_values(found))
        return 0
    tell(f"address:    {found.url}\nmodel:      {found.name}")
    if isinstance(there, LocalDeployments):
        tell(f"key:        in {there.key_file}")
    tell(f"state:      {found.state}")
    return 0


def undeploy(
    *names: Annotated[str, Parameter(help="Names of deployments; see slipstream deployments.")], json: Json = False
) -> int:
    """End deployments: new requests are refused at once, and those under way are answered.

    With an unknown name none ends.
    """
    from slipstream.service.deployments.deployments import deployments_here

    if not names:
        raise ConfigError("name a deployment: slipstream deployments lists them")
    there = deployments_here()
    ended = [there.undeploy(each.name) for each in [there.one(name) for name in dict.fromkeys(names)]]
    until = time.monotonic() + _END_S
    while time.monotonic() < until and {each.name for each in there.all() if each.state == "undeploying"} & {*names}:
        time.sleep(_POLL_S)
    if json:
        print_json([_as_values(each) for each in ended])
    else:
        tell(f"undeployed: {', '.join(each.name for each in ended)}")
    return 0


def deployments(*, json: Json = False) -> int:
    """List deployments: state, model, address."""
    from slipstream.service.deployments.deployments import LocalDeployments, deployments_here

    there = deployments_here()
    if isinstance(there, LocalDeployments):
        there.keep_going()
    found = there.all()
    if json:
        print_json([_as_values(each) for each in found])
    elif not found:
        tell("found no deployment", file=sys.stderr)
    else:
        print_table(
            [
                {
                    "name": each.name,
                    "state": each.state,
                    "kind": each.kind if each.kind == "model" else f"adapter, rank {each.rank}",
                    "base": each.base,
                    "address": each.url,
                    "reason": each.reason,
                }
                for each in found
            ]
        )
    return 0


def _as_values(found: ShownDeployment) -> dict[str, object]:
    import msgspec

    return msgspec.to_builtins(found)
