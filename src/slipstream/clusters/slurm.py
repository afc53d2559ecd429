"""Slurm's programs: submits a job, asks for its state, cancels it.

Guarantees: each call has a deadline; a refusal is one sentence with Slurm's own reason. `slurmctld` forgets a job some
minutes after its end, and accounting may be off: the state is then unknown, and the run folder tells how the run ended.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError

_ANSWER_S = 60.0
_REFUSES, _SILENT = "refuses the job", "does not answer"
_ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    }
)
_WITHOUT_NODES = _ENDED | {"COMPLETING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}


@dataclass(frozen=True)
class JobState:
    """A job as Slurm shows it."""

    id: str
    name: str
    """`RUNNING`, `PENDING` ..."""
    reason: str
    """Why it waits, or has failed."""
    elapsed: str
    limit: str
    nodes: str

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.name in _ENDED


@dataclass(frozen=True)
class NodeShape:
    """The smallest node of a partition."""

    cpus: int
    gpus: int
    kind: str = ""
    """Of its GPUs, as the cluster names it."""


def check(script: str) -> None:
    """Raises ConfigError if a job of this script could never start."""
    _call(["sbatch", "--test-only"], _REFUSES, script)


def submit(script: str) -> str:
    """Submit a job, and return its number. Raises ConfigError."""
    answer = _call(["sbatch", "--parsable"], _REFUSES, script)
    return answer.partition(";")[0]


def own_jobs() -> dict[str, JobState]:
    """This user's jobs as far as Slurm knows them, by name; of several with one name the first. Raises ConfigError."""
    queue = ["squeue", "--noheader", "--me", "--states=all", "--format=%j|%i|%T|%r|%M|%l|%N"]
    found: dict[str, JobState] = {}
    for line in _call(queue, _SILENT).splitlines():
        name, _, rest = line.partition("|")
        if not rest.partition("|")[0].isdecimal():  # an array, or a name with a bar: none of ours
            continue
        state = _state(rest)
        if name not in found or int(state.id) < int(found[name].id):
            found[name] = state
    return found


def ended_job(number: str) -> JobState | None:
    """A job by Slurm's accounting; None without it."""
    fields = "JobID,State,Reason,Elapsed,Timelimit,NodeList"
    book = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}", f"--format={fields}"]
    try:
        answer = _call(book, _SILENT)
    except ConfigError:  # accounting is off
        return None
    return _state(answer.splitlines()[-1]) if answer else None


def cancel(number: str) -> None:
    """Cancel a job: its processes get SIGTERM, and after KillWait SIGKILL. Raises ConfigError."""
    _call(["scancel", number], "refuses to cancel the job")


def has_lost_nodes(number: str, requeues: int) -> bool:
    """Whether Slurm has ended the start of a job after so many requeues. Its processes survive a dead daemon of their
    node. False without an answer."""
    try:
        return _lost_nodes(_call(["scontrol", "show", "job", "--oneliner", number], _SILENT), requeues)
    except ConfigError:
        return False


def requeue(number: str) -> None:
    """Have Slurm start this job again. Raises ConfigError. Called inside the job it does not return for long."""
    _call(["scontrol", "requeue", number], "refuses to requeue the job")


def node_shape(partition: str | None) -> NodeShape | None:
    """The smallest node with GPUs, or the smallest one if none has any. None without nodes."""
    where = [] if partition is None else [f"--partition={partition}"]
    answer = _call(["sinfo", "--noheader", "--Node", "--format=%c|%G", *where], "does not answer")
    shapes = [_shape(line) for line in answer.splitlines()]
    return min((each for each in shapes if each.gpus), default=None, key=_size) or min(shapes, default=None, key=_size)


def _call(command: Sequence[str], problem: str, given: str | None = None) -> str:
    """The output of a program of Slurm. Raises ConfigError."""
    program = command[0]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_ANSWER_S, check=False, errors="replace"
        )
    except FileNotFoundError:
        raise ConfigError(f"{program} is not on PATH: use a login node of a cluster with Slurm") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{program} gave no answer within {_ANSWER_S:g} s: ask the cluster's operators") from None
    if done.returncode == 0:
        return done.stdout.strip()
    reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    remedy = "change the options" if problem == _REFUSES else "ask the cluster's operators"
    raise ConfigError(f"{program} {problem} ({reason}): {remedy}")


def _state(line: str) -> JobState:
    number, name, reason, elapsed, limit, nodes = line.split("|")[:6]
    return JobState(number, name.split()[0].rstrip("+"), reason if reason != "None" else "", elapsed, limit, nodes)


def _lost_nodes(answer: str, requeues: int) -> bool:
    """Of `JobId=7 JobName=a ... JobState=RUNNING Reason=None ... Restarts=0 ...`."""
    state, count = re.search(r"\sJobState=(\w+)", answer), re.search(r"\sRestarts=(\d+)", answer)
    return (state is not None and state[1] in _WITHOUT_NODES) or (count is not None and int(count[1]) > requeues)


def _shape(line: str) -> NodeShape:
    """Of `64|gpu:h100:8(S:0-1),nvme:1`."""
    cpus, _, resources = line.partition("|")
    gpus = [each.partition("(")[0].split(":") for each in resources.split(",") if each.startswith("gpu")]
    kinds = [parts[1] for parts in gpus if len(parts) > 2]
    return NodeShape(int(cpus), sum(int(parts[-1]) for parts in gpus), kinds[0] if kinds else "")


def _size(shape: NodeShape) -> tuple[int, int]:
    return shape.gpus, shape.cpus
