"""The commands `serve` and `gpus`, and the part of other commands for runs in a queue, of this machine or a service."""

from __future__ import annotations

import codecs
import os
import shlex
import shutil
import sys
import time as clock
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from slipstream.cli.output import Json, print_json, print_table, tell
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.config import Loaded
    from slipstream.service.records import Asked
    from slipstream.service.runs import Runs, Shown

Where = Literal["local", "slurm", "ray", "sky"]
_POLL_S, _ASK_S = 0.5, 5.0


def serve(
    *,
    host: Annotated[str, Parameter(help="Address to listen on; others than loopback need tokens.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="0: a free one.")] = 8700,
    new_token: Annotated[str | None, Parameter(help="Make and print a token for this user, and serve nothing.")] = None,
    json: Json = False,
) -> int:
    """Serve this machine's queue over HTTP, with a page for the browser (docs/service.md).

    Runs continue after the end of the service, and its next start finds them. It runs the code of all its users as this
    Unix user.
    Commands use it with SLIPSTREAM_SERVICE=http://HOST:PORT, and their token in SLIPSTREAM_SERVICE_TOKEN.
    """
    from slipstream.service.store import Store

    store = Store()
    if new_token is not None:
        from slipstream.service.access import new_token as make

        token = make(store, new_token)
        print_json({"user": new_token, "token": token}) if json else tell(token)
        tell("each request needs a token from now on, also to a running service", file=sys.stderr)
        return 0
    try:
        from slipstream.service.api import serve as run
        from slipstream.service.index import DATABASE
    except ModuleNotFoundError as error:
        raise ConfigError(f"the service needs {error.name}: pip install 'slipstream[service]'") from None

    def announce(port: int, needs_token: bool) -> None:
        shown = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if json:
            print_json({"url": shown, "needs_token": needs_token})
        else:
            tell(f"service: {shown}{' (with a token)' if needs_token else ''}", flush=True)

    run(store, os.environ.get(DATABASE, ""), host, port, announce)
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


def is_remote() -> bool:
    """Whether SLIPSTREAM_SERVICE names a service."""
    return bool(os.environ.get("SLIPSTREAM_SERVICE"))


def list_queued(*, as_json: bool) -> int:
    """Print all runs of the queue, newest first."""
    found = queued_runs().all()[::-1]
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(found))
    elif found:
        print_table(lines_of(found))
    else:
        tell("found no submitted run", file=sys.stderr)
    return 0


def default_place() -> Where:
    """Slurm on a machine with sbatch, unless a service is named."""
    return "slurm" if shutil.which("sbatch") and not is_remote() else "local"


def submit_to(
    to: Where,
    asked: Asked,
    run_file: Path,
    overrides: tuple[str, ...],
    *,
    resume: bool,
    follow: bool,
    dry_run: bool,
    prints_json: bool,
    store: str = "",
) -> int:
    """Queue a run, and follow it if asked to; the exit code of the command."""
    from slipstream.config import dump_given, load_config
    from slipstream.runlog.redaction import refuse_secrets
    from slipstream.service.preflight import implied_by, launched_by
    from slipstream.view.text import as_duration

    implied = implied_by(to) | launched_by(to, asked.nodes)
    loaded, queue = load_config(run_file, overrides, implied=implied), queued_runs()
    if asked.nodes not in (None, loaded.config.cluster.nodes):
        found = loaded.config.cluster.nodes
        raise ConfigError(f"cluster.nodes = {found} contradicts --nodes {asked.nodes}: leave one of them out")
    refuse_secrets(dump_given(loaded))
    if not is_remote():
        from slipstream.service.dotenv_file import secrets_of

        os.environ.update(secrets_of(loaded.config, Path.cwd()))
    for text in loaded.warnings:
        tell(f"warning: {text}", file=sys.stderr)
    if to == "sky":
        return _show_task(loaded, run_file.stem, asked, store, prints_json=prints_json)
    if dry_run and to == "slurm":
        from slipstream.service.slurm import dry_script

        folder = (loaded.config.run.folder or Path("runs") / run_file.stem).absolute()
        script = dry_script(folder, loaded.config, asked)
        print_json({"script": script}) if prints_json else tell(script, end="")
        return 0
    if dry_run:
        return _show_choice(to, loaded, asked, prints_json=prints_json)
    if not is_remote() and (kind := untested(loaded.config.model.path)):
        tell(f"warning: {kind} has no test here: slipstream smoke {run_file} makes a few steps first", file=sys.stderr)
    run = queue.submit(loaded, run_file.stem, resume=resume, store=store, to=to, asked=asked)
    if prints_json:
        print_json(as_values(run), is_result=not follow)
    else:
        tell(f"run:        {run.id}\nrun folder: {run.folder}\nstate:      {run.state} {run.reason}".rstrip())
        time = "unknown" if run.estimated_s is None else f"about {as_duration(run.estimated_s)}"
        cost = "" if run.estimated_cost is None else f", cost {run.estimated_cost:g}"
        need = _need_line(run.estimate.gpus, run.estimate.memory_gib) if run.estimate.shape else run.estimate.how
        tell(f"estimate:   {time}, {need}{cost}", flush=True)
    return follow_queued(queue, run.id, Output(as_json=prints_json)) if follow else 0


def _show_choice(to: Where, loaded: Loaded, asked: Asked, *, prints_json: bool) -> int:
    """Print a run's need, and where it would start now and why."""
    import msgspec

    from slipstream.service.dispatch import would_start
    from slipstream.service.providers import all_providers
    from slipstream.service.store import Store

    providers = all_providers()
    found = providers[to].preflight(Path(), loaded, asked)
    if to == "local":
        places, why = would_start(Store(), providers[to], found.need)
    else:
        places, why = (
            (),
            f"each node needs {found.asked.cpus_per_task} CPUs and {found.asked.gpus_per_node} GPUs of Ray",
        )
    if prints_json:
        print_json({**msgspec.to_builtins(found), "places": places, "why": why})
        return 0
    need = _need_line(found.need.gpus, found.estimate.memory_gib)
    tell(f"need:     {need}\nestimate: {found.estimate.how}\nchoice:   {', '.join([*places, why])}")
    return 0


def _show_task(loaded: Loaded, name: str, asked: Asked, store: str, *, prints_json: bool) -> int:
    """Print a task of SkyPilot, and its price."""
    import msgspec

    from slipstream.service.sky import offers_for, task_of

    task = task_of(loaded, name, asked, store)
    offers = offers_for(task)
    if prints_json:
        print_json({"task": task, "offers": msgspec.to_builtins(offers)})
        return 0
    tell(task, end="")
    best = offers[0]
    tell(f"{best.machine} of {best.cloud} is the cheapest, at {best.hour:g} dollars an hour", file=sys.stderr)
    tell("start it: sky launch -c NAME TASK.yaml", file=sys.stderr)
    return 0


def untested(model: str) -> str:
    """The class of a model in a folder, if no test has its family; empty otherwise."""
    from slipstream.plan.families import family_of
    from slipstream.plan.preflight.model_folder import read_config_file

    folder = Path(model)
    is_model = (folder / "config.json").is_file()  # and not a run or checkpoint
    kinds = read_config_file(folder).get("architectures") if is_model else None
    return str(kinds[0]) if isinstance(kinds, list) and kinds and family_of(str(kinds[0])) is None else ""


def lines_of(runs: Sequence[Shown]) -> list[dict[str, object]]:
    """Runs of the queue as rows of a table."""
    return [{name: "-" if value is None else value for name, value in line_of(run).items()} for run in runs]


def line_of(run: Shown) -> dict[str, object]:
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
        "to": run.to,
        "job": run.job or None,
        "place": ", ".join(run.places),
        "reason": run.reason,
        "time": took if run.estimated_s is None else f"{took} of about {as_duration(run.estimated_s)}",
    }


