"""How long an update holds up the requests that run: by the clock alone, and in a real engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest
from benchmarks.bridges import create_bridge
from safetensors.torch import load_file

from slipstream.inference.plugin import token_clock
from slipstream.inference.plugin.token_clock import TokenClock
from slipstream.weights import check_report

from .conftest import LiveEngine, perturbed


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """An update waits for its first token also where this process stands still meanwhile."""
    monkeypatch.setattr(token_clock, "_FIRST_TOKEN_S", 600.0)


async def test_a_stall_is_from_the_last_token_before_to_the_first_one_after():
    clock = TokenClock()
    before_last = time.perf_counter()
    clock.tick()
    after_last = time.perf_counter()
    await asyncio.sleep(0.03)
    clock.begin()
    await asyncio.sleep(0.03)
    clock.begin()  # the apply after a fence
    ending = asyncio.create_task(clock.end(lambda: True))
    await asyncio.sleep(0.03)
    assert not ending.done()
    before_first = time.perf_counter()
    clock.tick()
    after_first = time.perf_counter()
    assert before_first - after_last <= await ending <= after_first - before_last
    assert await clock.end(lambda: True) == 0.0, "no update has begun since"


async def test_gaps_between_tokens_of_an_update_that_stops_nothing_are_not_added_up():
    clock = TokenClock()
    times = []

    def tick():
        begun = time.perf_counter()
        clock.tick()
        times.append((begun, time.perf_counter()))

    tick()
    clock.begin()
    for _ in range(4):
        await asyncio.sleep(0.02)
        tick()
    ending = asyncio.create_task(clock.end(lambda: True))
    await asyncio.sleep(0.005)
    tick()
    pairs = list(itertools.pairwise(times))
    shortest, longest = (max(b[i] - a[1 - i] for a, b in pairs) for i in (0, 1))
    assert shortest <= await ending <= longest


async def test_nobody_is_waited_for_when_the_last_request_has_ended():
    clock = TokenClock()
    begun = time.perf_counter()
    clock.tick()
    clock.begin()
    await asyncio.sleep(0.02)
    stall = await asyncio.wait_for(clock.end(lambda: False), 30.0)
    assert 0.015 < stall <= time.perf_counter() - begun


async def test_only_steps_with_a_token_count():
    outputs = [SimpleNamespace(new_token_ids=[])]
    processor = SimpleNamespace(process_outputs=lambda outputs, *_, **__: len(outputs))
    clock = TokenClock()
    clock.follow(processor)
    clock.tick()
    clock.begin()
    await asyncio.sleep(0.02)
    assert processor.process_outputs(outputs, 1.0, iteration_stats=None) == 1
    ending = asyncio.create_task(clock.end(lambda: True))
    await asyncio.sleep(0.01)
    assert not ending.done()
    processor.process_outputs([*outputs, SimpleNamespace(new_token_ids=[7])])
    assert await ending > 0.02


@pytest.mark.engine
def test_an_update_reports_it_and_none_when_nothing_runs(live: LiveEngine, tmp_path):
    weights = load_file(live.model / "model.safetensors")
    bridge = create_bridge("disk", folder=tmp_path / "weights", source=live.model, engine=live.engine)

    def update(step: int) -> tuple[float, float, float]:
        began = time.perf_counter()
        ticket, report = live.bring(bridge, perturbed(weights, step).items(), step, 5)
        check_report(report, ticket)
        return report.stall_s, report.transfer_s + report.verify_s, time.perf_counter() - began

    assert update(0)[0] == 0.0
    stalls = []
    for attempt in range(1, 4):
        begun = time.perf_counter()
        with live.under_load(f"stall-{attempt}"):
            waited = time.perf_counter() - begun
            stall, inside, whole = update(attempt)
        # Between the end of the requests and the next ones, on a machine that does much else, nothing runs.
        assert stall == 0.0 or inside < stall < waited + whole
        stalls.append(stall)
    assert max(stalls) > 0.0
