"""Report section on the stages of start-up before the first step."""

from __future__ import annotations

from typing import Any

from slipstream.report.html import Child, Html, h, join, number, table
from slipstream.runlog import RunRecord


def startup(record: RunRecord) -> Html | None:
    """The start-up stages of the last process that recorded any, in order of their start; None if none did."""
    stages = [event for event in record.events if event["kind"] in ("stage", "startup")]
    if not stages:
        return None
    last = [event for event in stages if event["lineage"] == stages[-1]["lineage"]]
    stages = sorted((event for event in last if event["kind"] == "stage"), key=lambda event: _seconds(event, "began_s"))
    total = next((_seconds(event, "seconds") for event in last if event["kind"] == "startup"), None)
    words = "The run did not come to the end of its first step."
    if total is not None:
        words = f"The first step ended {total:.1f} s after the command began; stages overlap."
    rows: list[list[Child]] = [
        [str(event.get("name", "")), number(_seconds(event, "began_s"), "s"), number(_seconds(event, "seconds"), "s")]
        for event in stages
    ]
    return join(h("p", words), table(["stage", "began after", "took"], rows, caption="Stages of the start"))


def _seconds(event: dict[str, Any], name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
