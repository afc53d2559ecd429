"""Reads run folders, also of running runs: never waits for the writer and never changes a file."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from slipstream.errors import DataError
from slipstream.names import model_name
from slipstream.processes.heartbeat import read_heartbeat, read_processes
from slipstream.runlog.files import Row, Rows, is_running, read_lines, read_record, read_toml

REWARD = "reward/mean"
ACCURACY = "eval/accuracy"
COUNTS = ("dropped/", "dropped_groups/", "dropped_tokens/", "retry/")
"""Groups of metrics with counts by reason, of events since the row before."""
ROLLOUT_COUNTS = ("non_finite", "metrics_left_out")
ROLLOUT_FLAGS = ("not_applicable", "unclosed_thinking")
"""Ends of names of metrics of some rollouts only: counts, and flags with the value 1."""
_SPARSE = re.compile(
    rf"({'|'.join(COUNTS)}).+|rollout/(stop_.+|groups_cancelled|thinking_length|turns)|train/skipped|checkpoint/skipped"
    r"|idle/.+_s|staleness/age_\d+|task/.+/dropped|task/left_out"
    rf"|reward/(.+/)?({'|'.join((*ROLLOUT_COUNTS, *ROLLOUT_FLAGS))})"
)
MAX_FOLDERS = 20_000
"""A search for runs ends after so many: it may have been asked of a whole disk."""
_MAX_TIME, _MAX_NUMBER = 1e11, 1 << 53
_TABLES = ("sequences", "images", "turns")
"""Fields of a sample with lists of tables."""

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
    """The kind of failure, see `errors.FailureClass`; empty if the run finished."""
    retriable: bool = False
    """Whether the same command with --resume may succeed as it is."""
    traceback: str = ""
    """Only for bugs, not for errors with a message for the user."""


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
    """Working time of the run's processes, without pauses before resumes."""
    message: str = ""
    model: str = ""
    """Its start model, for people."""


class _Model(msgspec.Struct):
    path: str = ""


class _Training(msgspec.Struct):
    steps: int | None = None


class _Settings(msgspec.Struct):
    """The part of `resolved.toml` for a summary."""

    model: _Model = msgspec.field(default_factory=_Model)
    training: _Training = msgspec.field(default_factory=_Training)


def _why_no_line(line: Row) -> str:
    time_, numbers = line.get("time"), [line.get("lineage"), line.get("step", 0)]
    if not isinstance(time_, int | float) or not 0 <= time_ < _MAX_TIME:
        return "it has no time"
    if not all(isinstance(number, int) and 0 <= number < _MAX_NUMBER for number in numbers):
        return "its lineage or step is no such number"
    return ""


def why_no_event(line: Row) -> str:
    """Why a line is no event; empty if it is."""
    return _why_no_line(line) or ("" if isinstance(line.get("kind"), str) else "it has no kind")


def why_no_row(line: Row) -> str:
    """Why a line is no row of metrics; empty if it is."""
    bad = [name for name, value in line.items() if "/" in name and not isinstance(value, int | float | None)]
    if "step" not in line:
        return "it has no step"
    return _why_no_line(line) or (f"{bad[0]} is no number" if bad else "")


def why_no_sample(line: Row) -> str:
    """Why a line is no sample; empty if it is."""
    for name in _TABLES:
        tables: Any = line.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in cast("list[Any]", tables)):
            return f"{name} is no list of tables"
    return _why_no_line(line)


def read_metrics(folder: str | Path) -> Rows:
    """One row for each step of the surviving history, in order.

    A later lineage repeats the steps after its checkpoint; the earlier lineage's rows of these steps are left out. Rows
    of one step are merged. Values are the last written; a later lineage adds only values missing in the step. Counts
    add up. `lineage` and `time` come from the first row.
    """
    return metrics_of(read_lines(Path(folder) / "metrics.jsonl", why_none=why_no_row), read_events(folder))


def metrics_of(lines: Rows, events: Rows) -> Rows:
    """`read_metrics` for lines already read."""
    rows: dict[int, Row] = {}
    for row in _surviving(lines, _after(_resumed_from(events))):
        first = rows.get(row["step"])
        rows[row["step"]] = row if first is None else _merged(first, row)
    return [rows[step] for step in sorted(rows)]


