"""Slurm's programs: submits a job, asks for its state, cancels it. The run folder keeps the job's number.

Guarantees: each call has a deadline; a refusal is one sentence with Slurm's own reason. `slurmctld` forgets a job some
minutes after its end, and accounting may be off: the state is then unknown, and the run folder tells how the run ended.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.errors import ConfigError
from slipstream.processes.files import write_whole
from slipstream.runlog.files import JOB_FOLDER, read_record

OUTPUT = f"{JOB_FOLDER}/output.log"
"""The job's output, below the run folder."""
_RECORD, _SCRIPT = f"{JOB_FOLDER}/job.json", f"{JOB_FOLDER}/job.sh"
_ANSWER_S = 60.0
_REFUSES = "refuses the job"
_ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    }
)


class Job(msgspec.Struct, frozen=True):
    """A run's newest job."""

    id: int
    nodes: int
    submitted: float
    """Unix time."""


@dataclass(frozen=True)
class JobState:
    """A job as Slurm shows it."""

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


def submit(script: str, folder: Path, nodes: int, now: float) -> Job:
    """Submit the job of the run in `folder`. Raises ConfigError if it could never start."""
    _call(["sbatch", "--test-only"], _REFUSES, script)
    (folder / JOB_FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
    answer = _call(["sbatch", "--parsable"], _REFUSES, script)
    job = Job(int(answer.partition(";")[0]), nodes, now)
    write_whole(folder / _SCRIPT, script.encode())
    write_whole(folder / _RECORD, msgspec.json.encode(job))
    return job


def job_of(folder: Path) -> Job | None:
    """The newest job of the run in `folder`."""
    return read_record(folder / _RECORD, Job)


def state_of(job: Job) -> JobState | None:
    """The state of a job; None if Slurm knows it no longer."""
    queue = ["squeue", "--noheader", "--states=all", f"--jobs={job.id}", "--format=%T|%r|%M|%l|%N"]
    try:
        answer = _call(queue, "does not answer")
    except _UnknownJob:
        answer = ""
    if not answer:
        fields = "State,Reason,Elapsed,Timelimit,NodeList"
        book = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job.id}", f"--format={fields}"]
        try:
            answer = _call(book, "does not answer")
        except ConfigError:  # accounting is off
            return None
    return _state(answer.splitlines()[-1]) if answer else None


def cancel(job: Job) -> None:
    """Cancel a job: its processes get SIGTERM, and after KillWait SIGKILL."""
    _call(["scancel", str(job.id)], "refuses to cancel the job")


def node_shape(partition: str | None) -> NodeShape | None:
    """The smallest node with GPUs, or the smallest one if none has any. None without nodes."""
    where = [] if partition is None else [f"--partition={partition}"]
    answer = _call(["sinfo", "--noheader", "--Node", "--format=%c|%G", *where], "does not answer")
    shapes = [_shape(line) for line in answer.splitlines()]
    return min((each for each in shapes if each.gpus), default=None, key=_size) or min(shapes, default=None, key=_size)


class _UnknownJob(ConfigError):
    """Slurm has forgotten a job."""


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
    if "Invalid job id" in reason:
        raise _UnknownJob(reason)
    remedy = "change the options" if problem == _REFUSES else "ask the cluster's operators"
    raise ConfigError(f"{program} {problem} ({reason}): {remedy}")


def _state(line: str) -> JobState:
    name, reason, elapsed, limit, nodes = line.split("|")[:5]
    return JobState(name.split()[0].rstrip("+"), reason if reason != "None" else "", elapsed, limit, nodes)


def _shape(line: str) -> NodeShape:
    """Of `64|gpu:h100:8(S:0-1),nvme:1`."""
    cpus, _, resources = line.partition("|")
    gpus = [each.partition("(")[0] for each in resources.split(",") if each.startswith("gpu")]
    return NodeShape(int(cpus), sum(int(each.rpartition(":")[2]) for each in gpus))


def _size(shape: NodeShape) -> tuple[int, int]:
    return shape.gpus, shape.cpus
