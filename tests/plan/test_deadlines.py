"""Deadlines follow from how much there is to do, so that none ends a run that is only large or slow."""

import dataclasses

from slipstream.config.bounds import LONGEST_S
from slipstream.plan.memory.sizes import GIB

from .test_plan import CARD, GENERATED, TINY, note, plan, reasons


def deadlines(values=None, **measured):
    made = plan(GENERATED | (values or {}), **measured)
    inference = made.config.inference
    return inference.start_timeout_s, made.config.weights.apply_timeout_s, inference.request_timeout_s


def test_large_weights_take_longer_to_start_and_to_apply():
    small = deadlines(**CARD)
    large = deadlines(**CARD | {"num_parameters": 30_000_000_000, "gpu_memory_bytes": 1000 * GIB})
    assert small[:2] == (300.0, 300.0)
    assert large[0] >= 240 + 60e9 / 2e8
    assert large[1] >= 240 + 120e9 / 2e8
    teacher = dataclasses.replace(TINY, num_parameters=30_000_000_000, context_length=10_000)
    beside = deadlines(**CARD | {"teacher": teacher})
    assert (beside[0], beside[1]) == (large[0], small[1]), "its engine starts, and is never updated"


def test_long_completions_and_slow_machines_take_longer():
    short, long = (deadlines({"sampling.max_tokens": tokens}, **CARD)[2] for tokens in (512, 16_384))
    assert short >= 512 * 0.1
    assert 16 * short < long <= LONGEST_S
    # A processor that makes some thirty tokens of each of many sequences in a second.
    on_cpu = {"num_parameters": 500_000_000, "context_length": 8192, "memory_bytes": 64 * GIB}
    values = {"sampling.max_tokens": 2048}
    two, many = (deadlines(values, **on_cpu, num_cpus=cores)[2] for cores in (2, 64))
    assert two > many > 300
    assert two > 256 * 2048 / 200


def test_the_plan_tells_the_budget_of_further_tries():
    told = note(plan(GENERATED | {"inference.request_timeout_s": 100.0}, **CARD), "further tries of a request")
    assert (told.value, told.how) == (5, "begun within 200 s of the first, 2 times inference.request_timeout_s")
    never = plan(GENERATED | {"inference.request_retries": 0}, **CARD)
    assert "further tries of a request" not in {each.name for each in never.notes}


def test_what_was_set_stays_and_each_has_its_reason():
    values = {"inference.start_timeout_s": 7.0, "weights.apply_timeout_s": 8.0, "inference.request_timeout_s": 9.0}
    assert deadlines(values, **CARD) == (7.0, 8.0, 9.0)
    told = reasons(plan(GENERATED, **CARD))
    assert "2.88 GiB read at 0.2 GB/s" in told["inference.start_timeout_s"]
    assert "2.88 GiB written and read" in told["weights.apply_timeout_s"]
    assert "512 tokens in steps of" in told["inference.request_timeout_s"]
    endless = CARD | {"context_length": 10**7, "gpu_memory_bytes": 10**15}
    assert deadlines({"sampling.max_tokens": 5_000_000}, **endless)[2] == LONGEST_S
