"""Records the GPU memory of a run's trainer, for the planner of the next run of the same model.

The record is information for people: no plan depends on it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.runlog import RunLog, read_events

RECORDED = {f"{name}_gib": f"memory/trainer_{name}_gib" for name in ("peak", "held", "planned")}
RECORDED["row_tokens"] = "memory/trainer_row_tokens"
"""Fields of the event `memory`, and their metrics."""
_GREW = 1.01


def record_memory(log: RunLog, model: str) -> Callable[[int, Mapping[str, float | None]], None]:
    """Returns a listener to rows of metrics. It writes an event `memory` at the first row with these metrics, and
    after each growth of peak, reserved memory or longest row by 1 % or more. `model`: the planned `model.path`."""
    written: dict[str, float] = {}

    def listen(step: int, row: Mapping[str, float | None]) -> None:
        found = {field: row.get(metric) for field, metric in RECORDED.items()}
        sizes = {field: size for field, size in found.items() if size is not None and field != "planned_gib"}
        if any(size >= _GREW * written.get(field, 0.0) for field, size in sizes.items()):
            written.update(sizes)
            log.event("memory", step=step, model=model, **found)

    return listen


def last_run_memory(folder: Path | None, model: str, root: Path = Path("runs")) -> str:
    """One line on the memory of the last run of `model` beside its plan's estimate: of the runs in the
    parent of the run folder, or in `root` without a run folder. Empty if there is none; unreadable runs are
    skipped."""
    logs = (root if folder is None else folder.parent).glob("*/events.jsonl")
    for _, run in sorted(((_modified(file), file.parent) for file in logs), reverse=True):
        with contextlib.suppress(OSError):
            for event in reversed(read_events(run, [], ("memory",))):
                held, planned = _gib(event.get("held_gib")), _gib(event.get("planned_gib"))
                if event.get("model") == model and held and planned:
                    took = f"its trainer took {held} of a GPU's memory where {planned} were estimated"
                    return f"{run} is the last run of this model: {took}"
    return ""


def _modified(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _gib(value: Any) -> str:
    is_number = isinstance(value, float | int) and math.isfinite(value)
    return f"{value:.2f} GiB" if is_number else ""
