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
    """A model folder or a hub id."""
    updates: int = 20
    """Number of updates in the statistics; warm-up updates are extra."""
    streams: int = 4
    """Requests that generate during the updates."""
    placement: Literal["auto", "shared", "separate"] = "auto"
    replicas: int = 1
    """Engines that receive each update."""
    changed: float = 1.0
    """Fraction of the elements that each update changes; capped at DELTA_CHANGED for deltas."""
    in_flight: Literal["recompute", "keep", "drain"] = "recompute"
    """How running requests continue after an update: the setting `weights.in_flight`."""
    context: int = MAX_CONTEXT
    """Tokens of a request at its end, prompt included."""
    rank: int = 16
    """LoRA rank, for `lora` and `single_copy+lora`."""
    tensor_parallel_size: int = 1
    """Tensor-parallel workers of each engine."""
    ranks: int | None = None
    """Trainer processes; None: one, or for `single_copy` one for each worker."""
    pause_s: float = 0.2
    """Seconds between two updates."""
    scratch: Path | None = None
    """Folder for temporary files; None: the system's."""
    timeout_s: float = 600.0
    """Limit of an engine's start and of one update."""


@dataclass(frozen=True)
class Spread:
    """Statistics of all counted updates, in seconds."""

    median: float
    p95: float
    """The smallest value that at least 95 % of the updates do not exceed."""
    largest: float


@dataclass(frozen=True)
class Memory:
    """Memory of all processes of the trainer or of the engine together, in bytes; None: unknown."""

    rss: int
    pss: int
    torch: int | None
    """Allocated by torch on GPUs."""
    gpu: int | None
    """In use on GPUs according to nvidia-smi."""


@dataclass(frozen=True)
class SyncFigures:
    """The results of one bridge.

    `publish` is the trainer's call, fingerprints included. `transfer` lasts from the first byte that the engine
    receives until its weights are loaded (`restart`: the engine's start). `commit` is the time in which the trainer
    writes weights that the paused engine shares. `update` is the whole update, until the engine's fingerprints are
    verified.
    """

    bridge: str
    model: str
    num_parameters: int
    dtype: str
    placement: str
    """`cpu`; on GPUs `shared` or `separate`."""
    tensor_parallel_size: int
    """Tensor-parallel workers of each engine."""
    ranks: int
    """Trainer processes."""
    in_flight: str
    context: int
    """Tokens of a request at its end, prompt included."""
    num_updates: int
    num_bytes: int
    """Bytes moved by one update; for `single_copy` with several ranks, the parts that ranks copy to their workers."""
    first_update_s: float
    publish: Spread
    transfer: Spread
    verify: Spread
    commit: Spread | None
    """None for bridges that do not write into the engine's memory."""
    stall: Spread | None
    """From the last token before an update to the first one after it; None if no request was running."""
    update: Spread
    raw_s: float | None
    """Time in which the bare collective broadcasts as many bytes to as many receivers; None except for `broadcast`."""
    raw_share: float | None
    """`raw_s` divided by the median transfer: the fraction of the collective's bandwidth that was reached."""
    gather_s: float | None
    """Time to gather all published weights on rank 0 without sending them; None for one rank and for `single_copy`."""
    from_one_s: float | None
    """Transfer of weights that were gathered beforehand, for `broadcast` from several ranks: the difference to
    `transfer` is the gathering that does not overlap with sending."""
    trainer: Memory
    engine: Memory
    gpus: list[int]
    """Bytes in use on each GPU."""


def spread(seconds: Sequence[float]) -> Spread:
    """Return median, 95th percentile and maximum of at least one value."""
    ordered = sorted(seconds)
    return Spread(statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], ordered[-1])
