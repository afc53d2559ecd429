"""The figures of several samples a task and by data source: a table of the first and the last evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.report.markup import NONE, Child, Html, h, join, table
from slipstream.runlog import ACCURACY, RunRecord
from slipstream.runlog.evaluations import figures_of, sources_of

_WORDS = {
    "mean": "mean@n is the mean of n samples a task",
    "std": "std@n is their standard deviation",
    "pass": "pass@k is the chance that one of k different samples is right",
    "best": "best@k, maj@k and worst@k are the best, the majority and the worst of k draws, which may repeat a sample, "
    "as verl reports them",
}


def validation(record: RunRecord) -> Html | None:
    """The table; None for a run with one sample a task and no data source."""
    measured = [row for row in record.rows if row.get(ACCURACY) is not None]
    if not measured:
        return None
    shown = measured[-1:] if len(measured) == 1 else [measured[0], measured[-1]]
    sources = list(dict.fromkeys(source for row in shown for source in sources_of(row)))
    names = list(dict.fromkeys(name for row in shown for name in figures_of(row)))
    if not sources and not names:
        return None
    rows: list[list[Child]] = []
    for title, group in (("all tasks", "eval"), *((source, f"eval/source/{source}") for source in sources)):
        rows.append([title, "accuracy", *(_accuracy(row, group) for row in shown)])
        for name in names:
            rows.append(["", name, *(_figure(row, group, name) for row in shown)])
    head = ["tasks", "figure", *(f"step {row['step']}, % (95 % interval)" for row in shown)]
    kinds = {name.partition("@")[0] for name in names}
    words = "; ".join(text for kind, text in _WORDS.items() if kind in kinds)
    note = h("p.note", f"{words[0].upper()}{words[1:]}. Intervals are over tasks.") if words else None
    return join(note, table(head, rows, caption="Held-out figures"))


def _accuracy(row: Mapping[str, Any], group: str) -> str:
    value, low, high = (row.get(f"{group}/accuracy{end}") for end in ("", "_low", "_high"))
    return _shown(value, low, high)


def _figure(row: Mapping[str, Any], group: str, name: str) -> str:
    found = figures_of(row, group).get(name)
    return NONE if found is None else _shown(*found)


def _shown(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return NONE
    interval = f" ({100 * low:.1f} to {100 * high:.1f})" if low is not None and high is not None else ""
    return f"{100 * value:.1f}{interval}"
