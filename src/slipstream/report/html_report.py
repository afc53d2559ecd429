"""Assembles the parts of a report into one self-contained HTML file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from importlib import resources

from slipstream.report.curves import curves
from slipstream.report.headline import Headline, headline, identity
from slipstream.report.markup import Child, Html, details, h, join
from slipstream.report.plot import NUM_COLORS
from slipstream.report.rollouts import rollouts
from slipstream.report.scenes import scenes
from slipstream.report.sections import (
    before_and_after,
    comparison,
    ending,
    groups,
    settings,
    startup,
    state,
    tiles,
    versions,
    warnings_of,
)
from slipstream.report.timeline import timeline
from slipstream.report.validation import validation
from slipstream.runlog import RunRecord

_ENDING = "End of the run"
TITLE_END = " - Slipstream report"
"""Marks a file as a report."""


def page(records: Sequence[RunRecord]) -> str:
    """The HTML text of the report on one run, or on several side by side."""
    names = _names(records)
    if len(records) == 1:
        facts = ", ".join(value for _, value in identity(records[0]))
        title = f"{names[0]}: {facts}" if facts else names[0]
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
    facts = [h("span.fact", h("span.note", f"{name} "), value) for name, value in identity(record)]
    learning, *others = curves([record], [""]).items()
    before, after = _samples(record), _course(record, head)
    shown = [(title, content) for title, content in (learning, *before, *others, *after) if content is not None]
    return join(
        h(
            "header",
            h("h1", record.summary.name, " ", state(record.summary)),
            h("p.facts", facts),
            _alarm(record),
            tiles(record, head),
            before_and_after(head),
            h("nav", [h("a", title, href=f"#{_anchor(title)}") for title, _ in shown], aria_label="sections"),
        ),
        [_section(title, content) for title, content in shown],
    )


def _samples(record: RunRecord) -> list[tuple[str, Html | None]]:
    """Sections of what was generated."""
    return [("Held-out figures", validation(record)), ("Boxes", scenes(record)), ("Rollouts", rollouts(record))]


def _course(record: RunRecord, head: Headline) -> list[tuple[str, Html | None]]:
    """Sections of how the run went."""
    return [
        ("Waiting times", timeline(record)),
        ("Outcomes of groups", groups(record)),
        ("Start-up", startup(record)),
        (_ENDING, ending(record)),
        ("Settings", settings(record)),
        ("Versions and digests", versions(record, head)),
    ]


def _alarm(record: RunRecord) -> Html | None:
    """Alerts shown above all numbers."""
    message = record.exit.message if record.exit is not None else ""
    alerts = [message] if message else []
    if record.damage and record.summary.status != "damaged":
        alerts.append(f"Parts of the run folder cannot be read ({len(record.damage)} problems, listed below).")
    elif record.damage:
        alerts.append(record.damage[0])
    if num_warnings := len(warnings_of(record.events)):
        alerts.append(f"{num_warnings} warning{'s' * (num_warnings > 1)}, listed below ({_ENDING}).")
    return h("p.alert", " ".join(alerts)) if alerts else None


def _several(records: Sequence[RunRecord], names: Sequence[str]) -> Html:
    keys = [h("span.key", h("i", class_=f"chip p{color % NUM_COLORS}"), name) for color, name in enumerate(names)]
    return join(
        h("header", h("h1", f"{len(records)} runs"), h("p.legend", keys)),
        _section("Compared", comparison(records, keys)),
        [_section(title, content) for title, content in curves(records, names).items()],
        [_section(name, _rest(record)) for name, record in zip(names, records, strict=True)],
    )


def _rest(record: RunRecord) -> Html:
    """Parts of one of several runs besides its curves."""
    parts = [*_samples(record), *_course(record, headline(record))]
    shown = [details(title, content) for title, content in parts if content]
    return join(h("p", state(record.summary)), _alarm(record), shown)


def _section(title: str, content: Child) -> Html:
    return h("section", h("h2", title), content, id=_anchor(title))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


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
