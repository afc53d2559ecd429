"""The part of the plan that says how long the engine may take: to start, to take a version, to make a completion. Pure.

These deadlines end what would go on for ever; an engine that is dead, frozen or makes no step is found long before by
those who listen to it. So they are several times what the slowest of machines needs by the rates below, and never less
than `LEAST_S`.
"""

from __future__ import annotations

import math

from slipstream.config.bounds import LONGEST_S
from slipstream.launch.plan.builder import Draft
from slipstream.launch.plan.memory.sizes import gib, kv_bytes_per_sequence, weights_bytes

LEAST_S = 300.0
STARTING_S = 240.0
"""What starting takes beside the weights: imports, compiling, CUDA graphs; and what is left to a small version."""
FILE_RATE = 2e8
"""Bytes a second that a slow disk or a network gives or takes."""
STEP_S = 0.03
"""Of one decoding step, beside its arithmetic."""
GPU_RATES, CPU_RATES = (1e13, 2e11), (2e9, 5e9)
"""FLOP/s (on a CPU of each core) and bytes a second of memory that a slow machine decodes at."""
IN_LINE = 2
"""Requests that vLLM has for each that it runs."""
SLACK = 4.0
_ROUND_S = 10.0


def plan_deadlines(draft: Draft) -> None:
    """`inference.start_timeout_s`, `weights.apply_timeout_s` and `inference.request_timeout_s`; the engine's length and
    sequences are decided."""
    model, dtype = draft.facts.model, draft["model.dtype"]
    policy = weights_bytes(model, dtype)
    largest = max(policy, weights_bytes(draft.facts.teacher, dtype) if draft.facts.teacher else 0)
    for path, num_bytes, times in (
        ("inference.start_timeout_s", largest, 1),
        ("weights.apply_timeout_s", policy, 2),
    ):
        what = "read" if times == 1 else "written and read"
        reason = (
            f"at least {LEAST_S:.0f} s; {STARTING_S:.0f} s, and {gib(num_bytes)} {what} at {FILE_RATE / 1e9:g} GB/s"
        )
        draft.derive_auto(path, _rounded(STARTING_S + times * num_bytes / FILE_RATE), reason)
    tokens, sequences = draft["sampling.max_tokens"], draft["inference.max_num_seqs"]
    step_s = _step_seconds(draft, policy, sequences)
    seconds = SLACK * IN_LINE * (tokens * step_s + _prefill_seconds(draft, sequences))
    draft.derive_auto(
        "inference.request_timeout_s",
        _rounded(seconds),
        f"{SLACK * IN_LINE:g} times {tokens} tokens in steps of {1000 * step_s:.3g} ms with {sequences} sequences, as "
        f"a slow machine makes them; at least {LEAST_S:.0f} s",
    )


def _rates(draft: Draft) -> tuple[float, float]:
    """FLOP/s and bytes a second of one engine."""
    flops, memory = CPU_RATES if draft.on_cpu else GPU_RATES
    return (flops * draft.facts.num_cpus, memory) if draft.on_cpu else (flops, memory)


def _step_seconds(draft: Draft, weights: int, sequences: int) -> float:
    """Of one token of each of so many sequences of full length."""
    flops, memory = _rates(draft)
    length, model = draft["inference.max_model_len"], draft.facts.model
    cache = sequences * kv_bytes_per_sequence(model, draft["model.dtype"], length)
    return STEP_S + 2.0 * model.num_decoding * sequences / flops + (weights + cache) / memory


def _prefill_seconds(draft: Draft, sequences: int) -> float:
    model, data = draft.facts.model, draft.facts.data
    return 2.0 * model.num_decoding * sequences * data.max_prompt_tokens / _rates(draft)[0]


def _rounded(seconds: float) -> float:
    return min(LONGEST_S, max(LEAST_S, math.ceil(seconds / _ROUND_S) * _ROUND_S))
