"""For which runs vLLM is imported early, and with how many threads."""

import contextlib

import pytest

from slipstream.config import EvaluationConfig, with_values
from slipstream.launch import startup
from slipstream.plan.machine import usable_cpus
from tests.plan.test_plan import GRPO, SFT


@pytest.fixture
def asked(monkeypatch):
    found = []
    monkeypatch.setattr(startup, "EngineAhead", lambda threads: contextlib.nullcontext(found.append(threads)))
    return found


@pytest.mark.parametrize("has_gpu", [True, False])
def test_threads_are_those_that_the_plan_will_most_likely_give(has_gpu, asked, monkeypatch):
    monkeypatch.setattr(startup, "HAS_GPU", has_gpu)
    for changes in ({}, {"run.threads": 6}, {"run.threads": 6, "inference.tensor_parallel_size": 2}):
        with startup.preimport_vllm(with_values(GRPO, changes)):
            pass
    assert asked == ([None] * 3 if has_gpu else [usable_cpus(), 6, 3])


def test_a_run_that_generates_nothing_imports_no_vllm(asked):
    sft = SFT.model_copy(update={"evaluation": None})
    with startup.preimport_vllm(sft) as nothing:
        assert nothing is None
    with startup.preimport_vllm(sft.model_copy(update={"evaluation": EvaluationConfig()})):
        pass
    assert len(asked) == 1
