"""Estimates of the engines' updates and starts on GPUs, by rates measured there (dev/bench/LOG.md). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config import PlannedConfig
from slipstream.config.traits import uses_engine
from slipstream.plan.facts import Facts
from slipstream.plan.memory.sizes import gib, weights_bytes
from slipstream.plan.summary import Note

FINGERPRINT_RATE, VERIFY_RATE = 1.5e11, 4.3e11
"""Bytes a second of a trainer's and an engine's GPU: a 7B model on H200s, 102 and 35 ms."""
LINK_RATES = {"between GPUs": 3.4e11, "between nodes": 4e10}
"""Bytes a second of `broadcast`: NVLink as measured (44 ms), and four fifths of 400 Gbit/s, not measured."""
DISK_RATES = 1e9, 5.7e9
"""Bytes a second of `disk`, written and read: a 1.5B model, 3.1 and 0.5 s."""
IMPORT_S, GRAPHS_S, LOAD_RATE = 26.0, 3.0, 8.4e8
"""An H200's vLLM: imports, CUDA graphs, and bytes a second of its weights (3.1 GB in 3.7 s)."""
COMPILE_S = 60.0


def engine_time_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """Seconds of an update and of a start; nothing on a CPU, whose speed is unknown."""
    if not facts.num_gpus or not uses_engine(config):
        return
    num_bytes, size = weights_bytes(facts.model, config.model.dtype), config.inference.tensor_parallel_size
    if config.weights.bridge in ("broadcast", "disk"):
        checks = num_bytes / config.training.ranks / FINGERPRINT_RATE + num_bytes / size / VERIFY_RATE
        if config.weights.bridge == "broadcast":
            where = "between nodes" if config.cluster.nodes > 1 else "between GPUs"
            moves, how = num_bytes / LINK_RATES[where], f"{LINK_RATES[where] / 1e9:g} GB/s {where}"
            how += " (400 Gbit/s, not measured)" if config.cluster.nodes > 1 else " (NVLink)"
        else:
            writes, reads = DISK_RATES
            moves = num_bytes / writes + num_bytes / reads
            how = f"{writes / 1e9:g} GB/s written and {reads / 1e9:g} GB/s read"
        yield _note("update", checks + moves, f"{gib(num_bytes)} at {how}; fingerprints {checks:.2g} s")
    how = f"import {IMPORT_S:g} s, {gib(num_bytes)} at {LOAD_RATE / 1e9:g} GB/s, graphs {GRAPHS_S:g} s"
    seconds = IMPORT_S + num_bytes / LOAD_RATE + GRAPHS_S
    yield _note("start of vLLM", seconds, f"{how}; the first one also compiles, for about {COMPILE_S:g} s")


def _note(name: str, seconds: float, how: str) -> Note:
    return Note(name, float(f"{seconds:.2g}"), "s", how)
