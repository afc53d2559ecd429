"""Assembles the parts of a report into one self-contained HTML file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from importlib import resources

from slipstream.report.headline import headline, identity
from slipstream.report.markup import Child, Html, details, h, join
from slipstream.report.plot import NUM_COLORS, Scale, figure, step_scale
from slipstream.report.rollouts import rollouts
from slipstream.report.sections import (
    before_and_after,
    comparison,
    ending,
    settings,
    startup,
    state,
    tiles,
    versions,
)
from slipstream.report.series import Panel, Series, panels_of, series_of
from slipstream.report.timeline import timeline
from slipstream.runlog import RunRecord

TITLE_END = " - Slipstream report"
"""Marks a file as a report."""


def page(records: Sequence[RunRecord]) -> str:
    """The HTML text of the report on one run, or on several side by side."""
    names = _names(records)
    if len(records) == 1:
        title = names[0]
        body = _single(records[0])
    else:
        title = ", ".join(names)
        body = _several(records, names)
    made = time.strftime("%Y-%m-%d %H:%M")
    foot = h("footer", h("p", f"Made by slipstream report on {made} from the files of the run folder."))
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", http_equiv="Content-Security-Policy",
          content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"),
        h("title", f"{title}{TITLE_END}"),
        Html('<link rel="icon" href="data:,"/>'),
        h("style", Html(_asset("page.css"))),
    )  # fmt: skip
    script = h("script", Html(_asset("page.js")))
    return f"<!doctype html>\n{h('html', head, h('body', h('main', body, foot), script), lang='en')}\n"


def _single(record: RunRecord) -> Html:
    head = headline(record)
    facts = [h("span", h("span", f"{name} ", class_="note"), value, class_="fact") for name, value in identity(record)]
    return join(
        h(
            "header",
            h("h1", record.summary.name, " ", state(record.summary)),
            h("p", facts, class_="facts"),
            _alarm(record),
            tiles(record, head),
            before_and_after(head),
        ),
        _section("Curves", _plots([record], [""])),
        _section("Start-up", begun) if (begun := startup(record)) else None,
        _section("Who waited for whom", timeline(record)),
        _section("Rollouts", rollouts(record)),
        _section("How it ended", ending(record)),
        _section("Settings", settings(record)),
        _section("Versions and digests", versions(record, head)),
    )


def _alarm(record: RunRecord) -> Html | None:
    """Alerts shown above all numbers."""
    message = record.exit.message if record.exit is not None else ""
    alerts = [message] if message else []
    if record.damage and record.summary.status != "damaged":
        alerts.append(f"Parts of the run folder cannot be read ({len(record.damage)} problems, listed below).")
    elif record.damage:
        alerts.append(record.damage[0])
    return h("p", " ".join(alerts), class_="alert") if alerts else None


def _several(records: Sequence[RunRecord], names: Sequence[str]) -> Html:
    keys = [
        h("span", h("i", class_=f"chip p{color % NUM_COLORS}"), name, class_="key") for color, name in enumerate(names)
    ]
    return join(
        h("header", h("h1", f"{len(records)} runs"), h("p", keys, class_="legend")),
        _section("Compared", comparison(records, keys)),
        _section("Curves", _plots(records, names)),
        [_section(name, _rest(record)) for name, record in zip(names, records, strict=True)],
    )


def _rest(record: RunRecord) -> Html:
    """Parts of one of several runs besides its curves."""
    head = headline(record)
    return join(
        h("p", state(record.summary)),
        _alarm(record),
        details("Start-up", begun) if (begun := startup(record)) else None,
        details("Who waited for whom", timeline(record)),
        details("Rollouts", rollouts(record)),
        details("How it ended", ending(record)),
        details("Settings", settings(record)),
        details("Versions and digests", versions(record, head)),
    )


def _plots(records: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """A plot for each panel that has numbers; with several runs, only the panel's first metric."""
    all_rows = [record.rows for record in records]
    known, others = panels_of(all_rows)
    steps = [float(row["step"]) for rows in all_rows for row in rows]
    across = step_scale(steps or [0.0])

    def drawn(panels: Sequence[Panel]) -> list[Html]:
        return [shown for panel in panels if (shown := _plot(panel, records, names, across)) is not None]

    figures = drawn(known)
    if not figures:
        return h("p", "No step has been finished yet, so there is nothing to draw.", class_="missing")
    more = drawn(others)
    rest = details(f"All other metrics ({len(more)})", h("div", more, class_="plots")) if more else None
    return join(h("div", figures, class_="plots"), _unmeasured(known, records), rest)


def _plot(panel: Panel, records: Sequence[RunRecord], names: Sequence[str], across: Scale) -> Html | None:
    found: list[Series | None]
    note = ""
    if len(records) == 1:
        found = [series_of(records[0].rows, line, line.label, color) for color, line in enumerate(panel.lines)]
    else:
        line = panel.lines[0]
        found = [
            series_of(record.rows, line, name, color)
            for color, (record, name) in enumerate(zip(records, names, strict=True))
        ]
        note = f"Shown: {line.label}." if len(panel.lines) > 1 else ""
    series = [line for line in found if line is not None]
    if not series:
        return None
    # The axis covers the steps that have the metric; all steps of longer runs would compress it.
    shared = across if len(records) == 1 else step_scale([x for line in series for x in line.x])
    return figure(panel, series, shared, note=note, named=len(records) > 1)


def _unmeasured(known: Sequence[Panel], records: Sequence[RunRecord]) -> Html | None:
    """Common metrics that this run did not record."""
    shown = {panel.title for panel in known}
    missing = [
        f"{what}: {why}"
        for what, why in (
            ("Held-out accuracy", "evaluation is off, or none has been made yet"),
            ("Probe difference", "nothing was generated"),
            ("Outcomes dropped", "no rollout was dropped" if "Reward" in shown else "no rollouts were made"),
        )
        if what not in shown
    ]
    return h("p", "Not drawn: " + "; ".join(missing) + ".", class_="note") if missing and records else None


def _section(title: str, content: Child) -> Html:
    return h("section", h("h2", title), content)


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Folder names, with as much of their paths as distinguishes them."""
    paths = [record.summary.folder.resolve() for record in records]
    names = [path.name for path in paths]
    for depth in itertools.count(2):
        if len(set(names)) == len(names) or all(depth > len(path.parts) for path in paths):
            return names
        names = ["/".join(path.parts[-depth:]) if names.count(name) > 1 else name
                 for name, path in zip(names, paths, strict=True)]  # fmt: skip
    return names


def _asset(name: str) -> str:
    return resources.files("slipstream.report").joinpath(name).read_text(encoding="utf-8")
