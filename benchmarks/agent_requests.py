"""Seconds and CPU time of many agents with one request each: the client of `openai`, the gateway, an engine without a
model.

    python benchmarks/agent_requests.py [--processes 1 2] [--requests 256] [--delay 0.2] [--repeats 5]

The engine is a process and answers each request after the delay, with 512 tokens. Prints a Markdown table: medians and
ranges over all repeats but the first; CPU milliseconds a request of the agents' processes, and of the orchestrator with
its gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import uvloop
from agents import AGENT
from aiohttp import web

from slipstream.config.environment import EnvironmentConfig
from slipstream.envs.hosted.apart import Apart
from slipstream.envs.registry import load_environment
from slipstream.inference.addresses import ControlAddress
from slipstream.inference.client import EngineClient
from slipstream.orchestrator import garbage_collection
from slipstream.orchestrator.gateway import Gateway
from slipstream.records import Completion, Message, SamplingParams, SessionOpening, SessionTurn, Task, VersionSpan

TASK = Task("1", (Message("user", "x" * 400),), "4")
TEXT = "lorem ipsum 7 " * 180
CONTROL, INFERENCE = "control.sock", "inference.sock"


async def be_engine(folder: Path, delay_s: float) -> None:
    """Answer until killed."""
    tokens = Completion("request-0", [7] * 512, [-0.5] * 512, "stop", [VersionSpan(0, "0.1")])
    turn = SessionTurn(0, [7] * 110, tokens, [{"role": "user"}], {"role": "assistant", "content": TEXT})
    choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 110, "completion_tokens": 512, "total_tokens": 622}
    found = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        return web.json_response({**found, "usage": usage})

    async def opened(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=msgspec.msgpack.encode(True))

    async def closed(request: web.Request) -> web.Response:
        keys = msgspec.msgpack.decode(await request.read())
        return web.Response(body=msgspec.msgpack.encode([[turn]] * len(keys)))

    control = [web.post("/sessions-open", opened), web.post("/sessions-close", closed)]
    for name, routes in ((CONTROL, control), (INFERENCE, [web.post("/{path:.*}", answer)])):
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.UnixSite(runner, str(folder / name), backlog=1024).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


class Engine:
    """The orchestrator's side of it."""

    def __init__(self, folder: Path) -> None:
        self.client = EngineClient(str(folder / CONTROL), is_alive=lambda: True, describe=lambda: "")
        self._address = ControlAddress(f"unix:{folder / INFERENCE}")

    async def open_session(self, opening: SessionOpening, group_id: str) -> ControlAddress:
        """See `RecordsAgents`."""
        await self.client.open_session(opening)
        return self._address

    async def close_session(self, key: str) -> list[SessionTurn]:
        """See `RecordsAgents`."""
        return await self.client.close_session(key)


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of processes and all below them."""
    found = [psutil.Process(pid) for pid in pids]
    found += [below for each in found for below in each.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in found)


async def measure(folder: Path, num_processes: int, num_requests: int, repeats: int) -> list[tuple[float, ...]]:
    """Wall seconds, and CPU milliseconds a request of agents and orchestrator, of each repeat but the first."""
    settings = {"callable": f"{folder / 'agent.py'}:solve", "path": str(folder / "rows.jsonl")}
    config = EnvironmentConfig(name="agent", settings=settings, processes=num_processes, reward_workers=1)
    environment, engine = Apart(load_environment(config), config), Engine(folder)
    gateway = Gateway(request_timeout_s=60, max_requests=1)
    await environment.setup()
    pids = [each.host._process.pid for each in environment.keepers if each.host is not None]

    async def play(seed: int) -> None:
        async with gateway.session(engine, SamplingParams(512), seed, str(seed)) as session:  # type: ignore[arg-type]
            policy: Any = SimpleNamespace(state=None, address=session.address)
            episode = await environment.run(TASK, policy)
        assert (episode.completion, len(session.turns)) == (TEXT, 1)

    found: list[tuple[float, ...]] = []
    with garbage_collection.fewer_collections():
        for _ in range(repeats):
            began, agents, own = time.monotonic(), cpu_s(pids), time.process_time()
            await asyncio.gather(*map(play, range(num_requests)))
            wall, agents, own = time.monotonic() - began, cpu_s(pids) - agents, time.process_time() - own
            found.append((wall, 1e3 * agents / num_requests, 1e3 * own / num_requests))
    await environment.close()
    await gateway.close()
    await engine.client.close()
    return found[1:]


def main() -> int:
    """Measure all numbers of processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds that the engine takes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        uvloop.run(be_engine(options.engine, options.delay))
        return 0
    print(
        "| agents' processes | seconds | agents, CPU ms a request | orchestrator, CPU ms a request |\n|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "agent.py").write_text(AGENT)
        (folder / "rows.jsonl").write_text(json.dumps({"question": "1", "answer": "1"}) + "\n")
        command = [sys.executable, __file__, "--engine", scratch, "--delay", str(options.delay)]
        engine = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert engine.stdout is not None
            engine.stdout.readline()
            for number in options.processes:
                rows = uvloop.run(measure(folder, number, options.requests, options.repeats))
                cells = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in zip(*rows, strict=True)]
                print(f"| {number} | {' | '.join(cells)} |", flush=True)
        finally:
            engine.kill()
            engine.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
