"""How long an update holds up the requests that run: by the clock alone, and in a real engine."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from slipstream.inference.plugin.clock import TokenClock
from slipstream.records import SamplingParams
from slipstream.weights import check_report, create_bridge

from . import test_in_flight
from .conftest import LiveEngine, perturbed


async def test_a_stall_is_from_the_last_token_before_to_the_first_one_after():
    clock = TokenClock()
    clock.tick()
    last = time.perf_counter()
    await asyncio.sleep(0.03)
    clock.begin()
    await asyncio.sleep(0.03)
    clock.begin()  # the apply after a fence
    ending = asyncio.create_task(clock.end(lambda: True))
    await asyncio.sleep(0.03)
    assert not ending.done()
    clock.tick()
    first = time.perf_counter()
    assert await ending == pytest.approx(first - last, abs=0.01)
    assert await clock.end(lambda: True) == 0.0, "no update has begun since"


async def test_gaps_between_tokens_of_an_update_that_stops_nothing_are_not_added_up():
    clock = TokenClock()
    clock.tick()
    clock.begin()
    for _ in range(4):
        await asyncio.sleep(0.02)
        clock.tick()
    ending = asyncio.create_task(clock.end(lambda: True))
    await asyncio.sleep(0.005)
    clock.tick()
    assert 0.015 < await ending < 0.06


async def test_nobody_is_waited_for_when_the_last_request_has_ended():
    clock = TokenClock()
    clock.tick()
    clock.begin()
    await asyncio.sleep(0.02)
    assert 0.015 < await asyncio.wait_for(clock.end(lambda: False), 1.0) < 0.2


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
        ticket = bridge.publisher.publish(perturbed(weights, step).items(), step, 5, lambda ticket: None)
        began = time.perf_counter()
        report = live.call(bridge.receiver.apply(ticket, 60))
        check_report(report, ticket)
        return report.stall_s, report.transfer_s + report.verify_s, time.perf_counter() - began

    assert update(0)[0] == 0.0
    load = test_in_flight.Load(live, "stall", SamplingParams(max_tokens=test_in_flight.LENGTH))
    load.wait_for(1)
    stall, inside, whole = update(1)
    load.end()
    assert inside < stall < whole + 0.5
