"""What trainers took of their GPU: noted by a run in its folder, found there by the plans of later ones.

There is no other record: runs are looked for beside the folder of the new one, and with a run's folder goes what it
measured. Guarantees: an event that is damaged or of another version is left out and named, never an error; a folder
that holds a run gives what that run began with, so that it goes on with the plan that it had.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.launch.plan.facts import Peak
from slipstream.launch.plan.memory.sizes import GIB, gib
from slipstream.runlog import RunLog, read_events

NOTED = {f"{name}_gib": f"memory/trainer_{name}_gib" for name in ("peak", "held", "planned")}
NOTED["row_tokens"] = "memory/trainer_row_tokens"
"""Fields of the event `memory`, and the metrics that they are."""
_GREW = 1.01


def note_peak(log: RunLog, settings: Mapping[str, Any]) -> Callable[[int, Mapping[str, float | None]], None]:
    """A listener to rows of metrics that writes an event `memory` whenever the peak, what is held or the longest row
    has grown by a hundredth or more, and at the first row that has them. `settings`: see `Peak`."""
    told: dict[str, float] = {}

    def listen(step: int, row: Mapping[str, float | None]) -> None:
        found = {field: row.get(metric) for field, metric in NOTED.items()}
        sizes = {field: size for field, size in found.items() if size is not None and field != "planned_gib"}
        if any(size >= _GREW * told.get(field, 0.0) for field, size in sizes.items()):
            told.update(sizes)
            log.event("memory", step=step, settings=dict(settings), **found)

    return listen


def find_peaks(folder: Path | None, root: Path = Path("runs")) -> tuple[tuple[Peak, ...], tuple[str, ...]]:
    """What trainers took that the plan of a run in `folder` may rest on, the oldest first, and sentences on it: those
    of the other runs beside it, or below `root` where it has no folder yet. If `folder` holds a run, those that its
    plan rested on."""
    damage: list[str] = []
    events = [] if folder is None else _events(folder, damage)
    if folder is not None and (begun := [event for event in events if event["kind"] == "start"]):
        kept: Any = begun[-1].get("peaks")
        peaks = [_peak(each, damage, str(folder)) for each in kept] if isinstance(kept, list) else []
        told = [f"{folder} holds a run: it goes on with the plan that it began with"]
        told += [f"its trainer took {gib(own.held)} of the GPU" for _, own in _last(folder, events, damage)[-1:]]
        return tuple(peak for peak in peaks if peak is not None), ("; ".join(told), *_unused(damage))
    found: list[tuple[float, Peak]] = []
    where = root if folder is None else folder.parent
    try:
        folders = sorted(where.iterdir()) if where.is_dir() else []
    except OSError as error:
        folders = []
        damage.append(f"{where} ({error.strerror})")
    for each in folders:
        found += _last(each, _events(each, damage), damage)
    found.sort(key=lambda pair: pair[0])
    return tuple(peak for _, peak in found), _unused(damage)


def _events(folder: Path, damage: list[str]) -> list[dict[str, Any]]:
    try:
        return read_events(folder, damage, ("memory", "start")) if folder.is_dir() else []
    except OSError as error:
        damage.append(f"{folder} ({error.strerror})")
        return []


def _last(folder: Path, events: list[dict[str, Any]], damage: list[str]) -> list[tuple[float, Peak]]:
    """When and what each process of the run in `folder` noted last: what it notes only grows."""
    noted = {event.get("lineage"): event for event in events if event["kind"] == "memory"}
    found: list[tuple[float, Peak]] = []
    for event in noted.values():
        fields = {name: event.get(name) for name in ("row_tokens", "settings")}
        sizes = {name: event.get(f"{field}_gib") for name, field in (("allocated", "peak"), ("held", "held"))}
        scaled = {name: size * GIB if isinstance(size, float | int) else size for name, size in sizes.items()}
        peak, time = _peak({"run": str(folder), **fields, **scaled}, damage, str(folder)), event.get("time")
        if peak is not None:
            found.append((time if isinstance(time, float | int) else 0.0, peak))
    return found


def _peak(values: Any, damage: list[str], where: str) -> Peak | None:
    """`values` as a `Peak`; None, and a word in `damage`, for what is none."""
    known: Any = values if isinstance(values, dict) else {}
    numbers = {name: known.get(name) for name in ("allocated", "held", "row_tokens")}
    for name, number in numbers.items():
        is_number = isinstance(number, float | int) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or number < 1:
            damage.append(f"{where} (its {name} is {number})")
            return None
    run, settings = known.get("run"), known.get("settings")
    if not isinstance(run, str) or not isinstance(settings, dict):
        damage.append(f"{where} (it does not say by which settings)")
        return None
    return Peak(run=run, settings=settings, **{name: int(number) for name, number in numbers.items()})


def _unused(damage: list[str]) -> tuple[str, ...]:
    if not damage:
        return ()
    more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
    return (f"what an earlier run tells of its memory cannot be used and corrects nothing: {damage[0]}{more}",)


def as_fields(peaks: tuple[Peak, ...]) -> list[dict[str, Any]]:
    """For an event: what `find_peaks` finds again."""
    return [dataclasses.asdict(peak) for peak in peaks]
