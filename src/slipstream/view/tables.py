"""Tables for the command line."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from slipstream.runlog import RunSummary
from slipstream.view.base import ACCURACY_COLUMN, REWARD_COLUMN
from slipstream.view.text import as_duration, clean


def render_runs(runs: Sequence[RunSummary]) -> Group:
    """A table of runs, one line each, followed by the reasons why runs ended."""
    styles = {"running": "cyan", "finished": "green", "failed": "red", "killed": "red", "damaged": "red"}
    styles["unreadable"] = "red"
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, overflow="ellipsis")
    table.add_column("status", no_wrap=True)
    for heading in ("step", "reward", "accuracy", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("started", no_wrap=True)
    table.add_column("model", no_wrap=True, overflow="ellipsis")
    for run in runs:
        table.add_row(
            Text(clean(run.name), "bold"),
            Text(run.status, styles.get(run.status, "yellow")),
            f"{run.step}/{'?' if run.total_steps is None else run.total_steps}",
            REWARD_COLUMN.text(run.reward),
            ACCURACY_COLUMN.text(run.accuracy),
            as_duration(run.duration_s),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
            Text(clean(run.model)),
        )
    reasons = [Text.assemble((clean(run.name), "bold"), ": ", clean(run.message)) for run in runs if run.message]
    return Group(table, *([Text(), *reasons] if reasons else []))


def render_table(rows: Iterable[Mapping[str, object]], columns: Sequence[str]) -> Table:
    """A plain table of the named keys; numbers are right-aligned, missing values are shown as a dash."""
    rows = list(rows)
    table = Table(box=None, pad_edge=False)
    for name in columns:
        numeric = all(isinstance(row.get(name, 0), int | float) for row in rows)
        table.add_column(Text(clean(name)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in columns))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return clean(str(value))
