"""The commands of submitted runs: submit, status, logs, cancel."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.commands import Overrides, RunFile
from slipstream.cli.output import Json, print_json, print_table, tell
from slipstream.cli.service import (
    Output,
    Where,
    as_values,
    default_place,
    follow_queued,
    lines_of,
    print_log,
    queued_runs,
    submit_to,
)


def submit(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    to: Annotated[Where | None, Parameter(help="Default: slurm if sbatch is on PATH, or else local.")] = None,
    nodes: Annotated[int | None, Parameter(help="Nodes of the run; default: cluster.nodes.")] = None,
    time: Annotated[str | None, Parameter(help="Time limit, as 12:00:00; default: the partition's.")] = None,
    partition: Annotated[str | None, Parameter(help="Default: SBATCH_PARTITION, or Slurm's.")] = None,
    account: Annotated[str | None, Parameter(help="Default: SBATCH_ACCOUNT, or Slurm's.")] = None,
    gpus_per_node: Annotated[int | None, Parameter(help="Default: as many as the run uses.")] = None,
    cpus_per_task: Annotated[int | None, Parameter(help="Cores on each node; default: the share of its GPUs.")] = None,
    sbatch_options: Annotated[
        str, Parameter(allow_leading_hyphen=True, help='Further options, as "--qos=high --constraint=h100".')
    ] = "",
    ray_address: Annotated[
        str, Parameter(help="HOST:PORT of the Ray cluster; default: RAY_ADDRESS, or the cluster of this host.")
    ] = "",
    accelerator: Annotated[str, Parameter(help="Kind of GPU for --to sky, as H100.")] = "",
    infra: Annotated[str, Parameter(help="Cloud for --to sky, as lambda; default: the cheapest.")] = "",
    store: Annotated[
        str, Parameter(env_var="SLIPSTREAM_STORE", help="Upload the artifacts there: a folder, or s3://bucket/prefix.")
    ] = "",
    resume: Annotated[
        bool, Parameter(negative="", help="Continue the run in run.folder, or its copy in --store.")
    ] = False,
    follow: Annotated[bool, Parameter(negative="", help="Then print the output until the run ends.")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Print the choice, and submit nothing.")] = False,
    json: Json = False,
) -> int:
    """Submit a run: to this machine's queue, or as a job to a cluster of Slurm or Ray.

    Here it starts as soon as the GPUs of its plan are free (docs/service.md). A job of Slurm saves a checkpoint before
    its time limit, and is requeued until the run is complete. An impossible run is refused. Prints the run's name and
    folder. With SLIPSTREAM_SERVICE=URL the queue is a service's. With --to sky it prints a task of SkyPilot, and its
    price, and starts nothing.
    """
    to = to or default_place()
    from slipstream.service.records import Asked, refuse_others

    site = (time, partition, account, tuple(shlex.split(sbatch_options)))
    asked = Asked(nodes, gpus_per_node, cpus_per_task, *site, ray_address, accelerator, infra)
    refuse_others(to, asked)
    return submit_to(
        to,
        asked,
        Path(run_file),
        overrides,
        resume=resume,
        follow=follow,
        dry_run=dry_run,
        prints_json=json,
        store=store,
    )


def status(
    *runs: Annotated[Path, Parameter(help="Names or folders of runs; default: all of the queue.", show=True)],
    json: Json = False,
) -> int:
    """Show the state of submitted runs, wherever they run."""
    queue = queued_runs()
    queue.keep_going()
    shown = [queue.one(str(run)) for run in runs] if runs else queue.all()
    if json:
        print_json([*map(as_values, shown)])
    elif shown:
        print_table(lines_of(shown))
    else:
        tell("found no submitted run: slipstream runs lists the others", file=sys.stderr)
    return 0


def logs(
    run: Annotated[Path, Parameter(help="Name or folder of the run.")],
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="", help="Until the run ends.")] = False,
    json: Json = False,
) -> int:
    """Print the output of a submitted run, with --json as lines with a field `output`.

    With -f the exit code is the run's. Ctrl-C then leaves the run alone.
    """
    queue, output = queued_runs(), Output(as_json=json)
    if follow:
        return follow_queued(queue, str(run), output)
    print_log(queue, str(run), 0, output)
    return 0


def cancel(
    run: Annotated[Path, Parameter(help="Name or folder of the run.")],
    /,
    *others: Annotated[Path, Parameter(help="Further runs; --json then prints a list.")],
    json: Json = False,
) -> int:
    """Cancel submitted runs: each gets SIGTERM, saves a checkpoint if there is time, and ends.

    With an unknown run none is cancelled.
    """
    queue = queued_runs()
    had_ended = {str(each): queue.one(str(each)).has_ended for each in (run, *others)}
    now = [(queue.cancel(name), is_late) for name, is_late in had_ended.items()]
    if json:
        rows = [{**as_values(each), "cancelled": not is_late} for each, is_late in now]
        print_json(rows if others else rows[0])
        return 0
    for each, is_late in now:
        tell(f"{each.id} has ended already: {each.state}" if is_late else f"cancelled: {each.id}")
    return 0