def _merged(first: Row, further: Row) -> Row:
    is_resumed = further["lineage"] > first["lineage"]
    both = {**further, **first} if is_resumed else {**first, **further}
    for name in first.keys() & further.keys():
        if name.startswith(COUNTS):
            both[name] = (first[name] or 0.0) + (further[name] or 0.0)
    return both | {"lineage": first["lineage"], "time": first["time"]}


def is_sparse(name: str) -> bool:
    """Whether rows have a metric only if there is something to report; `plain` is its value in a batch without it."""
    return _SPARSE.fullmatch(name) is not None


def plain(name: str) -> float:
    """The value of a sparse metric in a row without it."""
    return 1.0 if name == "rollout/turns" else 0.0


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The settings in `resolved.toml` as `section.key` and value; empty if the file does not exist."""
    tables = read_toml(Path(folder) / "resolved.toml")
    found = {
        f"{section}.{name}": value
        for section, table in tables.items()
        if isinstance(table, dict)
        for name, value in table.items()
    }
    if isinstance(arguments := found.get("algorithm.arguments"), dict):
        del found["algorithm.arguments"]
        found |= {f"algorithm.arguments.{name}": value for name, value in arguments.items()}
    return found


def read_samples(folder: str | Path) -> Rows:
    """The samples of the surviving history. A training sample has the `step` of its batch (from 0), a held-out one
    (`split` is `eval`) the step of the evaluated version."""
    return samples_of(read_lines(Path(folder) / "samples.jsonl", why_none=why_no_sample), read_events(folder))


def samples_of(lines: Rows, events: Rows) -> Rows:
    """`read_samples` for lines already read."""
    resumed = _resumed_from(events)
    held_out = [line for line in lines if line.get("split") == "eval"]
    trained = [line for line in lines if line.get("split") != "eval"]
    return _latest(_surviving(trained, resumed)) + _latest(_surviving(held_out, _after(resumed)))


def _latest(samples: Rows) -> Rows:
    """Each rollout once: one kept at its end, after a tool failed, may have been kept again with its advantage."""
    early = {(line.get("step"), line.get("id")) for line in samples if line.get("kept") == "failure"}
    again = {key for line in samples if "kept" not in line and (key := (line.get("step"), line.get("id"))) in early}
    return [line for line in samples if "kept" not in line or (line.get("step"), line.get("id")) not in again]


def read_events(folder: str | Path, damage: list[str] | None = None, kinds: Collection[str] = ()) -> Rows:
    """Events of all lineages, optionally only of `kinds`, in the order of writing; for `damage` see `read_lines`."""
    words = tuple(f'"{kind}"'.encode() for kind in kinds)
    events = read_lines(Path(folder) / "events.jsonl", damage, words, why_none=why_no_event)
    return [event for event in events if not kinds or event.get("kind") in kinds]


def read_exit(folder: str | Path) -> ExitReport | None:
    """How the run ended; None while it runs, or if it was killed."""
    return read_record(Path(folder) / "exit.json", ExitReport)


@dataclass
class FoundRuns:
    """The runs in some folders."""

    runs: list[RunSummary] = field(default_factory=list)
    """Newest first. An unreadable run is listed as such."""
    num_folders: int = 0
    """Number of searched folders."""
    was_cut: bool = False
    """Whether there were more than `MAX_FOLDERS`."""


def find_runs(roots: Sequence[str | Path]) -> FoundRuns:
    """The runs in `roots` and below them at any depth, but in no hidden folder and in no run; a root may be a run. A
    run's name is its path below its root; with several roots it includes the root."""
    found, seen = FoundRuns(), set[Path]()
    for root in map(Path, roots):
        for folder in _run_folders(root, found):
            if (real := folder.resolve()) not in seen:
                seen.add(real)
                name = folder if len(roots) > 1 or folder == root else folder.relative_to(root)
                found.runs.append(replace(summarize(folder), name=str(name)))
    found.runs.sort(key=lambda run: (-run.started, run.name))
    return found


def _run_folders(folder: Path, found: FoundRuns) -> Iterator[Path]:
    """Folders of runs, and folders not readable for this user: they may be runs."""
    waiting = [folder]
    while waiting:
        folder = waiting.pop()
        if found.num_folders >= MAX_FOLDERS:
            found.was_cut = True
            return
        found.num_folders += 1
        names: list[str] = []
        try:
            with os.scandir(folder) as entries:
                names = sorted(each.name for each in entries if each.is_dir() and not each.name.startswith("."))
            is_run = (folder / "events.jsonl").is_file()
        except FileNotFoundError:
            continue
        except OSError:
            is_run = True
        if is_run:
            yield folder
        else:
            # A link may lead back to its own folder.
            waiting += [folder / name for name in reversed(names) if not (folder / name).is_symlink()]


