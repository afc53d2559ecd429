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
        yield from (Finding(name, "fault", sentence) for sentence in str(error).splitlines())
        return
    yield from (Finding(name, "warning", sentence) for sentence in prepared.plan.warnings)
    if not prepared.plan.warnings:
        yield Finding(name, "ok", "model, template, data and options fit together, and the plan fits this machine")
