"""Records in the run folder when a run ran out of memory; the plan of its resume reads it.

A process that the kernel's OOM killer ended writes nothing: it is recognised by the kernel's count of OOM kills, which
the event `start` holds too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.config import RunConfig
from slipstream.config.traits import uses_engine
from slipstream.launch.plan.facts import Shortage
from slipstream.launch.plan.machine import count_oom_kills
from slipstream.runlog import is_running, read_events

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def run_name(folder: Path, lineage: int) -> str:
    """Name of a run and one of its lineages, for messages."""
    return f"{folder.resolve().name} (lineage {lineage})"


def shortage_of(config: RunConfig, run: str, side: Literal["trainer", "engine"]) -> Shortage:
    """The settings of a planned run that matter for the memory of the `side` that ran out of it."""
    checkpointing: Any = config.training.gradient_checkpointing
    max_num_seqs = int(config.inference.max_num_seqs) if uses_engine(config) else 0
    return Shortage(run, side, int(config.training.micro_batch_tokens), checkpointing, max_num_seqs)


def memory_at_start(config: RunConfig) -> dict[str, Any]:
    """Fields of the event `start` from which a later process can tell that the OOM killer ended this one."""
    planned = dataclasses.asdict(shortage_of(config, "", "trainer"))
    return {**planned, "oom_kills": count_oom_kills(), "boot": _boot()}


def find_shortages(folder: Path | None) -> tuple[tuple[Shortage, ...], tuple[str, ...]]:
    """Find when the run in `folder` ran out of memory, oldest first; also returns messages on events that cannot be
    read."""
    if folder is None or not folder.is_dir():
        return (), ()
    damage: list[str] = []
    found: list[Shortage] = []
    try:
        events = read_events(folder, damage, ("start", "exit", "restart", "out_of_memory"))
    except OSError as error:
        return (), (f"{folder}: whether it ran out of memory cannot be read ({error.strerror})",)
    ended = {event.get("lineage") for event in events if event["kind"] in ("exit", "restart")}
    for event in events:
        values = event
        if event["kind"] == "start":
            lineage, values = event.get("lineage"), event.get("memory")
            if lineage in ended or not isinstance(values, dict) or not _was_killed(values) or is_running(folder):
                continue
            values = {**values, "run": run_name(folder, int(event["lineage"]))}
        elif event["kind"] != "out_of_memory":
            continue
        try:
            found.append(msgspec.convert(values, Shortage))
        except msgspec.ValidationError as error:
            damage.append(f"{folder}: an event on its memory cannot be used ({error}) and makes no plan smaller")
    return tuple(found), tuple(damage)


def _was_killed(begun: dict[str, Any]) -> bool:
    kills = begun.get("oom_kills")
    return isinstance(kills, int) and begun.get("boot") == _boot() and count_oom_kills() > kills


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""
