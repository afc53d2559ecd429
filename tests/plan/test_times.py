"""Estimates of times against steps measured on an H200 (dev/bench/LOG.md)."""

import pytest

from slipstream.plan.memory.sizes import GIB
from slipstream.plan.times import estimate_run

from .test_plan import GRPO, LORA, facts, plan

SHAPE = {
    "num_parameters": 1_544_000_000,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_layers": 28,
    "num_heads": 12,
    "head_dim": 128,
    "context_length": 32_768,
    "vocab_size": 151_936,
    "dtype": "bfloat16",
}
H200 = {"gpu_memory_bytes": 140 * GIB, "gpu_name": "NVIDIA H200", "max_prompt_tokens": 112, "num_gpus": 1} | SHAPE


def estimated(max_tokens, config=GRPO, **changes):
    values = {
        "model.dtype": "bfloat16",
        "algorithm.group_size": 8,
        "training.prompts_per_batch": 32,
        "sampling.max_tokens": max_tokens,
        **changes,
    }
    given = facts(**H200)
    made = plan(values, config, **H200)
    return estimate_run(made.config, given, 0, 112.0 + max_tokens)


@pytest.mark.parametrize(("max_tokens", "measured_s"), [(256, 3.36), (512, 5.57)])
def test_a_step_takes_as_long_as_measured(max_tokens, measured_s):
    assert estimated(max_tokens).step_s == pytest.approx(measured_s, rel=0.05)


def test_what_makes_a_step_longer_and_shorter():
    full = estimated(256)
    assert estimated(256, LORA).step_s > full.step_s
    assert estimated(256, **{"inference.max_num_seqs": 64}).step_s > full.step_s + 2
    assert estimated(256, **{"inference.enforce_eager": True}).rest_s == pytest.approx(full.rest_s - 60)
    assert "s of generation" in full.how
