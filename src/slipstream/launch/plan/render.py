"""Shows a plan: as tables for a terminal, as JSON for a program."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from slipstream.launch.plan.derive import Plan
from slipstream.launch.plan.summary import Note
from slipstream.progress import printable

if TYPE_CHECKING:
    from rich.console import Group


def render_plan(plan: Plan) -> Group:
    """Two tables, derived settings and what follows from them, and the warnings; a rich renderable."""
    from rich.console import Group
    from rich.table import Table

    settings = Table("setting", "value", "why", title="derived settings", title_justify="left", box=None)
    for item in plan.derived:
        settings.add_row(item.name, _shown(_plain(item.value)), _shown(item.reason))
    totals = Table("", "", "", title="what follows", title_justify="left", box=None, show_header=False)
    for note in plan.notes:
        totals.add_row(note.name, _amount(note), _shown(note.how))
    warnings = [f"[yellow]warning:[/] {_shown(warning)}" for warning in plan.warnings]
    notices = [_shown(sentence) for sentence in plan.notices]
    return Group(settings, "", totals, *(["", *notices] if notices else []), *(["", *warnings] if warnings else []))


def plan_as_json(plan: Plan) -> str:
    """An object with `config`, `derived`, `notes`, `earlier_runs` and `warnings`, in JSON."""
    content: dict[str, Any] = {
        "config": plan.config.model_dump(mode="json"),
        "derived": [dataclasses.asdict(item) for item in plan.derived],
        "notes": [dataclasses.asdict(note) for note in plan.notes],
        "earlier_runs": list(plan.notices),
        "warnings": list(plan.warnings),
    }
    return json.dumps(content, indent=2)


def _shown(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else f"{value}"


def _amount(note: Note) -> str:
    return f"{note.value:,} {note.unit}".rstrip()
