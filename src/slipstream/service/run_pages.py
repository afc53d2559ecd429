"""Pages about runs beside `page.py`: submit one, its rollouts, and two compared."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.report.curves import curves
from slipstream.report.markup import h
from slipstream.report.plot import NUM_COLORS
from slipstream.report.rollouts import rollouts
from slipstream.report.sections import comparison
from slipstream.service.page import record_of, section, whole_page
from slipstream.service.runs import Shown

_MOST = 4
_EXAMPLE = """[model]
path = "/models/my-model"

[data]
path = "/data/train.jsonl"

[algorithm]
kind = "sft"

[training]
steps = 100
"""


def submit_page(name: str = "run", settings: str = "", fault: str = "") -> str:
    """A form for a run file."""
    form = h(
        "form.fields",
        h("label", "name", h("input", name="name", value=name, required=True, maxlength=60)),
        h(
            "label",
            "run file",
            h("textarea", settings or _EXAMPLE, name="settings", rows=18, spellcheck="false", required=True),
        ),
        h("button", "Submit"),
        method="post",
        action="/submit",
    )
    note = h("p.note", "Paths are those of the service's machine. The run starts as soon as its GPUs are free.")
    return whole_page("Submit a run", h("p.alert", fault) if fault else None, note, form, refreshes=False)


def rollouts_page(run: Shown) -> str:
    """The model's texts, early and late side by side."""
    record = record_of(run)
    content = h("p.missing", "It has not started.") if record is None else rollouts(record)
    back = h("p.note", h("a", run.id, href=f"/runs/{run.id}"))
    return whole_page(f"Rollouts of {run.id}", back, section("Rollouts", content), refreshes=False)


def compare_page(runs: Sequence[Shown], chosen: Sequence[Shown]) -> str:
    """Runs side by side, after a form to choose them."""
    picked = {run.id for run in chosen}
    boxes = [
        h(
            "label",
            h("input", type="checkbox", name="run", value=run.id, checked=run.id in picked),
            f" {run.id}",
            h("span.note", f" {run.state}"),
        )
        for run in reversed(runs)
    ]
    form = h("form.choice", boxes, h("p", h("button", "Compare")), action="/compare")
    records = {run.id: record for run in chosen[:_MOST] if (record := record_of(run)) is not None}
    parts = [section("Runs", form if boxes else h("p", "No run was submitted."))]
    if len(records) > 1:
        names, found = list(records), list(records.values())
        keys = [h("span.key", h("i", class_=f"chip p{color % NUM_COLORS}"), name) for color, name in enumerate(names)]
        parts = [
            section("Compared", comparison(found, keys)),
            *(section(title, content) for title, content in curves(found, names).items()),
            *parts,
        ]
    elif chosen:
        parts.insert(0, h("p.alert", "Choose two runs or more, of which each has begun."))
    return whole_page("Compare", *parts, refreshes=False)
