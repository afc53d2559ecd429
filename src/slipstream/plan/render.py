"""Shows a plan: as tables for a terminal, as JSON for a program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from slipstream.names import model_name
from slipstream.plan.derive import Plan
from slipstream.plan.memory.split import TRAINING_TIME
from slipstream.plan.summary import Note
from slipstream.progress import printable

if TYPE_CHECKING:
    from rich.console import Group


def render_plan(plan: Plan) -> Group:
    """First the run, its memory and time, and the warnings. Then two tables, derived settings and
    their consequences; a rich renderable."""
    from rich.console import Group
    from rich.table import Column, Table

    lead = Table("", "", box=None, show_header=False, pad_edge=False)
    for name, text in leading(plan):
        lead.add_row(f"[bold]{name}[/]", _shown(text))
    settings = Table(
        Column("setting", no_wrap=True), "value", "why", title="derived settings", title_justify="left", box=None
    )
    for item in plan.derived:
        settings.add_row(item.name, _shown(_plain(item.value)), _shown(item.reason))
    totals = Table("", "", "", title="what follows", title_justify="left", box=None, show_header=False)
    for note in plan.notes:
        totals.add_row(note.name, _amount(note), _shown(note.how))
    said = [f"[red]does not fit:[/] {_shown(sentence)}" for sentence in plan.refusals]
    said += [f"[yellow]warning:[/] {_shown(warning)}" for warning in plan.warnings]
    said += [_shown(sentence) for sentence in plan.notices]
    return Group(lead, *said, "", settings, "", totals)


def leading(plan: Plan) -> list[tuple[str, str]]:
    """The run, its memory and time, a line each."""
    config, notes = plan.config, {note.name: note for note in plan.notes}
    where = "" if config.environment is None else f" on {PurePath(config.environment.name).name}"
    batch = notes["sequences per batch"]
    adapter = "" if config.lora is None else f", LoRA of rank {config.lora.rank}"
    run = f"{config.algorithm.kind} of {model_name(config.model.path)} ({config.model.dtype}{adapter}){where}: "
    run += f"{config.training.steps} steps of {batch.value:,} sequences ({batch.how})"
    sides = ("trainer", "engine", "teacher")
    sizes = [f"{side} {notes[name].value:.2f} GiB" for side in sides if (name := f"memory of the {side}") in notes]
    found = [("run", run), ("memory", f"{', '.join(sizes)}; {plan.device}")]
    if (time := notes.get(TRAINING_TIME)) is not None:
        amount = f"about {time.value:g} {time.unit}" if float(time.value) >= 1 else "less than a minute"
        found.append(("time", f"{amount} of training ({time.how})"))
    return found


def plan_as_json(plan: Plan, more: Mapping[str, Any] | None = None) -> str:
    """An object with `device`, `config`, `derived`, `notes`, `earlier_runs`, `warnings`, `refusals`, and `more`, in
    JSON."""
    content: dict[str, Any] = {
        "device": plan.device,
        "config": plan.config.model_dump(mode="json"),
        "derived": [dataclasses.asdict(item) for item in plan.derived],
        "notes": [dataclasses.asdict(note) for note in plan.notes],
        "earlier_runs": list(plan.notices),
        "warnings": list(plan.warnings),
        "refusals": list(plan.refusals),
        **(more or {}),
    }
    return json.dumps(content, indent=2)


def _shown(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else f"{value}"


def _amount(note: Note) -> str:
    return f"{note.value:,} {note.unit}".rstrip()