def as_values(run: Shown) -> dict[str, object]:
    """A run for `--json`."""
    import msgspec

    return msgspec.to_builtins(run)


def _need_line(gpus: int, memory_gib: float) -> str:
    return f"{gpus} GPUs with {memory_gib:g} GiB" if gpus else f"the CPU with {memory_gib:g} GiB"


class Output:
    """Prints pieces of a run's output as text, or each as a line of JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        """Print a piece; a character may be cut by its end."""
        text = self._decoder.decode(data)
        print_json({"output": text}, is_result=False) if self.as_json else tell(text, end="", flush=True)


def print_log(queue: Runs, name: str, place: int, output: Output) -> int:
    """Print a run's output from byte `place` on; the number of bytes so far."""
    while (chunk := queue.log(name, place)).data:
        output.write(chunk.data)
        place = chunk.next
    return place


def follow_queued(queue: Runs, name: str, output: Output) -> int:
    """Print a run's output until it has ended, and with JSON then the run; its exit code."""
    place, looked = 0, clock.monotonic()
    try:
        while True:
            run = queue.one(name)
            place = print_log(queue, name, place, output)
            if run.has_ended:
                break
            clock.sleep(_POLL_S)
            if clock.monotonic() - looked > _ASK_S:
                queue.keep_going()
                looked = clock.monotonic()
    except KeyboardInterrupt:
        tell(f"{name} continues: slipstream status {shlex.quote(name)}", file=sys.stderr)
        raise
    if output.as_json:
        print_json(as_values(run))
    if run.state != "done":
        tell(f"{name} ended: {run.state} {run.reason}".rstrip(), file=sys.stderr)
    return run.exit_code
