"""Episodes that fail are kept for people to read, with what was said so far; so many of each step."""

import asyncio

import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.envs import Episode, Message
from slipstream.envs.base import RewardFailed, RewardTimeout, ToolResult
from slipstream.orchestrator.failures import Failures, failure_of
from slipstream.records import Rollout, Task, ToolCall
from slipstream.runlog import sample_of
from tests.inline_scorer import InlineScorer

from ..quick_time import event_loop_policy  # noqa: F401 (a fixture)
from .test_episodes import Talks
from .test_orchestrator import SAMPLING, make_runner, say


def twice(x: int) -> int:
    return 2 * x


class Fails(Talks):
    """Fails after its first turn, as the task says."""

    tools = (twice,)

    async def run(self, task, policy):
        reply = await policy.chat(task.prompt)
        if task.id == "error":
            raise KeyError("odd")
        if task.id == "timeout":
            await asyncio.sleep(60)
        result = await policy.call_tool(ToolCall("twice" if task.id != "tool" else "thrice", {"x": 1}))
        reply = await policy.chat([*task.prompt, reply.message, Message("tool", result.content)])
        return Episode(reply.text, num_turns=2)

    async def setup_episode(self, task):
        return None


class Scorer(InlineScorer):
    async def score(self, task, episode):
        if task.id == "reward":
            raise RewardFailed("the reward raised", "Traceback ...")
        if task.id == "late":
            raise RewardTimeout("the reward took too long")
        return await super().score(task, episode)

    async def call_tool(self, task, call):
        return ToolResult("no tool", "unknown") if call.name == "thrice" else ToolResult("2")


async def ended(how):
    kept = []
    environment = Fails()
    engine = ScriptedEngine(say("ab"))
    engine.abort = lambda request: "invalid" if how == "abort" and engine.num_requests == 2 else None
    runner = make_runner(engine, environment, Scorer(environment), run_timeout_s=0.3, on_ended=kept.append)
    task = Task(how, (Message("user", "q"),), "b")
    rollout = await runner.run(task, rollout_id="3.0.1", group_id="3.0", sampling=SAMPLING, seed=1)
    assert kept == [rollout]
    return rollout


@pytest.mark.parametrize(
    ("how", "outcome", "stop", "turns", "error"),
    [
        ("error", "environment_error", "error", ["ab"], "KeyError: 'odd'"),
        ("timeout", "environment_error", "timeout", ["ab"], "did nothing for 0.3 s"),
        ("abort", "engine_error", "error", ["ab"], "was told to fail"),
        ("reward", "reward_error", "answer", ["ab", "2", "ab"], "the reward raised\nTraceback ..."),
        ("late", "reward_timeout", "answer", ["ab", "2", "ab"], "the reward took too long"),
        ("tool", "done", "answer", ["ab", "no tool", "ab"], ""),
    ],
)
async def test_what_is_kept_of_an_episode_that_failed(how, outcome, stop, turns, error):
    rollout = await ended(how)
    sample = sample_of(rollout, 3, "0.3")
    assert (sample["task"], sample["outcome"], sample["stop"]) == (how, outcome, stop)
    assert [turn["content"] for turn in sample["turns"]] == turns
    assert error in sample.get("error", "")
    assert failure_of(rollout) == ("tools" if how == "tool" else "failed")


async def test_an_episode_without_a_failure_is_none():
    assert failure_of(await ended("well")) is None


def test_so_many_are_kept_of_each_step_and_kind_and_evaluation():
    kept, version = [], 7
    failures = Failures(
        2, 3, lambda rollout, step, held_out: kept.append((rollout.id, step, held_out)), lambda: version
    )

    def rollout(name, outcome="environment_error", **metrics):
        return Rollout(name, "t", "g", [], 0.0, outcome, metrics)

    for number in range(4):
        failures.ended(rollout(f"3.0.{number}"))
        failures.ended(rollout(f"3.1.{number}", "done", tool_failures=1.0))
        failures.ended(rollout(f"3.2.{number}", "done", tool_failures=0.0))
        failures.ended(rollout(f"eval.{number}"))
    failures.ended(rollout("4.0.0", "reward_timeout"))
    version = 8
    failures.ended(rollout("eval.0", "engine_error"))
    assert kept == [
        *(("3.0.0", 3, False), ("3.1.0", 3, False), ("eval.0", 7, True)),
        *(("3.0.1", 3, False), ("3.1.1", 3, False), ("eval.1", 7, True)),
        ("eval.2", 7, True),
        *(("4.0.0", 4, False), ("eval.0", 8, True)),
    ]
