"""For which runs vLLM is imported early, and with how many threads."""

import contextlib

import pytest

from slipstream.config import (
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    RLConfig,
    RunConfig,
    SFTConfig,
    TrainingConfig,
    with_values,
)
from slipstream.launch import startup
from slipstream.plan.machine import usable_cpus


@pytest.fixture
def asked(monkeypatch):
    found = []
    monkeypatch.setattr(startup, "EngineAhead", lambda threads: contextlib.nullcontext(found.append(threads)))
    return found


def run_of(algorithm, **changes):
    config = RunConfig(
        model=ModelConfig(path="m"),
        environment=EnvironmentConfig(name="e"),
        algorithm=algorithm,
        training=TrainingConfig(steps=1),
    )
    return with_values(config, changes)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_threads_are_those_that_the_plan_will_most_likely_give(has_gpu, asked, monkeypatch):
    monkeypatch.setattr(startup, "HAS_GPU", has_gpu)
    for changes in ({}, {"run.threads": 6}, {"run.threads": 6, "inference.tensor_parallel_size": 2}):
        with startup.preimport_vllm(run_of(RLConfig(), **changes)):
            pass
    assert asked == ([None] * 3 if has_gpu else [usable_cpus(), 6, 3])


def test_a_run_that_generates_nothing_imports_no_vllm(asked):
    sft = run_of(SFTConfig()).model_copy(update={"evaluation": None})
    with startup.preimport_vllm(sft) as nothing:
        assert nothing is None
    with startup.preimport_vllm(sft.model_copy(update={"evaluation": EvaluationConfig()})):
        pass
    assert len(asked) == 1
