"""The engine's server by itself, without vLLM: who may be answered, and when."""

import asyncio
from types import SimpleNamespace

import pytest

from slipstream.inference.plugin.server import EngineServer, OutOfService
from slipstream.inference.settings import EngineSettings


class StandingHost(SimpleNamespace):
    """A host that only stands still."""

    keeps_requests = True

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
    with pytest.raises(OutOfService, match="2 requests are running, and this vLLM cannot keep them"):
        await server.fence()
    assert server.reason == ""
