"""Tools of a real server of the Model Context Protocol, listed in this process and called in workers."""

import asyncio
import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.single_turn import make_tasks
from slipstream.envs.tools import mcp_servers
from slipstream.errors import ConfigError
from slipstream.records import ToolCall

SERVER = f"mcp:{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


def config(tmp_path, *tools, **changes):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i} apples?", "answer": "{2 * i}"}}\n' for i in range(40)))
    settings = {"path": str(rows)}
    return EnvironmentConfig(name="rows", settings=settings, tools=tools, **changes)


def test_any_environment_can_be_given_a_servers_tools(tmp_path):
    environment = load_environment(config(tmp_path, SERVER))
    (task, *_) = make_tasks(environment, "train", 10)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.prompt[0].tools}
    assert list(schemas) == ["price", "variable"]
    assert schemas["price"]["properties"]["count"]["type"] == "integer"
    assert environment.max_turns == 4


@pytest.mark.full
async def test_a_server_is_called_in_workers_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    given = config(tmp_path, SERVER)
    (task, *_) = make_tasks(load_environment(given), "train", 10)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with ScorerPool(given) as pool:

        async def call(tool, **arguments):
            found = await pool.call_tool(task, ToolCall(tool, arguments))
            return found.failure, found.content

        assert await call("price", article="apple", count=3) == ("", "6")
        assert await call("price", article="pear") == ("", "3")
        failure, content = await call("price", article="plum")
        assert (failure, bool(content)) == ("error", True)
        assert (await call("prize", article="pear"))[0] == "unknown"
        assert await call("variable", name="SECRET_TOKEN") == ("", "")
        assert await call("variable", name="PATH") != ("", "")
        failure, _ = await call("price", article="crash")
        assert failure in ("error", "died")
        assert await call("price", article="pear") == ("", "3"), "the server is started again"
        assert (await pool.score(task, task.answer)).reward == 1.0
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            left += [child] if child.pid not in before and "mcp_server" in " ".join(child.cmdline()) else []
    assert left == []


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("mcp:no-such-program", "mcp:no-such-program cannot be asked for its tools"),
        (f"mcp:{sys.executable} -c pass", r"cannot be asked for its tools \(\w+: Connection closed\)"),
        ("mcp:", "mcp: names no command: write mcp:COMMAND"),
        ("calc", r"environment.tools\[0\] = 'calc' is not a tool: use path/to/file.py:function, or mcp:COMMAND"),
        ("mcp:'", "cannot be asked for its tools"),
    ],
)
def test_what_is_no_server_is_said(tmp_path, tool, message):
    with pytest.raises(ConfigError, match=message):
        load_environment(config(tmp_path, tool))


def test_a_server_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_servers, "START_S", 0.5)
    with pytest.raises(ConfigError, match=r"did not say which tools it has within 0\.5 s"):
        load_environment(config(tmp_path, f"{SERVER} silent"))


def test_functions_of_a_file_and_the_most_turns(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text("def double(x: int) -> int:\n    'Twice x.'\n    return 2 * x\n")
    environment = load_environment(config(tmp_path, f"{file}:double", max_turns=7))
    assert environment.max_turns == 7
    assert environment.tools[0](4) == 8
    with pytest.raises(ConfigError, match="has no function 'doubel': did you mean 'double'"):
        load_environment(config(tmp_path, f"{file}:doubel"))
    with pytest.raises(ConfigError, match=r"environment\.max_turns = 7 has no effect: rows has one turn and no tools"):
        load_environment(config(tmp_path, max_turns=7))


class ClosedResourceError(Exception):
    """As the SDK's streams raise it."""


async def test_a_call_that_hears_late_of_a_servers_end_does_not_end_the_next_one(monkeypatch):
    """Which may be about to start, so that nobody would be told any more that it has."""
    calls, may_start, num_started = [], asyncio.Event(), 0

    class Session:
        def call_tool(self, name, arguments):
            calls.append(asyncio.get_running_loop().create_future())
            return calls[-1]

    async def run(self, ready):
        nonlocal num_started
        num_started += 1
        if num_started > 1:
            await may_start.wait()
        ready.set_result(Session())
        await asyncio.Event().wait()

    async def until(reached):
        async with asyncio.timeout(60):
            while not reached():
                await asyncio.sleep(0)

    monkeypatch.setattr(mcp_servers._Server, "_run", run)
    call = mcp_servers._Server([], {}).tool({"function": {"name": "say"}})
    early, late = asyncio.create_task(call()), asyncio.create_task(call())
    await until(lambda: len(calls) == 2)
    calls[0].set_exception(ClosedResourceError())
    with pytest.raises(ClosedResourceError):
        await early
    after = asyncio.create_task(call())
    await until(lambda: num_started == 2)
    calls[1].set_exception(ClosedResourceError())
    with pytest.raises(ClosedResourceError):
        await late
    may_start.set()
    await until(lambda: len(calls) == 3)
    calls[2].set_result(SimpleNamespace(model_dump=lambda **_: {"content": [{"type": "text", "text": "said"}]}))
    assert (await after).content == "said"
    again = asyncio.create_task(call())
    await until(lambda: len(calls) == 4)
    again.cancel()
    assert num_started == 2, "the second session serves on"
