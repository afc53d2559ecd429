"""Tools and group rewards in workers: whatever they do is an answer, in time, and nothing of theirs lives on."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio
import tests.envs.hostile as hostile
import tests.envs.hostile_tools as hostile_tools
import uvloop
from tests.envs.environments import task
from tests.envs.test_guard import has_namespaces
from tests.envs.test_hostile_rewards import LEAVING, mark, marked, none_left  # noqa: F401 (`mark` is a fixture)
from tests.inline_scorer import InlineScorer

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Episode, RewardFailed, RewardTimeout, Score
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.tools.tool_calls import MAX_CONTENT
from slipstream.processes import guard
from slipstream.records import Message, ToolCall

MARGIN_S = 18.0
"""Beyond its deadline: a hung worker's stacks (2 s), killing it, and a machine that does other things. A guard that
does not end its worker is killed after 22 s."""
RAISING = ("exit", "interrupt", "base", "generator_exit", "cancelled", "unspeakable", "surrogate", "long", "group")
DIES = [f"dies {how}" for how in ("exit0", "exit3", "SEGV", "KILL", "HUP")]
DIES += ["forges x", "junk x", "closes x", "guard KILL", "fork_bomb x"]
HANGS = [f"hangs {how}" for how in ("sleep", "loop", "regex", "sympy", "stop", "deaf", "program", "bomb")]
HANGS += ["guard STOP", "awaits ever", "awaits blocked", "awaits stubborn"]

SHARED = pytest.mark.asyncio(loop_scope="module")


def config(**options):
    name = f"{hostile_tools.__file__}:Hostile"
    patient = {"reward_timeout_s": 60.0, "tool_timeout_s": 60.0, "variables": (hostile.MARK,)}
    return EnvironmentConfig(name=name, reward_workers=1, **(patient | options))


def act(mode):
    return ToolCall("act", {"mode": mode})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["inline", "pool"])
async def scorer(request):
    """Both do the same for calls that neither hang nor exit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hostile.MARK, "none")
        if request.param == "inline":
            yield InlineScorer(load_environment(config()))
        else:
            async with ScorerPool(config()) as pool:
                yield pool


@SHARED
@pytest.mark.parametrize(
    ("call", "failure", "said"),
    [
        (ToolCall("add", {"a": 3, "b": 4}), "", "7"),
        (ToolCall("add", {"a": "3"}), "", "4"),
        (ToolCall("whose", {"question": 5}), "", '{"task": "t", "question": "5"}'),
        (ToolCall("wait", {"seconds": 0, "text": "x"}), "", "x"),
        (ToolCall("ad", {"a": 1}), "unknown", "There is no tool 'ad': did you mean 'add'?"),
        (ToolCall("add", {"a": "x"}), "arguments", "The arguments of add do not fit: a: Input should be a valid in"),
        (ToolCall("add", {}), "arguments", "a: Field required"),
        (ToolCall("add", {"a": 1, "c": 2}), "arguments", "c: Extra inputs are not permitted"),
        (ToolCall("whose", {"question": "x", "task": "mine"}), "arguments", "task: Extra inputs"),
        (ToolCall("add", error="no JSON: {a"), "arguments", "The call cannot be read: no JSON: {a"),
        (act("raises stop"), "error", "act raised StopIteration: 1.0"),
        (act("returns nan"), "", "NaN"),
        (act("returns nested"), "", '{"reward": {"reward": 1.0}}'),
        (act("returns many_keys"), "", "[cut: these are the first 32,768 of "),
        (ToolCall("unwritable"), "error", "unwritable raised ValueError: never"),
    ],
)
async def test_what_a_call_gives(scorer, call, failure, said):
    result = await scorer.call_tool(task(), call)
    assert result.failure == failure
    assert said in result.content


@SHARED
async def test_a_long_result_is_cut_and_says_so(scorer):
    result = await scorer.call_tool(task(), ToolCall("much", {"length": 1_000_000}))
    assert result.content.startswith("?éé")
    assert len(result.content) < MAX_CONTENT + 100
    assert result.content.endswith("[cut: these are the first 32,768 of 1,000,001 characters]")


@SHARED
async def test_the_traceback_of_a_tool_is_for_people(scorer):
    assert len((await scorer.call_tool(task(), act("raises long"))).content) < 1100
    assert "in raises" in (await scorer.call_tool(task(), act("raises stop"))).details


