"""A real client of the Model Context Protocol uses the queue through `slipstream mcp`."""

import asyncio
import os
import sys

import httpx
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.service.deployments.deployments import LocalDeployments
from slipstream.service.deployments.registry import Registry

from .test_api import paused
from .test_deployments import end_host

pytestmark = pytest.mark.real_start
TOOLS = {"plan", "submit", "status", "logs", "cancel", "runs", "checkpoints", "gpus"}
TOOLS |= {"deploy", "undeploy", "deployments"}
ENDS_S = 240.0


class Client:
    """A session, whose answers are values."""

    def __init__(self, session):
        self._session = session

    async def ask(self, tool, **arguments):
        answer = await self._session.call_tool(tool, arguments)
        assert not answer.is_error, answer.content
        found = answer.structured_content
        return found["result"] if {*found} == {"result"} else found

    async def refused(self, tool, **arguments):
        answer = await self._session.call_tool(tool, arguments)
        assert answer.is_error
        return answer.content[0].text

    async def until(self, run, *states):
        async with asyncio.timeout(ENDS_S):
            while (found := await self.ask("status", run=run))["state"] not in states:
                await asyncio.sleep(0.2)
        return found


def used(work):
    """Run `work(client, tools)` with a server in its own process."""

    async def session():
        command = ["-P", "-m", "slipstream.cli", "mcp"]
        server = StdioServerParameters(command=sys.executable, args=command, env={**os.environ})
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            return await work(Client(session), (await session.list_tools()).tools)

    return asyncio.run(session())


@pytest.mark.service
def test_a_run_without_a_checkpoint_is_not_deployed(place):
    name = paused(place, "run", owner="")

    async def work(client, _):
        assert "checkpoint" in await client.refused("deploy", run=name)
        assert "no run" in await client.refused("deploy", run="../state")
        assert "no deployment" in await client.refused("undeploy", name="nothing")
        assert await client.ask("deployments") == []

    used(work)


def test_status_without_a_name_shows_all_runs(place):
    names = [paused(place, name, owner="") for name in ("first", "second")]

    async def work(client, _):
        assert [run["id"] for run in (await client.ask("status"))["runs"]] == names
        assert (await client.ask("status", run=names[0]))["state"] == "queued"

    used(work)


@pytest.mark.service
@pytest.mark.engine
def test_a_client_deploys(place, monkeypatch, tmp_path_factory):
    """A real vLLM server answers with the adapter of a run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The greedy completion before "ready" needs room in the context.
    place.model = new_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=32, num_layers=2, context_length=128)
    run = place.submit("run", 4, more="[lora]\nrank = 2\n")
    place.until(run, "done")

    async def work(client, _):
        found = await client.ask("deploy", run=run)
        assert (found["run"], found["step"], found["kind"]) == (run, 4, "adapter")
        async with asyncio.timeout(ENDS_S):
            while (found := (await client.ask("deployments"))[0])["state"] == "deploying":
                await asyncio.sleep(0.5)
        assert found["state"] == "ready", found
        key = deployments.key()
        asked = {"model": found["name"], "messages": [{"role": "user", "content": "3"}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.post(f"{found['url']}/chat/completions", json=asked, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        await client.ask("undeploy", name=found["name"])
        async with asyncio.timeout(ENDS_S):
            while await client.ask("deployments"):
                await asyncio.sleep(0.5)
        assert "no run" in await client.refused("deploy", run="../state")
        assert "no deployment" in await client.refused("undeploy", name="nothing")

    deployments = LocalDeployments(place.store)
    deployments.listen("127.0.0.1", 0)
    try:
        used(work)
    finally:
        end_host(Registry(place.store))


@pytest.mark.service
def test_a_client_submits_watches_and_cancels(place):
    file = str(place.run_file(4))

    async def work(client, tools):
        assert {tool.name for tool in tools} == TOOLS
        assert all(tool.description for tool in tools)
        assert (await client.ask("plan", run_file=file))["config"]["training"]["steps"] == 4
        run = (await client.ask("submit", run_file=file, overrides=["--to", "local"]))["id"]
        found = await client.until(run, "done", "failed")
        assert (found["state"], found["step"], found["actual"]["steps"]) == ("done", 4, 4)
        assert "made all 4 steps" in (await client.ask("logs", run=run))["output"]
        piece = await client.ask("logs", run=run, offset=5)
        assert piece["next"] == 5 + len(piece["output"].encode())
        (checkpoint,) = await client.ask("checkpoints", run=run)
        assert checkpoint["name"] == f"run:{run}/step-4"
        assert [each["place"] for each in await client.ask("gpus")] == ["cpu"]
        options = ["--to", "local", "--training.steps", "100000"]
        long = (await client.ask("submit", run_file=file, overrides=options))["id"]
        await client.until(long, "running")
        await client.ask("cancel", run=long)
        assert (await client.until(long, "cancelled", "failed", "done"))["state"] == "cancelled"
        rows = await client.ask("runs")
        assert [(row["id"], row["state"]) for row in rows] == [(run, "done"), (long, "cancelled")]

        for tool in ("status", "logs", "cancel", "checkpoints"):
            for name in ("nothing", "../state", "/etc/passwd", "", "a\0", "a" * 300):
                assert "no run" in await client.refused(tool, run=name)
        assert "nowhere.toml" in await client.refused("submit", run_file="nowhere.toml")
        assert "option" in await client.refused("plan", run_file="--help")

    used(work)
