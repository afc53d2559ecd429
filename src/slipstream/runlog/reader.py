"""Reads run folders, also of running runs: never waits for the writer and never changes a file."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.errors import DataError
from slipstream.runlog.files import is_locked, read_lines, read_toml
from slipstream.runlog.heartbeat import read_heartbeat, read_processes

REWARD = "reward/mean"
ACCURACY = "eval/accuracy"
COUNTS = ("dropped/", "dropped_groups/", "dropped_tokens/", "retry/")
"""Groups of metrics that are counts by reason, of what happened since the row before."""
ROLLOUT_COUNTS = ("non_finite", "metrics_left_out")
ROLLOUT_FLAGS = ("not_applicable", "unclosed_thinking")
"""Ends of names of metrics that only some rollouts have: numbers of things, and 1 where something is so."""
_SPARSE = re.compile(
    rf"({'|'.join(COUNTS)}).+|rollout/(stop_.+|groups_cancelled|thinking_length|turns)|train/skipped|checkpoint/skipped"
    r"|idle/.+_s|staleness/age_\d+|task/.+/dropped|task/left_out"
    rf"|reward/(.+/)?({'|'.join((*ROLLOUT_COUNTS, *ROLLOUT_FLAGS))})"
)

ExitStatus = Literal["finished", "failed", "interrupted"]
RunStatus = Literal["running", "finished", "failed", "interrupted", "killed", "damaged", "unreadable"]


class ExitReport(msgspec.Struct, frozen=True):
    """`exit.json`: how the last process of a run ended."""

    status: ExitStatus
    exit_code: int
    error: str
    """Class of the error; empty if the run finished."""
    message: str
    step: int
    """The last step with metrics."""
    seconds: float
    """Since this process opened the folder."""
    time: float
    lineage: int
    versions: dict[str, str]
    restarts: int = 0
    """Automatic restarts, over all lineages."""
    failure_class: str = ""
    """What kind of thing ended the run, see `errors.FailureClass`; empty if it finished."""
    retriable: bool = False
    """Whether the same command with --resume may succeed as it is."""
    traceback: str = ""
    """Only for bugs, not for errors whose message is meant for the user."""


@dataclass(frozen=True)
class RunSummary:
    """One row of a list of runs. `killed`: there is no `exit.json` and no process holds the folder."""

    name: str
    folder: Path
    status: RunStatus
    step: int
    total_steps: int | None
    reward: float | None
    accuracy: float | None
    started: float
    """Unix time."""
    duration_s: float
    """Time that processes worked on the run, without pauses before resumes."""
    message: str = ""


class _Training(msgspec.Struct):
    steps: int | None = None


class _Settings(msgspec.Struct):
    """The part of `resolved.toml` that a summary needs."""

    training: _Training = msgspec.field(default_factory=_Training)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """One row for each step of the surviving history, in order.

    Steps of an earlier lineage after the step from which a later one resumed are left out: they were repeated. Rows of
    one step are merged. Values are the last written; a later lineage adds only what the step lacks. Counts add up.
    `lineage` and `time` are those of the first row.
    """
    return metrics_of(read_lines(Path(folder) / "metrics.jsonl"), read_events(folder))


def metrics_of(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`read_metrics` for lines that were already read."""
    rows: dict[int, dict[str, Any]] = {}
    for row in _surviving(lines, _after(_resumed_from(events))):
        first = rows.get(row["step"])
        rows[row["step"]] = row if first is None else _merged(first, row)
    return [rows[step] for step in sorted(rows)]


