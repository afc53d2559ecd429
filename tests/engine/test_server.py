"""The engine's server by itself, without vLLM: who may be answered, and when."""

import asyncio
from types import SimpleNamespace

import pytest

from slipstream.inference.plugin.clock import TokenClock
from slipstream.inference.plugin.server import EngineServer, OutOfService
from slipstream.inference.settings import EngineSettings
from slipstream.records import GenerateRequest, SamplingParams


class StandingHost(SimpleNamespace):
    """A host that only stands still."""

    keeps_requests = True
    clock = TokenClock()

    async def pause(self):
        """Nothing runs."""

    async def rpc(self, method, *args):
        assert method == "slipstream_settle"
        return ["null"]


@pytest.fixture
def server():
    made = EngineServer(EngineSettings("", "", "float32", 8, 8), StandingHost())
    made.reason = ""
    return made


async def test_a_request_waits_through_updates_that_follow_at_once(server):
    await server.fence()
    waiting = asyncio.create_task(server.until_in_service(5.0))
    await asyncio.sleep(0.01)
    for _ in range(5):
        server.reason = ""
        server._settled.set()
        await server.fence()
        await asyncio.sleep(0.01)
        assert not waiting.done()
    server.reason = ""
    server._settled.set()
    await waiting


async def test_a_request_is_refused_at_its_deadline_and_after_a_failure(server):
    await server.fence()
    with pytest.raises(OutOfService, match="the trainer is writing the weights"):
        await server.until_in_service(0.05)
    server.reason = "applying version 0.1 failed"
    server._settled.set()
    with pytest.raises(OutOfService, match="failed"):
        await server.until_in_service(5.0)


async def test_requests_that_cannot_be_kept_must_end_before_a_fence(server):
    server.num_running, server.host.keeps_requests = 2, False
    with pytest.raises(OutOfService, match=r"2 requests are running, and this vLLM .* use weights.in_flight"):
        await server.fence()
    assert server.reason == ""


async def test_a_drained_engine_waits_for_what_runs_and_begins_nothing_new(server):
    server.settings = EngineSettings("", "", "float32", 8, 8, in_flight="drain")
    server.num_running = 1
    standing = asyncio.create_task(server.fence())
    await asyncio.sleep(0.01)
    begun = asyncio.create_task(server.generate(GenerateRequest("new", [1], SamplingParams(1), timeout_s=0.05)))
    refused = await begun
    assert refused.finish_reason == "abort"
    assert "was not begun: the trainer is writing the weights" in refused.error
    assert not standing.done()
    server.num_running = 0
    server._request_ended.set()
    await asyncio.wait_for(standing, 1.0)
