"""The commands of submitted runs, in this machine's queue or as jobs of Slurm: submit, status, logs, cancel."""

from __future__ import annotations

import os
import shlex
import sys
import time as clock
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from slipstream.cli.commands import Overrides, RunFile
from slipstream.cli.output import Json, print_json, print_table, tell
from slipstream.cli.service import (
    Output,
    Where,
    as_values,
    default_place,
    follow_queued,
    line_of,
    print_log,
    queued_runs,
    submit_locally,
)
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.clusters.slurm import Job, NodeShape
    from slipstream.config import RunConfig

_RUNS = Path("runs")
_POLL_S, _ASK_S = 0.5, 5.0
_CHUNK = 1 << 16


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
    store: Annotated[
        str, Parameter(env_var="SLIPSTREAM_STORE", help="Upload the artifacts there: a folder, or s3://bucket/prefix.")
    ] = "",
    resume: Annotated[
        bool, Parameter(negative="", help="Continue the run in run.folder, or its copy in --store.")
    ] = False,
    follow: Annotated[bool, Parameter(negative="", help="Then print the output until the job ends.")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Print the batch script, and submit nothing.")] = False,
    json: Json = False,
) -> int:
    """Submit a run to this machine's queue, or to Slurm on one node or several.

    In the queue it starts as soon as the GPUs of its plan are free (docs/service.md). A job of Slurm saves a
    checkpoint before its time limit, and is requeued until the run is complete; the options for nodes, time and sbatch
    are Slurm's. An impossible run is refused. Prints the run's name, or the job's number, and the run
    folder. With SLIPSTREAM_SERVICE=URL the queue is a service's.
    """
    if (to or default_place()) == "local":
        given = {"--nodes": nodes, "--time": time, "--partition": partition, "--account": account}
        given |= {"--gpus-per-node": gpus_per_node, "--cpus-per-task": cpus_per_task}
        given["--sbatch-options"] = sbatch_options or None
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{wrong[0]} is Slurm's: add --to slurm, or leave it out")
        return submit_locally(
            Path(run_file), overrides, resume=resume, follow=follow, dry_run=dry_run, prints_json=json, store=store
        )
    if store and store != os.environ.get("SLIPSTREAM_STORE"):
        raise ConfigError("--store is for runs in a queue: add --to local, or leave it out")
    from slipstream.clusters import slurm
    from slipstream.clusters.batch_script import Request, batch_script
    from slipstream.launch.start import new_run_folder
    from slipstream.runlog import holds_run, refuse_used

    run_file = Path(run_file)
    config = _config(run_file, overrides, nodes)
    folder = (config.run.folder or new_run_folder(run_file.stem)).absolute()
    if not resume or not holds_run(folder):
        refuse_used(folder)
    job = slurm.job_of(folder)
    if job is not None and (state := slurm.state_of(job)) is not None and not state.has_ended:
        raise ConfigError(f"job {job.id} of {folder} is {state.name}: wait for its end, or use slipstream cancel")
    gpus, cpus = _per_node(config, gpus_per_node, _shape(partition, is_needed=not dry_run))
    site = [f"--{name}={value}" for name, value in (("partition", partition), ("account", account)) if value]
    request = Request(
        ["train", str(run_file.absolute()), *overrides, "--run.folder", str(folder), "--resume=auto", "--plain"],
        folder,
        config.cluster.nodes,
        config.run.grace_s,
        time,
        gpus,
        cpus_per_task or cpus,
        [*site, *shlex.split(sbatch_options)],
    )
    script = batch_script(request)
    if dry_run:
        print_json({"script": script}) if json else tell(script, end="")
        return 0
    job = slurm.submit(script, folder, request.nodes, clock.time())
    if json:
        print_json({"job": job.id, "folder": str(folder)}, is_result=not follow)
    else:
        tell(f"job:        {job.id}\nrun folder: {folder}", flush=True)
    return _follow(folder, job, Output(as_json=False)) if follow else 0


def status(
    *runs: Annotated[Path, Parameter(help="Names or folders of runs; default: all of the queue.", show=True)],
    json: Json = False,
) -> int:
    """Show the state of submitted runs: of the queue, and of jobs of Slurm below runs.

    Slurm forgets a job some minutes after its end; the run folder then tells how the run ended.
    """
    queue = queued_runs()
    queue.keep_going()
    jobs = [path for path in map(Path, runs) if _is_job(path)]
    if not runs:
        jobs = sorted(path.parents[1] for path in _RUNS.glob("*/slurm/job.json"))
    shown = [queue.one(str(run)) for run in runs if not _is_job(Path(run))] if runs else queue.all()
    found = [line_of(each) for each in shown]
    found += [_line_of_job(folder) for folder in jobs]
    if json:
        print_json([*map(as_values, shown), *found[len(shown) :]])
    elif found:
        print_table([{name: "-" if value is None else value for name, value in each.items()} for each in found])
    else:
        tell("found no submitted run: slipstream runs lists the others", file=sys.stderr)
    return 0


def _line_of_job(folder: Path) -> dict[str, object]:
    """A job of Slurm as a row."""
    from slipstream.clusters import slurm
    from slipstream.runlog import holds_run, summarize

    job = slurm.job_of(folder)
    if job is None and not holds_run(folder):
        raise ConfigError(f"{folder} holds no run and has no job: name a run folder")
    state = None if job is None else slurm.state_of(job)
    run = summarize(folder) if holds_run(folder) else None
    return {
        "run": str(folder),
        "state": run.status if run else "not started",
        "step": run.step if run else 0,
        "job": job.id if job else None,
        "job state": state.name if state else None,
        "reason": state.reason if state else "",
        "time": f"{state.elapsed} of {state.limit}" if state else "",
        "nodes": state.nodes if state else "",
    }


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
    folder, output = Path(run), Output(as_json=json)
    if not _is_job(folder):
        queue = queued_runs()
        if follow:
            return follow_queued(queue, str(run), output)
        print_log(queue, str(run), 0, output)
        return 0
    job = _job(folder)
    if follow:
        return _follow(folder, job, output)
    _copy(folder, 0, output)
    return 0