def _merged(first: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    is_resumed = further["lineage"] > first["lineage"]
    both = {**further, **first} if is_resumed else {**first, **further}
    for name in first.keys() & further.keys():
        if name.startswith(COUNTS):
            both[name] = (first[name] or 0.0) + (further[name] or 0.0)
    return both | {"lineage": first["lineage"], "time": first["time"]}


def is_sparse(name: str) -> bool:
    """Whether a row has a metric only where there is something: for a row of a batch that lacks it, see `plain`."""
    return _SPARSE.fullmatch(name) is not None


def plain(name: str) -> float:
    """The value of a sparse metric in a row without it."""
    return 1.0 if name == "rollout/turns" else 0.0


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The settings in `resolved.toml` as `section.key` and value; empty if the file does not exist."""
    tables = read_toml(Path(folder) / "resolved.toml")
    return {
        f"{section}.{name}": value
        for section, table in tables.items()
        if isinstance(table, dict)
        for name, value in table.items()
    }


def read_samples(folder: str | Path) -> list[dict[str, Any]]:
    """The samples of the surviving history. `step` of a training sample is that of its batch (from 0); of a held-out
    one (`split` is `eval`) that of the evaluated version."""
    return samples_of(read_lines(Path(folder) / "samples.jsonl"), read_events(folder))


def samples_of(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`read_samples` for lines that were already read."""
    resumed = _resumed_from(events)
    held_out = [line for line in lines if line.get("split") == "eval"]
    trained = [line for line in lines if line.get("split") != "eval"]
    return _latest(_surviving(trained, resumed)) + _latest(_surviving(held_out, _after(resumed)))


def _latest(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each rollout once: one that was kept when it ended, because a tool failed, may have been kept again with its
    advantage."""
    early = {(line.get("step"), line.get("id")) for line in samples if line.get("kept") == "failure"}
    again = {key for line in samples if "kept" not in line and (key := (line.get("step"), line.get("id"))) in early}
    return [line for line in samples if "kept" not in line or (line.get("step"), line.get("id")) not in again]


def read_events(
    folder: str | Path, damage: list[str] | None = None, kinds: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Events of all lineages, optionally only of `kinds`, in the order of writing; for `damage` see `read_lines`."""
    events = read_lines(Path(folder) / "events.jsonl", damage, tuple(f'"{kind}"'.encode() for kind in kinds))
    return [event for event in events if not kinds or event.get("kind") in kinds]


def read_exit(folder: str | Path) -> ExitReport | None:
    """How the run ended; None while it runs, or if it was killed."""
    path = Path(folder) / "exit.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExitReport)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}): remove it") from error


def is_running(folder: str | Path) -> bool:
    """Whether a running process writes to the folder."""
    return is_locked(Path(folder))


def list_runs(root: str | Path) -> list[RunSummary]:
    """The runs in `root` and one folder level below, newest first, named by their paths below `root`. A run that cannot
    be read is listed as such."""
    root = Path(root)
    runs = [replace(summarize(folder), name=str(folder.relative_to(root))) for folder in _run_folders(root)]
    return sorted(runs, key=lambda run: (-run.started, run.name))


def _run_folders(root: Path, depth: int = 2) -> Iterator[Path]:
    """Folders of runs, and folders that this user may not read, which may be runs."""
    for folder in sorted(path for path in root.glob("*") if os.path.isdir(path)):
        try:
            os.scandir(folder).close()
            is_run = (folder / "events.jsonl").is_file()
        except OSError:
            is_run = True
        if is_run:
            yield folder
        elif depth > 1:
            yield from _run_folders(folder, depth - 1)


def summarize(folder: str | Path) -> RunSummary:
    """Summarizes one run. Damaged or unreadable files are reported in the summary, never raised."""
    folder = Path(folder)
    try:
        return _summarize(folder)
    except (DataError, msgspec.ValidationError, KeyError, TypeError, OSError) as error:
        status: RunStatus = "unreadable" if isinstance(error, OSError) else "damaged"
        message = f"{type(error).__name__}: {error}"
        return RunSummary(folder.resolve().name, folder, status, 0, None, None, None, _changed(folder), 0.0, message)


def _changed(folder: Path) -> float:
    for path in (folder / "events.jsonl", folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _summarize(folder: Path) -> RunSummary:
    # Checked first: if the run ends in between, its `exit.json` exists when that is read.
    running = is_running(folder)
    report, events, rows = read_exit(folder), read_events(folder), read_metrics(folder)
    return summary_of(folder, running, report, events, rows, read_toml(folder / "resolved.toml"))


def summary_of(
    folder: Path,
    running: bool,
    report: ExitReport | None,
    events: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    tables: dict[str, Any],
) -> RunSummary:
    """Summary of a run's files after reading; `running` is checked before anything is read."""
    settings = msgspec.convert(tables, _Settings)
    started, duration_s = _working_time([*events, *rows], until=time.time() if running else None)
    return RunSummary(
        name=folder.resolve().name,
        folder=folder,
        status=report.status if report else "running" if running else "killed",
        step=max((row["step"] for row in rows), default=0),
        total_steps=settings.training.steps,
        reward=_last(rows, REWARD),
        accuracy=_last(rows, ACCURACY),
        started=started,
        duration_s=duration_s,
        message=report.message if report else _silence(folder) if running else "",
    )


def _silence(folder: Path) -> str:
    """What the heartbeats of a running run say against its processes; empty where all beat, or have not begun to."""
    beat, now = read_heartbeat(folder), time.time()
    found = [beat.silence(now)] if beat else []
    return "; ".join(filter(None, [*found, *(each.silence(now) for each in read_processes(folder))]))


def _working_time(lines: list[dict[str, Any]], until: float | None) -> tuple[float, float]:
    """Start of the first lineage, and the time from first to last line summed over lineages."""
    spans: dict[int, tuple[float, float]] = {}
    for line in lines:
        first, last = spans.get(line["lineage"], (line["time"], line["time"]))
        spans[line["lineage"]] = (min(first, line["time"]), max(last, line["time"]))
    if until is not None and spans:
        first, last = spans[max(spans)]
        spans[max(spans)] = (first, max(last, until))
    started = min((first for first, _ in spans.values()), default=0.0)
    return started, round(sum(last - first for first, last in spans.values()), 3)


def _resumed_from(events: list[dict[str, Any]]) -> dict[int, int]:
    """For each resumed lineage, the step of the checkpoint it started from."""
    return {event["lineage"]: event["step"] for event in events if event["kind"] == "resume"}


def _after(steps: dict[int, int]) -> dict[int, int]:
    return {lineage: step + 1 for lineage, step in steps.items()}


def _surviving(rows: list[dict[str, Any]], begins: dict[int, int]) -> list[dict[str, Any]]:
    """Rows that no later lineage repeated. A lineage begins where `begins` says, or at its first row."""
    first_steps: dict[int, int] = {}
    for row in rows:
        if "step" in row:
            first_steps[row["lineage"]] = min(row["step"], first_steps.get(row["lineage"], row["step"]))
    first_steps |= begins

    def survives(row: dict[str, Any]) -> bool:
        later = (step for lineage, step in first_steps.items() if lineage > row["lineage"])
        return "step" not in row or all(row["step"] < step for step in later)

    return [row for row in rows if survives(row)]


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


def holds_run(folder: Path) -> bool:
    """Whether `folder` holds a run, in any state."""
    return (folder / "events.jsonl").is_file()
