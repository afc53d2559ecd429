"""Reads a whole run folder at once, in any state: running, killed, torn or damaged.

Never waits for the writer, never changes a file, and raises only if the folder holds no run. Lines that cannot be used
are left out and reported in `damage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, DataError
from slipstream.regular_files import read_regular
from slipstream.runlog.files import Row, Rows, is_running, read_lines, read_toml
from slipstream.runlog.reader import (
    ExitReport,
    RunSummary,
    holds_run,
    metrics_of,
    read_exit,
    samples_of,
    summary_of,
    why_no_event,
    why_no_row,
    why_no_sample,
)


@dataclass(frozen=True)
class Setting:
    """One line of `resolved.toml`."""

    name: str
    """`section.key`."""
    value: str
    """As TOML; empty if it is not set."""
    origin: str
    """Line of the run file, command line, default, or the reason for a derived value."""
    applies: bool = True
    """False: it is not set, or has no effect in this run."""


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder."""

    summary: RunSummary
    rows: Rows
    """Metrics of the surviving history, one row a step."""
    events: Rows
    samples: Rows
    """Without tokens, which `slipstream trace` reads for the sample it follows."""
    settings: list[Setting]
    exit: ExitReport | None
    damage: list[str]
    """One sentence for each thing that could not be read."""


def read_run(folder: str | Path) -> RunRecord:
    """Reads the run in `folder`. Raises `ConfigError` if it holds no run."""
    folder = Path(folder)
    if not holds_run(folder):
        raise ConfigError(f"{folder} holds no run: name a folder that `slipstream train` wrote")
    damage: list[str] = []
    # Checked first: if the run ends in between, its `exit.json` exists when that is read.
    running = is_running(folder)
    report: ExitReport | None = None
    try:
        report = read_exit(folder)
    except DataError as error:
        damage.append(str(error))
    events = _usable(folder / "events.jsonl", why_no_event, damage)
    rows = metrics_of(_usable(folder / "metrics.jsonl", why_no_row, damage), events)
    samples = samples_of(_usable(folder / "samples.jsonl", _why_no_sample, damage, without="sequences"), events)
    tables, settings = _settings(folder / "resolved.toml", damage)
    try:
        summary = summary_of(folder, running, report, events, rows, tables)
    except DataError as error:
        damage.append(str(error))
        summary = summary_of(folder, running, report, events, rows, {})
    if damage and report is None and not running:
        summary = replace(summary, status="damaged", message=damage[0])
    return RunRecord(summary, rows, events, samples, settings, report, damage)


def samples_with_tokens(record: RunRecord) -> Rows:
    """The same samples with their tokens. What cannot be read is in `damage` already."""
    lines = _usable(Path(record.summary.folder) / "samples.jsonl", _why_no_sample, [])
    return samples_of(lines, record.events)


def _usable(path: Path, why_none: Callable[[Row], str], damage: list[str], without: str = "") -> Rows:
    """The lines that `why_none` accepts. The number of others is reported, with the problem of the first."""
    rows = read_lines(path, damage, without=without)
    bad = [problem for row in rows if (problem := why_none(row))]
    if bad:
        damage.append(f"{path}: {len(bad)} lines cannot be used, as {bad[0]}: remove them")
    return [row for row in rows if not why_none(row)] if bad else rows


def _why_no_sample(line: Row) -> str:
    return why_no_sample(line) or ("" if "step" in line else "it has no step")


def _settings(path: Path, damage: list[str]) -> tuple[dict[str, Any], list[Setting]]:
    """The file's tables, and its lines with their comments (the origins of values)."""
    try:
        tables = read_toml(path)
    except DataError as error:
        damage.append(str(error))
        return {}, []
    if not tables:
        return {}, []
    section, found = "", list[Setting]()
    for line in read_regular(path).decode().splitlines():
        if line.startswith("["):
            section = line.strip("[] ") + "."
        elif line.strip():
            # An origin never contains two consecutive spaces, so the last such mark is its start.
            setting, _, origin = line.rpartition("  # ")
            applies = not setting.startswith("# ")
            name, _, value = setting.removeprefix("# ").strip().partition(" = ")
            found.append(Setting(section + name.removesuffix(" is not set"), value, origin, applies))
    return tables, found
