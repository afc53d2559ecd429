"""The service's pages: all runs, and one run with its curves and the end of its output. HTML without script."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.report.curves import curves
from slipstream.report.headline import headline
from slipstream.report.markup import NONE, Child, Html, duration, h, join, number, table
from slipstream.runlog import RunRecord, holds_run, read_run
from slipstream.service.records import Actual
from slipstream.service.runs import Shown, ShownPlace

_REFRESH_S = 5
_LINKS = (("runs", "/"), ("submit", "/submit"), ("compare", "/compare"), ("deployments", "/deployments"))
_FORMS = Html("""
nav.top { margin: 0 0 20px; }
button, textarea, input { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--hair);
  border-radius: 5px; padding: 5px 12px; }
button { cursor: pointer; background: var(--panel); white-space: nowrap; }
button:focus-visible, textarea:focus-visible, input:focus-visible { outline: 2px solid var(--c0); outline-offset: 1px; }
header + p { margin-top: 10px; }
.fact .state { margin: 0; vertical-align: baseline; }
header + form, p + form { margin-top: 16px; }
td form { margin: -4px 0; }
p.note + .scroll { margin-top: 16px; }
td .state { margin: 0; vertical-align: baseline; }
.fields { display: grid; gap: 14px; max-width: 760px; margin-top: 20px; justify-items: start; }
.fields label { display: grid; gap: 4px; width: 100%; font-size: 14px; color: var(--soft); }
.fields label > * { color: var(--ink); width: 100%; }
.fields textarea { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
.tail { display: flex; flex-direction: column-reverse; max-height: 320px; overflow: auto; }
.tail pre { max-height: none; overflow: visible; }
.choice label { display: block; padding: 3px 0; overflow-wrap: anywhere; }
.choice p { margin-top: 12px; }
""")
_STATES = {"done": "finished", "queued": "interrupted", "cancelled": "interrupted", "failed": "failed"}
"""The report's colour of each state; by default a running run's."""


def runs_page(runs: Sequence[Shown], places: Sequence[ShownPlace]) -> str:
    """All runs, newest first, and the GPUs."""
    rows = [
        [
            h("a", run.id, href=f"/runs/{run.id}"),
            _state(run),
            f"{run.step} of {run.steps}",
            _took(run),
            run.model,
            run.reason,
        ]
        for run in reversed(runs)
    ]
    found = table(["run", "state", "step", "time", "model", "reason"], rows, numbers=False, caption="runs")
    gpus = [
        [
            each.place,
            each.name,
            number(each.total_gib, "GiB"),
            number(each.free_gib, "GiB"),
            ", ".join(each.runs),
            ", ".join(each.others),
        ]
        for each in places
    ]
    there = table(["place", "name", "memory", "free", "runs", "others"], gpus, numbers=False, caption="GPUs")
    return whole_page(
        "Runs", section("Runs", found if rows else h("p", "No run was submitted.")), section("GPUs", there)
    )


def run_page(run: Shown, log: bytes, checkpoints: Html) -> str:
    """One run."""
    button = h("form", h("button", "Cancel"), method="post", action=f"/runs/{run.id}/cancel")
    shown = None if run.has_ended or run.cancel_requested else button
    facts = [("state", run.state), ("step", f"{run.step} of {run.steps}"), ("model", run.model), ("time", _took(run))]
    on = [("on", ", ".join(run.places))] if run.places else []
    facts += [("submitted", _time(run.submitted)), *on, ("folder", run.folder)]
    record = record_of(run)
    if record is not None and (held_out := headline(record).after) is not None:
        facts.insert(2, ("held-out accuracy", number(held_out.value, "%")))
    head = h("p.facts", [h("span.fact", h("span.note", f"{name} "), value) for name, value in facts])
    alarm = h("p.alert", run.reason) if run.reason else None
    more = h(
        "nav",
        h("a", "rollouts", href=f"/runs/{run.id}/rollouts"),
        h("a", "compare", href=f"/compare?run={run.id}"),
        h("a", "output", href="#output"),
    )
    parts = [section(title, each) for title, each in curves([record], [""]).items()] if record is not None else []
    return whole_page(
        run.id,
        join(head, alarm, shown, more),
        section("Checkpoints", checkpoints),
        *parts,
        section("Attempts", _attempts(run)),
        section("Estimate and actual", _figures(run)),
        section("Output", h("div.tail", h("pre", log.decode(errors="replace")))),
        refreshes=not run.has_ended,
    )


def problem(text: str) -> str:
    """A page with one sentence."""
    return whole_page("Slipstream", h("p.alert", text))


def record_of(run: Shown) -> RunRecord | None:
    """The files of a run that has begun; None for a damaged one."""
    with contextlib.suppress(SlipstreamError, OSError):
        if holds_run(Path(run.folder)):
            return read_run(Path(run.folder))
    return None


def _attempts(run: Shown) -> Html:
    rows = [
        [
            str(each.number),
            _time(each.started),
            duration(each.ended - each.started) if each.ended else NONE,
            ", ".join(each.places),
            NONE if each.exit_code is None else str(each.exit_code),
            each.decision,
            each.message,
        ]
        for each in run.attempts
    ]
    names = ["attempt", "began", "time", "on", "exit code", "decision", "message"]
    return table(names, rows, numbers=False, caption="attempts") if rows else h("p", "It has not started.")


def _figures(run: Shown) -> Html:
    estimate, actual = run.estimate, run.actual
    rows: list[list[Child]] = [
        ["seconds a step", number(estimate.step_s), number(actual.step_s if actual else None)],
        ["seconds beside the steps", number(estimate.rest_s), number(actual.rest_s if actual else None)],
        ["seconds", number(run.estimated_s), number(actual.seconds if actual else None)],
        ["GPU-hours", number(estimate.gpu_hours), number(actual.gpu_hours if actual else None)],
        ["memory, GiB", number(estimate.memory_gib), number(actual.memory_gib if actual else None)],
        ["cost", number(run.estimated_cost), number(actual.cost if actual else None)],
    ]
    found = table(["", "estimate", "actual"], rows, caption="estimate and actual")
    return join(found, h("p.note", estimate.how), _record(actual) if actual is not None else None)


def _record(actual: Actual) -> Html:
    """The other measured figures."""
    seconds = {"queued": actual.queued_s, "uploads": actual.uploads_s}
    seconds |= {f"start: {name}": each for name, each in actual.start_s.items()}
    seconds |= {f"steps: {name}": each for name, each in actual.parts_s.items()}
    rows: list[Sequence[Child]] = [[name, duration(each)] for name, each in seconds.items()]
    rows += [
        ["tokens generated", number(actual.tokens_generated)],
        ["tokens trained", number(actual.tokens_trained)],
        ["tokens generated a second", number(actual.generated_per_s)],
        ["tokens trained a second", number(actual.trained_per_s)],
        *([f"peak of memory: {name}", number(each, "GiB")] for name, each in actual.peaks_gib.items()),
        *([f"console: {name}", path] for name, path in actual.consoles.items()),
    ]
    if actual.wandb_url.startswith("https://"):
        rows.append(["Weights & Biases", h("a", actual.wandb_url, href=actual.wandb_url)])
    return table(["", "measured"], rows, caption="record")


def _took(run: Shown) -> str:
    if run.actual is not None:
        return duration(run.actual.seconds)
    if run.attempts and not run.has_ended and run.places:
        return duration(max(0.0, time.time() - run.attempts[-1].started))
    return NONE


def _state(run: Shown) -> Html:
    text = f"{run.state}, to be cancelled" if run.cancel_requested and not run.has_ended else run.state
    return h("span", text, class_=f"state {_STATES.get(run.state, 'running')}")


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def section(title: str, content: Child) -> Html:
    """A part of a page."""
    return h("section", h("h2", title), content, id=title.lower().replace(" ", "-"))


def whole_page(title: str, *content: Child, refreshes: bool = True) -> str:
    """A page with its head and links. `refreshes`: it loads itself again every few seconds."""
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", http_equiv="refresh", content=_REFRESH_S) if refreshes else None,
        h("title", f"{title} - Slipstream"),
        Html('<link rel="icon" href="data:,"/>'),
        h("style", Html(resources.files("slipstream.report").joinpath("page.css").read_text(encoding="utf-8")), _FORMS),
    )
    links = [h("a", name, href=path) for name, path in _LINKS]
    top = h("header", h("nav.top", links), h("h1", title))
    return f"<!doctype html>\n{h('html', head, h('body', h('main', top, *content)), lang='en')}\n"