@SHARED
async def test_an_episode_is_graded_with_its_messages(scorer):
    messages = (Message("assistant", "a"), Message("user", "b"), Message("assistant", "messages"))
    score = await scorer.score(task(), Episode("messages", num_turns=2, messages=messages))
    assert score == Score(3.0, {"turns": 2.0}, (0.5, 1.5))
    with pytest.raises(RewardFailed, match=r"turn_rewards\[1\] = nan"):
        await scorer.score(task(), Episode("turns that are not finite"))


@SHARED
async def test_a_group_is_graded_together(scorer):
    found = await scorer.score_group(task(), [Episode(text) for text in ("ranks", "b", "three c")])
    assert [score.reward for score in found] == [1.0, 0.0, 2.0]
    assert [score.metrics["place"] for score in found] == [0.0, 1.0, 2.0]
    assert [score.reward for score in await scorer.score_group(task(), [Episode("later")] * 3)] == [0.0, 1.0, 2.0]


@SHARED
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("short", "returned 2 scores for 3 episodes: return a list of 3"),
        ("long", "returned 4 scores for 3"),
        ("one", "returned a float: return a list of 3"),
        ("none", "returned None, a NoneType|raised|returned a"),
        ("text", "returned a str"),
        ("mapping", "returned a dict"),
        ("nan", "not finite"),
        ("nested", "a list: return a number"),
        ("raises long", "raised ValueError: xxx"),
    ],
)
async def test_a_group_of_the_wrong_shape_fails(scorer, mode, said):
    with pytest.raises(RewardFailed, match=said):
        await scorer.score_group(task(), [Episode(mode)] * 3)


@pytest.mark.full
async def test_a_group_that_hangs_or_dies_ends_in_time():
    async with ScorerPool(config(reward_timeout_s=1.0, variables=())) as pool:
        calls = (pool.score_group(task(), [Episode(mode)] * 2) for mode in ("hangs regex", "dies exit3", "later"))
        hung, died, good = await asyncio.gather(*calls, return_exceptions=True)
    assert (type(hung), type(died)) == (RewardTimeout, RewardFailed)
    assert [score.reward for score in good] == [0.0, 1.0]


@pytest.mark.full
async def test_what_tools_raise_and_leave_behind(mark):  # noqa: F811
    asked = [f"raises {what}" for what in RAISING] + ["recursion x", "memory x"]
    async with ScorerPool(config(reward_memory_gib=2.0)) as pool:
        raised = await asyncio.gather(*(pool.call_tool(task(), act(mode)) for mode in asked))
        left = await asyncio.gather(*(pool.call_tool(task(), act(mode)) for mode in ["prints_much x", *LEAVING]))
        assert [(mode, each.failure) for mode, each in zip(asked, raised, strict=True)] == [(m, "error") for m in asked]
        assert {each.content for each in left} == {"0.5"}
        assert pool.num_restarts == 0
        assert len(marked(mark)) > 20
    assert await none_left(mark)


@pytest.mark.full
async def test_tools_that_die(mark):  # noqa: F811
    async with ScorerPool(config(reward_processes=64)) as pool:
        for mode in DIES:
            result, beside = await asyncio.gather(
                pool.call_tool(task(), act(mode)), pool.call_tool(task(), ToolCall("add", {"a": 1}))
            )
            assert (mode, result.failure, beside.content) == (mode, "died", "2"), result
    assert await none_left(mark)
    assert "64 processes" in result.content


@pytest.mark.full
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_tools_that_hang(mark, run):  # noqa: F811
    async def main():
        async with ScorerPool(config(tool_timeout_s=1.0)) as pool:
            for mode in HANGS:
                started = time.monotonic()
                result = await pool.call_tool(task(), act(mode))
                assert (mode, result.failure) == (mode, "timeout")
                assert result.content == "act did not answer within 1 s and was stopped."
                assert time.monotonic() - started < 1.0 + 1.0 + MARGIN_S, mode
                assert (await pool.call_tool(task(), ToolCall("add", {"a": 1}))).content == "2"
        assert await none_left(mark)

    run(main())


async def test_a_hung_tool_delays_no_reward_and_is_no_failure_of_one():
    async with ScorerPool(config(tool_timeout_s=1.5, variables=())) as pool:
        for _ in range(10):  # the machine may delay the reward, the tool may not
            hung = asyncio.create_task(pool.call_tool(task(), ToolCall("hang_once")))
            await asyncio.sleep(0.3)
            assert (await pool.score(task(), "number 3")).reward == 3.0
            was_beside = not hung.done()
            assert (await hung).failure == "timeout"
            if was_beside:
                break
        assert was_beside
        assert pool._rewards.num_restarts == 0


