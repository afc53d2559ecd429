"""Estimates of times against steps measured on an H200 (dev/bench/LOG.md)."""

import pytest

from slipstream.plan.memory.sizes import GIB
from slipstream.plan.times import estimate_run, first_start_s

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
SMALL = SHAPE | {
    "num_parameters": 494_032_768,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_layers": 24,
    "num_heads": 14,
    "head_dim": 64,
}
H200 = {"gpu_memory_bytes": 140 * GIB, "gpu_name": "NVIDIA H200", "max_prompt_tokens": 112, "num_gpus": 1}


def estimated(max_tokens, config=GRPO, shape=SHAPE, **changes):
    values = {
        "model.dtype": "bfloat16",
        "algorithm.group_size": 8,
        "training.prompts_per_batch": 32,
        "sampling.max_tokens": max_tokens,
        **changes,
    }
    given = facts(**H200, **shape)
    made = plan(values, config, **H200, **shape)
    return estimate_run(made.config, given, 0, 112.0 + max_tokens)


# 256: measured with a longer probe, which took 0.15 s more.
@pytest.mark.parametrize(("max_tokens", "measured_s"), [(256, 3.36 - 0.15), (512, 5.43)])
def test_a_step_takes_as_long_as_measured(max_tokens, measured_s):
    assert estimated(max_tokens).step_s == pytest.approx(measured_s, rel=0.05)


def test_a_step_with_lora():
    assert 2.44 < estimated(256, LORA, SMALL).step_s < 2.87, "the medians of four runs"


@pytest.mark.parametrize(
    ("stages", "rest_s", "next_s"),
    [((22.384, 29.31, 12.797), 76.155, 42.181), ((39.114, 31.793, 27.623), 109.663, 37.663)],
)
def test_the_start_after_the_first_one(stages, rest_s, next_s):
    """Two machines: both starts were measured, of runs of 80 and 75 s."""
    names = ("start vLLM: import vLLM", "start vLLM: compile", "start vLLM: capture graphs")
    first = dict(zip(names, stages, strict=True))
    assert rest_s - first_start_s(first) == pytest.approx(next_s, abs=5)
    replicas = {name.replace("vLLM:", "vLLM 0:"): seconds for name, seconds in first.items()}
    assert first_start_s(replicas) == first_start_s(first)
    assert first_start_s(first | {"start vLLM: compile": 7.0}) == 0, "a slow import alone may be slow each time"


def test_what_makes_a_step_longer_and_shorter():
    full = estimated(256)
    assert estimated(256, **{"inference.max_num_seqs": 64}).step_s > full.step_s + 2
    assert estimated(256, **{"inference.enforce_eager": True}).rest_s == pytest.approx(full.rest_s - 60)
    assert "s of generation" in full.how
