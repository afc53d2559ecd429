"""Finds in a run folder whether the run ran out of memory, and the settings for its resume to plan smaller.

A process killed by the kernel writes no event: it is recognised by the kernel's count of killed processes, held by the
event `start`. The user's settings stay as they are. After a trainer ran out of memory, rows are halved,
down to its longest sequence; then layers are computed again in the backward pass; then an engine on the same device
gets memory for half as many sequences. An engine out of memory gets this at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.config import PlannedConfig
from slipstream.config.traits import uses_engine
from slipstream.plan.facts import Shortage
from slipstream.plan.machine import count_oom_kills
from slipstream.runlog import is_running, read_events

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def run_name(folder: Path, lineage: int) -> str:
    """Name of a run and one of its lineages, for messages."""
    return f"{folder.resolve().name} (lineage {lineage})"


def shortage_of(config: PlannedConfig, run: str, side: Literal["trainer", "engine"]) -> Shortage:
    """The memory settings of a planned run, with its `side` out of memory."""
    checkpointing = config.training.gradient_checkpointing
    max_num_seqs = config.inference.max_num_seqs if uses_engine(config) else 0
    return Shortage(run, side, config.training.micro_batch_tokens, checkpointing, max_num_seqs)


def memory_at_start(config: PlannedConfig) -> dict[str, Any]:
    """Fields of the event `start` to tell a later process that the OOM killer ended this one."""
    planned = dataclasses.asdict(shortage_of(config, "", "trainer"))
    return {**planned, "oom_kills": count_oom_kills(), "boot": _boot()}


def find_shortages(folder: Path | None) -> tuple[tuple[Shortage, ...], tuple[str, ...]]:
    """Find when the run in `folder` ran out of memory, oldest first; also returns messages on unreadable events."""
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


def fewer_tokens(shortages: Iterable[Shortage], tokens: int, least: int) -> tuple[int, str]:
    """`tokens` of a row, or fewer, at least `least`; and why, empty if they stay."""
    failed = min((s for s in shortages if s.side == "trainer"), key=lambda s: s.row_tokens, default=None)
    fewer = tokens if failed is None else max(least, min(tokens, failed.row_tokens // 2))
    if failed is None or fewer == tokens:
        return tokens, ""
    return fewer, f"the trainer of {failed.run} ran out of memory with rows of {failed.row_tokens} tokens"


def must_compute_again(shortages: Iterable[Shortage], least: int) -> str:
    """Why layers are computed again: rows could not be shorter than the `least` tokens; empty if they could."""
    for failed in shortages:
        if failed.side == "trainer" and failed.row_tokens <= least and failed.checkpointing is not True:
            return f"the trainer of {failed.run} ran out of memory with rows of {failed.row_tokens} tokens"
    return ""


def fewer_sequences(shortages: Iterable[Shortage], number: int, least: int, *, shared: bool) -> tuple[int, str]:
    """`number` of sequences an engine generates at once, or fewer; and why, empty if it stays. `least`: tokens of the
    shortest rows possible for a trainer; `shared`: it takes memory of the same device."""
    why = ""
    for failed in shortages:
        is_last_resort = shared and failed.row_tokens <= least and failed.checkpointing is True
        half = max(1, failed.max_num_seqs // 2)
        if failed.max_num_seqs and half < number and (failed.side == "engine" or is_last_resort):
            number = half
            why = f"the {failed.side} of {failed.run} ran out of memory beside a KV cache for {failed.max_num_seqs}"
    return number, why


def _was_killed(begun: dict[str, Any]) -> bool:
    kills = begun.get("oom_kills")
    return isinstance(kills, int) and begun.get("boot") == _boot() and count_oom_kills() > kills


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""
