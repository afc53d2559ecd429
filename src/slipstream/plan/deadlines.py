"""Derives the engine's deadlines: to start, to apply a version, to finish a completion. Pure.

Deadlines are a last resort: the client detects an engine that is dead, frozen or idle long before. They are therefore
several times what the slow machine of the rates below needs, and at least `LEAST_S`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from slipstream.config import PlannedConfig
from slipstream.config.bounds import LONGEST_S
from slipstream.config.traits import uses_engine
from slipstream.orchestrator.retries import BUDGET
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.memory.sizes import gib, kv_bytes_per_sequence, weights_bytes
from slipstream.plan.summary import Note

LEAST_S = 300.0
STARTING_S = 240.0
"""Starting an engine without reading its weights: imports, compilation, CUDA graphs. Added to an update, too."""
FILE_RATE = 2e8
"""Bytes per second of a slow disk or network."""
STEP_S = 0.03
"""Overhead of a decoding step."""
GPU_RATES, CPU_RATES = (1e13, 2e11), (2e9, 5e9)
"""FLOP/s (on a CPU per core) and memory bytes per second of a slow machine."""
QUEUED = 2
"""Requests in vLLM for each that it runs at once."""
SLACK = 4.0
_ROUND_S = 10.0


def plan_deadlines(builder: PlanBuilder) -> None:
    """Derive `inference.start_timeout_s`, `weights.apply_timeout_s` and `inference.request_timeout_s`, after
    `inference.max_model_len` and `inference.max_num_seqs`."""
    model, dtype = builder.facts.model, builder["model.dtype"]
    policy = weights_bytes(model, dtype)
    largest = max(policy, weights_bytes(builder.facts.teacher, dtype) if builder.facts.teacher else 0)
    for path, num_bytes, times in (
        ("inference.start_timeout_s", largest, 1),
        ("weights.apply_timeout_s", policy, 2),
    ):
        what = "read" if times == 1 else "written and read"
        reason = (
            f"at least {LEAST_S:.0f} s; {STARTING_S:.0f} s, and {gib(num_bytes)} {what} at {FILE_RATE / 1e9:g} GB/s"
        )
        builder.derive_auto(path, start_seconds(times * num_bytes), reason)
    tokens, sequences = builder["sampling.max_tokens"], builder["inference.max_num_seqs"]
    step_s = _step_seconds(builder, policy, sequences)
    seconds = SLACK * QUEUED * (tokens * step_s + _prefill_seconds(builder, sequences))
    builder.derive_auto(
        "inference.request_timeout_s",
        _rounded(seconds),
        f"{SLACK * QUEUED:g} times {tokens} tokens in steps of {1000 * step_s:.3g} ms with {sequences} sequences, as "
        f"a slow machine makes them; at least {LEAST_S:.0f} s",
    )


def start_seconds(num_bytes: float) -> float:
    """How long an engine may take to start and read so many bytes."""
    return _rounded(STARTING_S + num_bytes / FILE_RATE)


def retry_notes(config: PlannedConfig) -> Iterator[Note]:
    """How often a request of a rollout is tried again."""
    most, timeout_s = config.inference.request_retries, config.inference.request_timeout_s
    if most and uses_engine(config):
        within = f"begun within {BUDGET * timeout_s:g} s of the first, {BUDGET:g} times inference.request_timeout_s"
        yield Note("further tries of a request", most, "", within)


def _rates(builder: PlanBuilder) -> tuple[float, float]:
    """FLOP/s and memory bytes per second of one engine."""
    flops, memory = CPU_RATES if builder.on_cpu else GPU_RATES
    return (flops * builder.facts.num_cpus, memory) if builder.on_cpu else (flops, memory)


def _step_seconds(builder: PlanBuilder, weights: int, sequences: int) -> float:
    """Seconds of a decoding step with `sequences` sequences of `inference.max_model_len` tokens."""
    flops, memory = _rates(builder)
    length, model = builder["inference.max_model_len"], builder.facts.model
    cache = sequences * kv_bytes_per_sequence(model, builder["model.dtype"], length)
    return STEP_S + 2.0 * model.num_decoding * sequences / flops + (weights + cache) / memory


def _prefill_seconds(builder: PlanBuilder, sequences: int) -> float:
    model, data = builder.facts.model, builder.facts.data
    return 2.0 * model.num_decoding * sequences * data.max_prompt_tokens / _rates(builder)[0]


def _rounded(seconds: float) -> float:
    return min(LONGEST_S, max(LEAST_S, math.ceil(seconds / _ROUND_S) * _ROUND_S))