def summarize(folder: str | Path) -> RunSummary:
    """Summarizes one run. Damaged or unreadable files are reported in the summary, never raised."""
    folder = Path(folder)
    try:
        # Checked first: if the run ends in between, its `exit.json` already exists when read.
        running = is_running(folder)
        report, events, rows = read_exit(folder), read_events(folder), read_metrics(folder)
        return summary_of(folder, running, report, events, rows, read_toml(folder / "resolved.toml"))
    except (DataError, msgspec.ValidationError, KeyError, TypeError, OSError) as error:
        status: RunStatus = "unreadable" if isinstance(error, OSError) else "damaged"
        message = f"{type(error).__name__}: {error}"
        return RunSummary(folder.resolve().name, folder, status, 0, None, None, None, _changed(folder), 0.0, message)


def _changed(folder: Path) -> float:
    for path in (folder / "events.jsonl", folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def summary_of(
    folder: Path,
    running: bool,
    report: ExitReport | None,
    events: Rows,
    rows: Rows,
    tables: dict[str, Any],
) -> RunSummary:
    """Summary of a run's files after reading; `running` is checked before anything is read."""
    try:
        settings = msgspec.convert(tables, _Settings)
    except msgspec.ValidationError as error:
        where = folder / "resolved.toml"
        raise DataError(f"{where} has a value of a wrong kind ({error}): rewrite or remove it") from error
    started, duration_s = _working_time([*events, *rows], until=time.time() if running else None)
    return RunSummary(
        name=folder.resolve().name,
        folder=folder,
        status=report.status if report else "running" if running else "killed",
        step=max((row["step"] for row in rows), default=0),
        total_steps=settings.training.steps,
        model=model_name(settings.model.path) if settings.model.path else "",
        reward=_last(rows, REWARD),
        accuracy=_last(rows, ACCURACY),
        started=started,
        duration_s=duration_s,
        message=report.message if report else _silence(folder) if running else "",
    )


def _silence(folder: Path) -> str:
    """Overdue heartbeats of a running run's processes, as text; empty if all beat, or have not begun to beat."""
    beat, now = read_heartbeat(folder), time.time()
    found = [beat.silence(now)] if beat else []
    return "; ".join(filter(None, [*found, *(each.silence(now) for each in read_processes(folder))]))


def _working_time(lines: Rows, until: float | None) -> tuple[float, float]:
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


def _resumed_from(events: Rows) -> dict[int, int]:
    """For each resumed lineage, the step of the checkpoint it started from."""
    resumes = (event for event in events if event["kind"] == "resume" and isinstance(event.get("step"), int))
    return {event["lineage"]: event["step"] for event in resumes}


def _after(steps: dict[int, int]) -> dict[int, int]:
    return {lineage: step + 1 for lineage, step in steps.items()}


def _surviving(rows: Rows, begins: dict[int, int]) -> Rows:
    """Rows not repeated by a later lineage. A lineage begins at its step in `begins`, or at its first row."""
    first_steps: dict[int, int] = {}
    for row in rows:
        if "step" in row:
            first_steps[row["lineage"]] = min(row["step"], first_steps.get(row["lineage"], row["step"]))
    first_steps |= begins

    def survives(row: Row) -> bool:
        later = (step for lineage, step in first_steps.items() if lineage > row["lineage"])
        return "step" not in row or all(row["step"] < step for step in later)

    return [row for row in rows if survives(row)]


def _last(rows: Rows, name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


def last_attempt(events: Rows, rows: Rows) -> tuple[int, float, int]:
    """Number of a run's last attempt (-1: it has none), seconds from its first to its last line, and automatic
    restarts of all attempts."""
    lines = [*events, *rows]
    last = max((int(line["lineage"]) for line in lines), default=-1)
    times = [float(line["time"]) for line in lines if line["lineage"] == last]
    restarts = sum(event.get("kind") == "restart" for event in events)
    return last, max(times, default=0.0) - min(times, default=0.0), restarts


def holds_run(folder: Path) -> bool:
    """Whether `folder` holds a run, in any state."""
    return (folder / "events.jsonl").is_file()


def checkpoints_of(folder: Path) -> list[Path]:
    """The folders of a run's checkpoints by step, whole or not; names have six digits or, from a million steps on,
    more."""
    found = [path for path in folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
