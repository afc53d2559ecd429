"""The options and the result types of the weight update benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

BridgeName = Literal[
    "disk", "restart", "broadcast", "single_copy", "lora", "disk+delta", "broadcast+delta", "single_copy+lora"
]
BRIDGES: tuple[BridgeName, ...] = get_args(BridgeName)
TOGETHER: tuple[BridgeName, ...] = ("disk", "disk+delta", "broadcast", "broadcast+delta")
"""The bridges that one engine can use one after the other."""
MAX_CONTEXT, PROMPT_TOKENS, WORD_IDS = 2048, 32, 90


@dataclass(frozen=True)
class SyncOptions:
    """What is measured."""

    model: str
    """A model's folder or hub id."""
    updates: int = 20
    streams: int = 4
    """Generations that go on meanwhile."""
    placement: Literal["auto", "shared", "separate"] = "auto"
    replicas: int = 1
    """Engines that are updated together."""
    changed: float = 1.0
    """Part of the elements that each update changes; see DELTA_CHANGED."""
    in_flight: Literal["recompute", "keep", "drain"] = "recompute"
    """What becomes of the generations; see weights.in_flight."""
    context: int = MAX_CONTEXT
    """Tokens that each generation grows to."""
    rank: int = 16
    """Of the adapter, under `lora`."""
    tensor_parallel_size: int = 1
    """Workers that each engine divides the weights among."""
    ranks: int | None = None
    """Processes of the trainer; None: one, or over `single_copy` one for each worker."""
    pause_s: float = 0.2
    """Between two updates."""
    scratch: Path | None = None
    """Where files are written; None: where temporary files are."""
    timeout_s: float = 600.0
    """Longest start of the engine, and longest update."""


@dataclass(frozen=True)
class Spread:
    """Of all counted updates, in seconds."""

    median: float
    p95: float
    """The smallest that 95 % of them do not exceed."""
    largest: float


@dataclass(frozen=True)
class Memory:
    """Of all processes of one side together, in bytes; None where nobody says."""

    rss: int
    pss: int
    torch: int | None
    """Allocated by torch on GPUs."""
    gpu: int | None
    """In use on GPUs as nvidia-smi sees it."""


@dataclass(frozen=True)
class SyncFigures:
    """One bridge. `publish` is the trainer's call, with its fingerprints; `transfer` is from the engine's first byte
    to loaded weights (under `restart` the engine's start); `commit` is the writing of weights while the engine stands
    still, where it does; `update` is all of it up to the verified version."""

    bridge: str
    model: str
    num_parameters: int
    dtype: str
    placement: str
    """`cpu`, or who is on which GPU: `shared` or `separate`."""
    tensor_parallel_size: int
    """Workers of each engine."""
    ranks: int
    """Processes of the trainer."""
    in_flight: str
    context: int
    """Tokens that a generation grows to, at most."""
    num_updates: int
    num_bytes: int
    """That moved in an update, over `single_copy` to all workers from ranks that have a part of their own."""
    first_update_s: float
    publish: Spread
    transfer: Spread
    verify: Spread
    commit: Spread | None
    stall: Spread | None
    """From the last token before to the first one after; None where nothing was being generated."""
    update: Spread
    raw_s: float | None
    """The same bytes by the collective alone to as many receivers; None of other bridges."""
    raw_share: float | None
    """Part of the raw bandwidth that the transfer reached."""
    gather_s: float | None
    """What several ranks have brought together in the first, and nothing sent; None of one, and of `single_copy`."""
    from_one_s: float | None
    """The transfer of what was brought together before, by `broadcast`: what it is shorter is gathering that the
    sending does not hide."""
    trainer: Memory
    engine: Memory
    gpus: list[int]
    """Bytes in use on each GPU."""


def spread(seconds: Sequence[float]) -> Spread:
    """Of at least one."""
    ordered = sorted(seconds)
    return Spread(statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], ordered[-1])