def cancel(run: Annotated[Path, Parameter(help="Name or folder of the run.")], /, *, json: Json = False) -> int:
    """Cancel a submitted run: it gets SIGTERM, saves a checkpoint if there is time, and ends."""
    from slipstream.clusters import slurm

    if not _is_job(Path(run)):
        queue = queued_runs()
        had_ended = queue.one(str(run)).has_ended
        now = queue.cancel(str(run))
        if json:
            print_json({**as_values(now), "cancelled": not had_ended})
        else:
            tell(f"{now.id} has ended already: {now.state}" if had_ended else f"cancelled: {now.id}")
        return 0
    job = _job(Path(run))
    state = slurm.state_of(job)
    is_over = state is None or state.has_ended
    if not is_over:
        slurm.cancel(job)
    if json:
        print_json({"job": job.id, "cancelled": not is_over})
    else:
        tell(f"job {job.id} has ended already" if is_over else f"cancelled: job {job.id}")
    return 0


def _is_job(folder: Path) -> bool:
    """Whether a path is the folder of a job, or of a run outside the queue."""
    from slipstream.clusters import slurm
    from slipstream.runlog import holds_run
    from slipstream.service.store import record_of

    is_known = slurm.job_of(folder) is not None or holds_run(folder)
    return is_known and record_of(folder) is None


def _config(run_file: Path, overrides: tuple[str, ...], nodes: int | None) -> RunConfig:
    """The run's settings, where Slurm chooses the address."""
    from slipstream.config import load_config

    implied: dict[str, object] = {"cluster.address": "slurm:1", "cluster.run_id": "slurm"}
    implied |= {} if nodes is None else {"cluster.nodes": nodes}
    config = load_config(run_file, overrides, implied=implied).config
    if nodes not in (None, config.cluster.nodes):
        raise ConfigError(f"cluster.nodes = {config.cluster.nodes} contradicts --nodes {nodes}: leave one of them out")
    return config


def _shape(partition: str | None, *, is_needed: bool) -> NodeShape | None:
    """The cluster's nodes. None if they are not needed and Slurm is not here."""
    from slipstream.clusters import slurm

    try:
        return slurm.node_shape(partition or os.environ.get("SBATCH_PARTITION"))
    except ConfigError:
        if is_needed:
            raise
        return None


def _per_node(config: RunConfig, gpus: int | None, shape: NodeShape | None) -> tuple[int, int | None]:
    """GPUs and cores to ask for on each node: by default the GPUs that the run uses, if the cluster has any, and their
    share of the cores."""
    from slipstream.config.traits import engine_workers, shares_weights, starts_engines, starts_teacher

    asked, nodes = config.cluster.gpus_per_node, config.cluster.nodes
    if gpus is None and isinstance(asked, int):
        gpus = asked
    if gpus is None:
        beside = starts_engines(config) and not shares_weights(config) and config.run.placement != "shared"
        whole = config.training.ranks + (engine_workers(config) if beside else 0) + starts_teacher(config)
        gpus = max(-(-whole // nodes), config.inference.tensor_parallel_size if beside else 1)
        gpus = 0 if shape is not None and not shape.gpus else gpus
    if isinstance(config.run.threads, int):
        return gpus, config.run.threads
    if shape is None:
        return gpus, None
    return gpus, max(1, shape.cpus * min(gpus, shape.gpus) // shape.gpus) if gpus and shape.gpus else shape.cpus


def _job(folder: Path) -> Job:
    from slipstream.clusters import slurm

    if (job := slurm.job_of(folder)) is None:
        raise ConfigError(f"{folder} has no job: slipstream submit makes one; other runs write to their terminal")
    return job


def _copy(folder: Path, start: int, output: Output) -> int:
    """Print the job's output from byte `start` on; the number of bytes so far."""
    from slipstream.clusters.slurm import OUTPUT

    try:
        with (folder / OUTPUT).open("rb") as file:
            file.seek(start)
            while data := file.read(_CHUNK):
                output.write(data)
                start += len(data)
    except FileNotFoundError:
        pass
    return start


def _follow(folder: Path, job: Job, output: Output) -> int:
    """Print the job's output until it ends for good; the run's exit code, or 1."""
    from slipstream.clusters import slurm
    from slipstream.runlog import read_exit

    place, asked, num_ended = 0, clock.monotonic(), 0
    try:
        while num_ended < 2:  # a job that is requeued may look ended for a moment
            place = _copy(folder, place, output)
            clock.sleep(_POLL_S)
            if num_ended or clock.monotonic() - asked > _ASK_S:
                state, asked = slurm.state_of(job), clock.monotonic()
                num_ended = num_ended + 1 if state is None or state.has_ended else 0
    except KeyboardInterrupt:
        tell(f"job {job.id} continues: slipstream status {shlex.quote(str(folder))}", file=sys.stderr)
        raise
    _copy(folder, place, output)
    report, state = read_exit(folder), slurm.state_of(job)
    if state is not None and state.name != "COMPLETED":
        tell(f"job {job.id} ended: {state.name} {state.reason}".rstrip(), file=sys.stderr)
        return report.exit_code if report is not None and report.exit_code else 1
    return report.exit_code if report is not None else 1
