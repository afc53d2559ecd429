"""What a trainer took of its GPU, beside what was planned: noted by a run, told by the next plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.runlog import RunLog, read_events

PEAK, HELD, PLANNED = (f"memory/trainer_{name}_gib" for name in ("peak", "held", "planned"))


def note_peak(log: RunLog) -> Callable[[int, Mapping[str, float | None]], None]:
    """A listener to rows of metrics that writes an event `memory` whenever the peak has grown by a hundredth or more,
    and at the first row that has one."""
    told = 0.0

    def listen(step: int, row: Mapping[str, float | None]) -> None:
        nonlocal told
        peak = row.get(PEAK)
        if peak is not None and peak >= 1.01 * told:
            told = peak
            log.event("memory", step=step, peak_gib=peak, held_gib=row.get(HELD), planned_gib=row.get(PLANNED))

    return listen


def earlier_peak(folder: Path | None, name: str, root: Path = Path("runs")) -> str | None:
    """What the last run of this file took, in one sentence: the run in `folder`, or the newest one below `root` that
    was named after the run file. None where no run noted it."""
    folders = [folder] if folder is not None else sorted(root.glob(f"{name}-*-*"), reverse=True)
    for each in folders:
        found = [event for event in read_events(each) if event["kind"] == "memory"] if each.is_dir() else []
        if found:
            peak, held, planned = (found[-1].get(f"{key}_gib") for key in ("peak", "held", "planned"))
            beside = f"; planned were {planned:.2f} GiB" if planned is not None else ""
            held_told = f", {held:.2f} GiB with what its allocator held" if held is not None else ""
            return f"an earlier run, {each}: its trainer took {peak:.2f} GiB of the GPU at most{held_told}{beside}"
    return None
