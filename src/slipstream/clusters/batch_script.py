"""The batch script of a run, pure.

One srun step has a process on each node. Before the time limit Slurm signals the script, and the script the step, as
soon as the run listens. The run saves a checkpoint and ends, and `requeue.py` decides whether the job is requeued. Each
start of the job continues the run. The token exists in the script's environment alone.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.clusters.slurm import OUTPUT
from slipstream.clusters.starts import FILE
from slipstream.errors import ConfigError
from slipstream.nodes.places import OWNER_VARIABLE
from slipstream.nodes.protocol import TOKEN_VARIABLE
from slipstream.runlog.files import LOCK_FILE

_SLACK_S = 60
"""Between the end of a run that was warned and the time limit; Slurm looks at limits twice a minute."""
_DEAF = ["/bin/sh", "-c", 'trap "" USR1; exec "$0" "$@"']
"""Starts a process that ignores the signal until it has a handler. An agent may start later than the run."""


@dataclass(frozen=True)
class Request:
    """A run as a job."""

    command: Sequence[str]
    """Arguments of `slipstream`."""
    folder: Path
    """The run folder, absolute."""
    nodes: int
    grace_s: float
    """`run.grace_s`."""
    time: str | None = None
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    options: Sequence[str] = ()
    """Further options of sbatch."""

    @property
    def warned_s(self) -> int:
        """How long before the time limit the run is asked to stop."""
        return math.ceil(self.grace_s) + _SLACK_S


def batch_script(request: Request) -> str:
    """The script's text. Raises ConfigError for a time limit without time to train."""
    warned_s = request.warned_s
    if request.time is not None and 0 <= (limit := seconds_of(request.time)) <= warned_s:
        raise ConfigError(
            f"--time {request.time} is {limit} s, and the last {warned_s} s of it are kept to save a checkpoint: give "
            "it more, or lower run.grace_s"
        )
    options = {
        "job-name": re.sub(r"[^\w.-]", "-", request.folder.name),
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": request.gpus_per_node or None,
        "cpus-per-task": request.cpus_per_task,
        "time": request.time,
        "signal": f"B:USR1@{warned_s}",
        "open-mode": "append",
        "output": str(request.folder / OUTPUT).replace("%", "%%"),
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    directives = "\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", *_grouped(request.options)])
    cpus = [] if request.cpus_per_task is None else [f"--cpus-per-task={request.cpus_per_task}"]  # srun inherits none
    python = [sys.executable, "-P", "-m"]
    srun = ["srun", "--kill-on-bad-exit=1", "--export=ALL", *cpus, *_DEAF]
    run = shlex.join([*srun, *python, "slipstream.cli", *request.command])
    decide = shlex.join([*python, "slipstream.launch.recovery.requeue", str(request.folder)])
    start, lock = (shlex.quote(str(request.folder / name)) for name in (FILE, LOCK_FILE))
    return f"""#!/bin/bash
{directives}
warned=no
step=
warn() {{
    warned=yes
    [ -n "$step" ] || return
    trap "" USR1
    # A run holds its folder once it listens. Before, the signal would be lost, or end srun.
    until [ {lock} -nt {start} ] || ! kill -0 "$step" 2>/dev/null; do sleep 1; done
    kill -USR1 "$step" 2>/dev/null
}}
trap warn USR1
began=$(date +%s)
echo "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" >{start}
{TOKEN_VARIABLE}=$(head -c 32 /dev/urandom | base64 --wrap=0)
export {TOKEN_VARIABLE} {OWNER_VARIABLE}=slurm

{run} &
step=$!
[ "$warned" = no ] || warn
wait "$step"
code=$?
if [ "$warned" = yes ]; then # the signal has ended the wait, not the step
    wait "$step"
    again=$?
    [ "$again" = 127 ] || code=$again
fi
if {decide} "$began" "$warned" "$code"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def seconds_of(time: str) -> int:
    """A time limit as sbatch takes it, `90`, `90:00`, `1:30:00`, `2-12` or `2-12:30`; -1: none. Raises ConfigError."""
    if time.lower() in ("infinite", "unlimited"):
        return -1
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        raise ConfigError(f"--time {time} is no time limit: write minutes, or as 1:30:00 or 2-12:00")
    days, *parts = (int(each) if each else None for each in found.groups())
    first, second, third = (each or 0 for each in parts)
    if days is not None:
        return days * 86_400 + first * 3600 + second * 60 + third
    if parts[2] is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def _grouped(options: Sequence[str]) -> list[str]:
    """One line for each option with its values."""
    lines: list[str] = []
    for each in options:
        if each.startswith("-") or not lines:
            lines.append(shlex.quote(each))
        else:
            lines[-1] += f" {shlex.quote(each)}"
    return lines
