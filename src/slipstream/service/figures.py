"""Measured figures of a run, by the files of its folder: time, tokens, memory, cost, and places to look at."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
from pathlib import Path
from typing import NamedTuple

import msgspec

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.plan.memory.sizes import GIB
from slipstream.runlog import holds_run, read_events, read_exit, read_metrics
from slipstream.runlog.files import SERVICE_FOLDER, Rows
from slipstream.service.records import Actual, Attempt, Record
from slipstream.service.store import OUTPUT

PRICE = "SLIPSTREAM_GPU_HOUR_PRICE"
"""Environment variable: the price of a GPU-hour, in any currency."""
_DAMAGE = (SlipstreamError, OSError, ValueError, TypeError, KeyError, ArithmeticError)
"""Errors by a damaged file: it says nothing, and the run ends all the same."""
_SUMS = ("after_batch", "step")
"""Times of rows: sums of other times there."""


def gpu_hour_price() -> float | None:
    """The price of a GPU-hour by the environment; None without one. Raises ConfigError."""
    text = os.environ.get(PRICE, "")
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (price := float(text)) < math.inf:
            return price
    raise ConfigError(f"{PRICE}={text} is no price of a GPU-hour: give a number such as 2.5")


class Peaks(NamedTuple):
    """Most memory of an attempt's processes, in bytes; 0 where it was not seen."""

    host_bytes: int = 0
    """The largest process."""
    gpu_bytes: int = 0
    """All processes together, on their fullest GPU."""


NO_PEAKS = Peaks()


def measured(folder: Path, record: Record, attempts: tuple[Attempt, ...], peaks: Peaks = NO_PEAKS) -> Actual:
    """Figures of a run after these attempts, the last one with these peaks."""
    seconds = sum(each.ended - each.started for each in attempts)
    gpu_hours = round(record.need.gpus * seconds / 3600, 6)
    earlier = record.actual.peaks_gib if record.actual is not None else {}
    highest = {"host": peaks.host_bytes, "gpu": peaks.gpu_bytes}
    highest = {name: max(earlier.get(name, 0.0), round(size / GIB, 3)) for name, size in highest.items()}
    found = Actual(
        seconds=round(seconds, 3),
        gpu_hours=gpu_hours,
        queued_s=round(attempts[0].started - record.submitted, 3) if attempts else 0.0,
        cost=None if record.price is None else round(record.price * gpu_hours, 6),
        peaks_gib={name: size for name, size in highest.items() if size},
        consoles=consoles_of(folder),
    )
    with contextlib.suppress(*_DAMAGE):
        report = read_exit(folder)
        if record.store and report is not None and attempts and report.time >= attempts[-1].started:
            found = msgspec.structs.replace(found, uploads_s=round(attempts[-1].ended - report.time, 3))
    with contextlib.suppress(*_DAMAGE):
        if holds_run(folder):
            events = read_events(folder, kinds=("stage", "memory", "sink_opened"))
            found = with_rows(found, read_metrics(folder), events)
    return found


def with_rows(found: Actual, rows: Rows, events: Rows) -> Actual:
    """The figures with those of rows of metrics and of events."""
    took = [b["time"] - a["time"] for a, b in itertools.pairwise(rows) if a["lineage"] == b["lineage"]]
    parts = {name for row in rows for name in row if name.startswith("time/") and name.endswith("_s")}
    names = sorted(name.removeprefix("time/").removesuffix("_s") for name in parts)
    parts_s = {name: round(_sum(rows, f"time/{name}_s"), 3) for name in names if name not in _SUMS}
    start_s: dict[str, float] = {}
    for event in events:
        if event["kind"] == "stage":
            start_s[event["name"]] = round(start_s.get(event["name"], 0.0) + event["seconds"], 3)
    generated = int(_sum(rows, "tokens/generated"))
    trained = int(_sum(rows, "tokens/trained") or _sum(rows, "train/num_tokens"))
    held = [event["held_gib"] for event in events if event["kind"] == "memory" and event.get("held_gib")]
    engine = [value for row in rows if (value := row.get("memory/engine_gib"))]
    peaks = {name: max(values) for name, values in (("trainer", held), ("engine", engine)) if values}
    urls = [str(event["url"]) for event in events if event["kind"] == "sink_opened" and event["name"] == "wandb"]
    return msgspec.structs.replace(
        found,
        steps=max((row["step"] for row in rows), default=0),
        step_s=round(statistics.median(took), 4) if took else None,
        rest_s=round(max(0.0, found.seconds - sum(took)), 3) if took else None,
        start_s=start_s,
        parts_s=parts_s,
        tokens_generated=generated,
        tokens_trained=trained,
        generated_per_s=_rate(generated, parts_s.get("generate")),
        trained_per_s=_rate(trained, parts_s.get("train")),
        memory_gib=max([*held, found.peaks_gib.get("gpu", 0.0)]) or None,
        peaks_gib={**found.peaks_gib, **peaks},
        wandb_url=urls[-1] if urls else "",
    )


def consoles_of(folder: Path) -> dict[str, str]:
    """The output of each process, by a path below the run folder."""
    found = {"run": OUTPUT} if (folder / OUTPUT).is_file() else {}
    own = {path.stem: path for path in folder.glob(f"{SERVICE_FOLDER}/*.log") if path.name != Path(OUTPUT).name}
    names = {"-".join(path.relative_to(folder / "logs").with_suffix("").parts): path
             for path in folder.glob("logs/**/*.log")}  # fmt: skip
    return found | {name: str(path.relative_to(folder)) for name, path in sorted((own | names).items())}


def _sum(rows: Rows, name: str) -> float:
    return math.fsum(row.get(name) or 0.0 for row in rows)


def _rate(num: int, seconds: float | None) -> float | None:
    return round(num / seconds, 2) if num and seconds else None
