"""Checks of one run: all that `slipstream plan` reads and computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.doctor.findings import Finding
from slipstream.errors import SlipstreamError


def check_run(run_file: Path, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """The run file, model, template, data and options fit together and fit the machine."""
    from slipstream.commands.planning import plan_run
    from slipstream.config import load_config

    name = f"run {run_file.name}"
    try:
        prepared = plan_run(load_config(run_file, overrides))
    except SlipstreamError as error:
        # Its sentence ends with the remedy.
        reason, _, remedy = str(error).rpartition(": ")
        yield Finding(name, "fault", reason or str(error), remedy if reason else "")
        return
    for warning in prepared.plan.warnings:
        reason, _, remedy = warning.rpartition(": ")
        yield Finding(name, "warning", reason or warning, remedy if reason else "")
    if not prepared.plan.warnings:
        yield Finding(name, "ok", "model, template, data and options fit together, and the plan fits this machine")
