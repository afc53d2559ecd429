"""The environment `agent` without an engine: its settings, a command, and what of a session counts as delivered."""

import asyncio
import sys

import pytest

from slipstream.config.environment import EnvironmentConfig
from slipstream.envs.base import Address, Episode
from slipstream.envs.hosted import command
from slipstream.envs.hosted.apart import placement
from slipstream.envs.hosted.command import run_command
from slipstream.envs.hosted.keeper import EnvironmentRaised
from slipstream.envs.registry import load_environment, played
from slipstream.errors import ConfigError, EnvironmentFault
from slipstream.orchestrator.gateway import AgentSession, _Written
from slipstream.records import Completion, Message, SessionTurn, Task

AGENT = """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {n}", "answer": "4"} for n in range(num_tasks)]

def solve(task, policy):
    return {"key": policy.api_key}

async def later(task, policy):
    return 4

def by_result(task, result):
    return float(result == task.answer)

def by_episode(task, result, episode):
    return {"reward": len(episode.messages), "rows": len(episode.conversations)}

raise_if_imported = 1 / ONE
"""
TASK = Task("1", (Message("user", "2+2?"),), "4")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(AGENT.replace("ONE", "1"))
    return path


def environment(file, **settings):
    settings = {name: value.replace("FILE", str(file)) for name, value in settings.items()}
    return load_environment(EnvironmentConfig(name="agent", settings=settings))


class Policy:
    state = None
    address = Address("http://127.0.0.1:1/v1", "sk-1", "policy")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tasks": "FILE:tasks"}, "need command or callable"),
        ({"tasks": "FILE:tasks", "callable": "FILE:solve", "command": "true"}, "need command or callable"),
        ({"tasks": "FILE:tasks", "callable": "FILE:sovle"}, "no function 'sovle'"),
        ({"tasks": "FILE:tasks", "callable": "agent:solve"}, "path/to/file.py:function"),
        ({"tasks": "FILE:tasks", "callable": "missing.py:solve"}, "cannot be read"),
        ({"tasks": "FILE:tasks", "command": ""}, "is no command"),
        ({"tasks": "FILE:tasks", "callable": "FILE:solve", "path": "rows.jsonl"}, "path has no effect"),
        ({"callable": "FILE:solve"}, "path is missing"),
    ],
)
def test_settings_that_are_no_agent(file, settings, said):
    with pytest.raises(ConfigError, match=said):
        environment(file, **settings)


async def test_a_callable_is_read_and_not_run_before_the_setup(file):
    file.write_text(AGENT.replace("ONE", "0"))
    named = {"callable": f"{file}:solve", "path": str(file.with_suffix(".jsonl")), "reward": "exact"}
    found = load_environment(EnvironmentConfig(name="agent", settings=named))
    assert placement(found)[0] == 8, "its code may block, and takes time"
    with pytest.raises(ConfigError, match="division by zero"):
        await found.setup()
    apart = played(found, EnvironmentConfig(name="agent", settings=named, processes=2))
    with pytest.raises(EnvironmentFault, match="division by zero"):
        await apart.setup()
    await apart.close()


async def test_a_generator_is_no_agent(file):
    file.write_text("def solve(task, address):\n    yield 'never'\n")
    with pytest.raises(ConfigError, match="callable solve is a generator: return the result"):
        await environment(file, callable="FILE:solve", path=str(file.with_suffix(".jsonl")), reward="exact").setup()


def test_results_and_rewards(file):
    plain = environment(file, tasks="FILE:tasks", callable="FILE:solve", reward="FILE:by_result")
    assert [task.prompt[0].content for task in plain.tasks("eval", 2)] == ["eval 0", "eval 1"]
    assert asyncio.run(plain.run(TASK, Policy())).completion == '{"key": "sk-1"}'
    later = environment(file, tasks="FILE:tasks", callable="FILE:later", reward="exact")
    result = asyncio.run(later.run(TASK, Policy()))
    assert later.score_episode(TASK, result).reward == 1
    assert plain.score_episode(TASK, Episode("5")).reward == 0
    whole = environment(file, tasks="FILE:tasks", callable="FILE:later", reward="FILE:by_episode")
    message = Message("assistant", "4")
    score = whole.score_episode(TASK, Episode("4", messages=(message,), conversations=((message,), (message,))))
    assert (score.reward, score.metrics) == (1, {"rows": 2})


PRINTS = "import os,sys; t=sys.stdin.read(); assert t == open(os.environ['SLIPSTREAM_TASK']).read(); "


def test_a_commands_result_is_its_last_line(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    program = PRINTS + "print('a'); print(t, 'MY_TOKEN' in os.environ, os.environ['A']); print('log', file=sys.stderr)"
    found = asyncio.run(run_command([sys.executable, "-c", program], "task", {"A": "b"}))
    assert found == "task False b"


@pytest.mark.parametrize(
    ("program", "said"),
    [("raise SystemExit('no key')", "exit code 1\n    no key"), ("import os; os.abort()", "SIGABRT")],
)
def test_a_command_that_fails_says_how(program, said):
    with pytest.raises(EnvironmentRaised, match=said):
        asyncio.run(run_command([sys.executable, "-c", program], "", {}))
    with pytest.raises(EnvironmentRaised, match="cannot be started"):
        asyncio.run(run_command(["no-such-command"], "", {}))


def test_a_command_that_fills_the_disk_is_killed(monkeypatch):
    monkeypatch.setattr(command, "_MOST_OUTPUT", 1 << 20)
    program = "import sys,time; sys.stdout.write('a' * 2_000_000); sys.stdout.flush(); time.sleep(100)"
    with pytest.raises(EnvironmentRaised, match="has printed more than 1 MiB: print the result alone"):
        asyncio.run(asyncio.wait_for(run_command([sys.executable, "-c", program], "", {}), 20))


def test_a_command_is_killed_with_its_call(tmp_path):
    mark = tmp_path / "mark"
    program = f"import subprocess,time; open({str(mark)!r},'w').close(); subprocess.run(['sleep', '100'])"

    async def cancelled():
        task = asyncio.create_task(run_command([sys.executable, "-c", program], "", {}))
        while not mark.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 20))


def turn(request, continues=-1):
    return SessionTurn(request, [1], Completion("", [2], [0.0], "stop"), continues=continues)


def test_what_was_continued_was_delivered():
    session = AgentSession(Policy.address, "", 9, None)
    session.delivered = {2, 3}
    session.take([turn(0), turn(1), turn(2, continues=0), turn(3, continues=2)])
    assert [each.request for each in session.turns] == [0, 2, 3]
    assert [each.continues for each in session.turns] == [-1, 0, 1]
    assert session.num_undelivered == 1


@pytest.mark.parametrize(
    ("chunks", "length", "is_whole"),
    [
        ([b"abc", b"de"], 5, [False, True]),
        ([b'data: {"a":1}\n\n', b"data: [DO", b"NE]\n\n"], None, [False, False, True]),
        ([b"event: message_stop\nda", b"ta: {}\n", b"\n"], None, [False, False, True]),
        ([b'data: {"a": "[DONE]"}\n\n'], None, [False]),
    ],
)
def test_an_answer_is_whole_with_its_last_byte(chunks, length, is_whole):
    written = _Written(length)
    assert [written.is_whole_with(chunk) for chunk in chunks] == is_whole
