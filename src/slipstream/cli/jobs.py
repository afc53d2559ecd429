"""The commands of submitted runs, in this machine's queue or as jobs of Slurm: submit, status, logs, cancel, gpus."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time as clock
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from slipstream.cli.commands import Overrides, RunFile
from slipstream.cli.output import Json, print_json, print_table, tell
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.clusters.slurm import Job, NodeShape
    from slipstream.config import RunConfig
    from slipstream.service.runs import Runs, Shown

Where = Literal["local", "slurm"]
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
    resume: Annotated[bool, Parameter(negative="", help="Continue the run in run.folder.")] = False,
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
        return _submit_locally(Path(run_file), overrides, resume=resume, follow=follow, dry_run=dry_run, as_json=json)
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
    found = [_line_of(each) for each in shown]
    found += [_line_of_job(folder) for folder in jobs]
    if json:
        print_json([*map(_as_json, shown), *found[len(shown) :]])
    elif found:
        print_table([{name: "-" if value is None else value for name, value in each.items()} for each in found])
    else:
        tell("found no submitted run: slipstream runs lists the others", file=sys.stderr)
    return 0


def _line_of(run: Shown) -> dict[str, object]:
    """A run of the queue as a row."""
    from slipstream.view.text import as_duration

    actual = run.actual.seconds if run.actual is not None else None
    if run.attempts and not run.has_ended:
        actual = clock.time() - run.attempts[-1].started if run.places else actual
    took = "-" if actual is None else as_duration(actual)
    return {
        "run": run.id,
        "state": run.state,
        "step": f"{run.step} of {run.steps}",
        "job": None,
        "place": ", ".join(run.places),
        "reason": run.reason,
        "time": took if run.estimated_s is None else f"{took} of about {as_duration(run.estimated_s)}",
    }


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
) -> int:
    """Print the output of a submitted run.

    With -f the exit code is the run's. Ctrl-C then leaves the run alone.
    """
    folder = Path(run)
    if not _is_job(folder):
        queue = queued_runs()
        if follow:
            return _follow_queued(queue, str(run))
        _print_log(queue, str(run), 0)
        return 0
    job = _job(folder)
    if follow:
        return _follow(folder, job)
    _copy(folder, 0)
    return 0


def cancel(run: Annotated[Path, Parameter(help="Name or folder of the run.")], /, *, json: Json = False) -> int:
    """Cancel a submitted run: it gets SIGTERM, saves a checkpoint if there is time, and ends."""
    from slipstream.clusters import slurm

    if not _is_job(Path(run)):
        queue = queued_runs()
        had_ended = queue.one(str(run)).has_ended
        now = queue.cancel(str(run))
        if json:
            print_json({**_as_json(now), "cancelled": not had_ended})
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


def gpus(*, json: Json = False) -> int:
    """Show the GPUs of the queue: memory, runs, and other programs on them.

    Without a GPU the CPU is the one place, for one run at a time.
    """
    import msgspec

    places = queued_runs().places()
    if json:
        print_json(msgspec.to_builtins(places))
        return 0
    print_table(
        [
            {
                "place": each.place,
                "name": each.name,
                "GiB": each.total_gib,
                "free": each.free_gib,
                "runs": ", ".join(each.runs),
                "others": ", ".join(each.others),
            }
            for each in places
        ]
    )
    return 0


def queued_runs() -> Runs:
    """The queue of the service in SLIPSTREAM_SERVICE, or of this machine."""
    from slipstream.service.client import ADDRESS, RemoteRuns

    if address := os.environ.get(ADDRESS):
        return RemoteRuns(address)
    from slipstream.service.runs import LocalRuns
    from slipstream.service.store import Store

    return LocalRuns(Store())


def default_place() -> Where:
    """Slurm on a machine with sbatch, unless a service is named."""
    return "slurm" if shutil.which("sbatch") and "SLIPSTREAM_SERVICE" not in os.environ else "local"


def _is_job(folder: Path) -> bool:
    """Whether a path is the folder of a job, or of a run outside the queue."""
    from slipstream.clusters import slurm
    from slipstream.runlog import holds_run
    from slipstream.service.store import record_of

    is_known = slurm.job_of(folder) is not None or holds_run(folder)
    return is_known and record_of(folder) is None


def _as_json(run: Shown) -> dict[str, object]:
    import msgspec

    return msgspec.to_builtins(run)


def _submit_locally(
    run_file: Path, overrides: tuple[str, ...], *, resume: bool, follow: bool, dry_run: bool, as_json: bool
) -> int:
    from slipstream.config import load_config
    from slipstream.service.preflight import plan_ahead
    from slipstream.view.text import as_duration

    loaded, queue = load_config(run_file, overrides), queued_runs()
    for text in loaded.warnings:
        tell(f"warning: {text}", file=sys.stderr)
    if dry_run:
        import msgspec

        found = plan_ahead(loaded)
        print_json(msgspec.to_builtins(found)) if as_json else tell(
            _need_line(found.need.gpus, found.estimate.memory_gib)
        )
        return 0
    run = queue.submit(loaded, run_file.stem, resume=resume)
    if as_json:
        print_json(_as_json(run), is_result=not follow)
    else:
        tell(f"run:        {run.id}\nrun folder: {run.folder}\nstate:      {run.state} {run.reason}".rstrip())
        time = "unknown" if run.estimated_s is None else f"about {as_duration(run.estimated_s)}"
        tell(f"estimate:   {time}, {_need_line(run.estimate.gpus, run.estimate.memory_gib)}", flush=True)
    return _follow_queued(queue, run.id) if follow else 0


def _need_line(gpus: int, memory_gib: float) -> str:
    return f"{gpus} GPUs with {memory_gib:g} GiB" if gpus else f"the CPU with {memory_gib:g} GiB"


def _print_log(queue: Runs, name: str, place: int) -> int:
    """Print a run's output from byte `place` on; the number of bytes so far."""
    while (chunk := queue.log(name, place)).data:
        tell(chunk.data.decode(errors="replace"), end="", flush=True)
        place = chunk.next
    return place


def _follow_queued(queue: Runs, name: str) -> int:
    """Print a run's output until it has ended; its exit code."""
    place, looked = 0, clock.monotonic()
    try:
        while True:
            run = queue.one(name)
            place = _print_log(queue, name, place)
            if run.has_ended:
                break
            clock.sleep(_POLL_S)
            if clock.monotonic() - looked > _ASK_S:
                queue.keep_going()
                looked = clock.monotonic()
    except KeyboardInterrupt:
        tell(f"{name} continues: slipstream status {shlex.quote(name)}", file=sys.stderr)
        raise
    if run.state != "done":
        tell(f"{name} ended: {run.state} {run.reason}".rstrip(), file=sys.stderr)
    return run.exit_code


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
