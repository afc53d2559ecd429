"""The batch script of a run, pure: a supervisor (`service/slurm_job.py`) on the job's first node.

The supervisor starts the run by one srun step with a process on each node. Slurm signals it before the time limit.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ConfigError

_SLACK_S = 60
"""Between the end of a run that was warned and the time limit; Slurm looks at limits twice a minute."""
_DEAF = ["/bin/sh", "-c", 'trap "" USR1; exec "$0" "$@"']
"""Starts a process that ignores the signal until it has a handler. An agent may start later than the run."""


@dataclass(frozen=True)
class Request:
    """A run as a job."""

    name: str
    command: Sequence[str]
    """Supervises the run."""
    output: Path
    """Of that process, absolute."""
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
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": request.gpus_per_node or None,
        "cpus-per-task": request.cpus_per_task,
        "time": request.time,
        "signal": f"B:USR1@{warned_s}",
        "open-mode": "append",
        "output": str(request.output).replace("%", "%%"),
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    directives = "\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", *_grouped(request.options)])
    return f"""#!/bin/bash
{directives}
trap "" USR1 # until the supervisor takes it
exec {shlex.join(request.command)}
"""


def srun(cpus_per_task: int | None, command: Sequence[str]) -> list[str]:
    """The step with one process of a command on each node of the job."""
    cpus = [] if cpus_per_task is None else [f"--cpus-per-task={cpus_per_task}"]  # srun inherits none
    return ["srun", "--kill-on-bad-exit=1", "--export=ALL", "--input=none", *cpus, *_DEAF, *command]


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
