"""The commands of a run as a job of Slurm: submit, status, logs, cancel."""

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
    nodes: Annotated[int | None, Parameter(help="Nodes of the run; default: cluster.nodes.")] = None,
    time: Annotated[str | None, Parameter(help="Time limit, as 12:00:00; default: the partition's.")] = None,
    partition: Annotated[str | None, Parameter(help="Default: SBATCH_PARTITION, or Slurm's.")] = None,
    account: Annotated[str | None, Parameter(help="Default: SBATCH_ACCOUNT, or Slurm's.")] = None,
    gpus_per_node: Annotated[int | None, Parameter(help="Default: as many as the run uses.")] = None,
    cpus_per_task: Annotated[int | None, Parameter(help="Cores on each node; default: the share of its GPUs.")] = None,
    sbatch_options: Annotated[
        str, Parameter(allow_leading_hyphen=True, help='Further options, as "--qos=high --constraint=h100".')
    ] = "",
    resume: Annotated[bool, Parameter(negative="", help="Continue the run in run.folder.")] = False,
    follow: Annotated[bool, Parameter(negative="", help="Then print the output until the job ends.")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Print the batch script, and submit nothing.")] = False,
    json: Json = False,
) -> int:
    """Submit a run to Slurm, on one node or several.

    The job saves a checkpoint before its time limit, and is requeued until the run is complete. A job that could never
    start is refused. Prints the job's number and the run folder.
    """
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
    return _follow(folder, job) if follow else 0


def status(
    *runs: Annotated[Path, Parameter(help="Run folders; default: all jobs below runs.", show=True)], json: Json = False
) -> int:
    """Show the state of runs and of their jobs.

    Slurm forgets a job some minutes after its end; the run folder then tells how the run ended.
    """
    from slipstream.clusters import slurm
    from slipstream.runlog import holds_run, summarize

    found: list[dict[str, object]] = []
    for folder in map(Path, runs or sorted(path.parents[1] for path in _RUNS.glob("*/slurm/job.json"))):
        job = slurm.job_of(folder)
        if job is None and not holds_run(folder):
            raise ConfigError(f"{folder} holds no run and has no job: name a run folder")
        state = None if job is None else slurm.state_of(job)
        run = summarize(folder) if holds_run(folder) else None
        found.append(
            {
                "run": str(folder),
                "state": run.status if run else "not started",
                "step": run.step if run else 0,
                "job": job.id if job else None,
                "job state": state.name if state else None,
                "reason": state.reason if state else "",
                "time": f"{state.elapsed} of {state.limit}" if state else "",
                "nodes": state.nodes if state else "",
            }
        )
    if json:
        print_json(found)
    elif found:
        print_table([{name: "-" if value is None else value for name, value in each.items()} for each in found])
    else:
        tell(f"found no job in {_RUNS}: slipstream runs lists runs without one", file=sys.stderr)
    return 0


def logs(
    run: Annotated[Path, Parameter(help="The run folder.")],
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="", help="Until the job ends.")] = False,
) -> int:
    """Print the output of a run's job.

    With -f the exit code is the run's. Ctrl-C then leaves the job alone.
    """
    folder = Path(run)
    job = _job(folder)
    if follow:
        return _follow(folder, job)
    _copy(folder, 0)
    return 0


def cancel(run: Annotated[Path, Parameter(help="The run folder.")], /, *, json: Json = False) -> int:
    """Cancel the job of a run: it gets SIGTERM, saves a checkpoint if there is time, and ends."""
    from slipstream.clusters import slurm

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
    from slipstream.config.traits import engine_workers, shares_weights, starts_teacher, uses_engine

    asked, nodes = config.cluster.gpus_per_node, config.cluster.nodes
    if gpus is None and isinstance(asked, int):
        gpus = asked
    if gpus is None:
        beside = uses_engine(config) and not shares_weights(config) and config.run.placement != "shared"
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


def _copy(folder: Path, start: int) -> int:
    """Print the job's output from byte `start` on; the number of bytes so far."""
    from slipstream.clusters.slurm import OUTPUT

    try:
        with (folder / OUTPUT).open("rb") as file:
            file.seek(start)
            while data := file.read(_CHUNK):
                tell(data.decode(errors="replace"), end="", flush=True)
                start += len(data)
    except FileNotFoundError:
        pass
    return start


def _follow(folder: Path, job: Job) -> int:
    """Print the job's output until it ends for good; the run's exit code, or 1."""
    from slipstream.clusters import slurm
    from slipstream.runlog import read_exit

    place, asked, num_ended = 0, clock.monotonic(), 0
    try:
        while num_ended < 2:  # a job that is requeued may look ended for a moment
            place = _copy(folder, place)
            clock.sleep(_POLL_S)
            if num_ended or clock.monotonic() - asked > _ASK_S:
                state, asked = slurm.state_of(job), clock.monotonic()
                num_ended = num_ended + 1 if state is None or state.has_ended else 0
    except KeyboardInterrupt:
        tell(f"job {job.id} continues: slipstream status {shlex.quote(str(folder))}", file=sys.stderr)
        raise
    _copy(folder, place)
    report, state = read_exit(folder), slurm.state_of(job)
    if state is not None and state.name != "COMPLETED":
        tell(f"job {job.id} ended: {state.name} {state.reason}".rstrip(), file=sys.stderr)
        return report.exit_code if report is not None and report.exit_code else 1
    return report.exit_code if report is not None else 1