@pytest.mark.full
async def test_many_coroutine_tools_run_at_once():
    """One after the other they would take 100 s."""
    async with ScorerPool(config(variables=())) as pool:
        call = ToolCall("wait", {"seconds": 0.2, "text": "x"})
        await pool.call_tool(task(), call)
        started = time.monotonic()
        found = await asyncio.gather(*(pool.call_tool(task(), call) for _ in range(500)))
        assert time.monotonic() - started < 60
        assert {each.content for each in found} == {"x"}


@pytest.mark.full
async def test_a_coroutine_tool_that_hangs_takes_nobody_along():
    async with ScorerPool(config(tool_timeout_s=1.0, variables=())) as pool:
        calls = [ToolCall("wait", {"seconds": seconds, "text": str(seconds)}) for seconds in (0.2, 60, 0.3)]
        found = await asyncio.gather(*(pool.call_tool(task(), call) for call in calls))
    assert [each.failure for each in found] == ["", "timeout", ""]


@pytest.mark.full
async def test_a_memory_bomb_is_bounded_for_each_process(mark):  # noqa: F811
    async with ScorerPool(config(reward_memory_gib=0.25)) as pool:
        result = await pool.call_tool(task(), act("memory_bomb x"))
        assert result.failure == "error", result
        assert "MemoryError" in result.content
    assert await none_left(mark)


async def test_an_environment_without_tools_has_no_tool_workers(mark):  # noqa: F811
    plain = EnvironmentConfig(name=hostile.__file__, variables=(hostile.MARK,), reward_workers=1)
    async with ScorerPool(plain) as pool:
        assert (await pool.call_tool(task(), ToolCall("add"))).failure == "unknown"
        assert len(marked(mark)) == 2, "the worker and its guard"


async def test_a_fork_bomb_of_a_reward_is_ended(mark):  # noqa: F811
    async with ScorerPool(config(reward_processes=64)) as pool:
        started = time.monotonic()
        with pytest.raises(RewardFailed, match="more than 64 processes"):
            await pool.score(task(), "fork_bomb x")
        assert time.monotonic() - started < 10 + MARGIN_S
        assert (await pool.score(task(), "number 3")).reward == 3.0
    assert await none_left(mark)


# Keys.

SECRET = "s3cr3t-of-the-run"


async def test_the_run_s_keys_cannot_be_read_in_the_environment_or_in_proc(mark, monkeypatch):  # noqa: F811
    """Of this process, which has none in its first environment, and of one that has."""
    if not has_namespaces():
        pytest.skip("the kernel refuses user namespaces")
    monkeypatch.setenv("TEST_API_KEY", SECRET)
    other = subprocess.Popen(["/bin/sleep", "300"], env={"TEST_API_KEY": SECRET})
    try:
        async with ScorerPool(config()) as pool:
            for pid in ("self", str(os.getpid()), str(other.pid), "guard"):
                found = (await pool.score(task(), f"reads {pid}")).metrics
                assert found == {"has_key": 0.0, "denied": float(pid != "self")}, pid
                assert (await pool.call_tool(task(), act(f"reads {pid}"))).content.startswith(
                    '{"reward": 1.0, "has_key": 0.0'
                )
        warnings = []
        async with ScorerPool(config(user_namespace=False), warn=warnings.append) as pool:
            found = (await pool.score(task(), f"reads {other.pid}")).metrics
            assert found == {"has_key": 1.0, "denied": 0.0}, "what the namespace is for"
        assert warnings == [], "it was asked for"
    finally:
        other.kill()
        other.wait()
    assert await none_left(mark)


async def test_where_the_kernel_refuses_the_namespace_keys_are_warned_of(monkeypatch):
    monkeypatch.setenv("TEST_API_KEY", SECRET)
    warnings = []
    script = (
        "import ctypes,os,sys;"
        "os.dup2(os.open('/dev/null', os.O_RDONLY), 0);"
        "sys.path.insert(0, sys.argv[1]);"
        "import guard;"
        "guard._go_apart = lambda *_: os._exit(1);"
        "sys.exit(0 if guard._start(['/bin/true'], 10) == 0 else 1)"
    )
    folder = str(Path(guard.__file__).parent)
    assert subprocess.run([sys.executable, "-c", script, folder], check=False).returncode == 0
    pool = ScorerPool(config(variables=()), warn=warnings.append)
    monkeypatch.setattr(guard, "NAMESPACE", guard.NO_NAMESPACE)
    async with pool:
        assert (await pool.score(task(), "number 3")).reward == 3.0
    assert "TEST_API_KEY" in warnings[0]
