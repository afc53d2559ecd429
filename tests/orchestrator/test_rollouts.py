"""What one rollout asks of the engine, what is written into it, and what is said of rollouts that failed."""

import asyncio
import itertools
import random
import time
from collections import deque

import msgspec
import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.envs import Environment, Episode, Message, Score, Task
from slipstream.envs.base import Limits
from slipstream.envs.hosted.keeper import EnvironmentRaised
from slipstream.errors import EngineError, EnvironmentFault
from slipstream.orchestrator import rollouts as module
from slipstream.orchestrator.failure_rate import RECENT_BATCHES, check_failures
from slipstream.orchestrator.rollouts import seed_of
from slipstream.records import Rollout, ToolCall

from ..quick_time import event_loop_policy  # noqa: F401 (a fixture)
from .test_orchestrator import END, SAMPLING, make_runner, say

TASK = Task("t", (Message("system", "s"), Message("user", "q")), "b", {"data_source": "sums"})


def twice(x: int) -> int:
    """Doubles."""
    return 2 * x


class Play(Environment):
    """What each test has it play, by default one turn; an answer is worth its length."""

    max_turns = 2
    limit = Limits()
    turn_rewards = ()

    async def play(self, task, policy):
        return Episode((await policy.chat(task.prompt)).text)

    def tasks(self, split, num_tasks):
        return [TASK]

    async def run(self, task, policy):
        return await self.play(task, policy)

    def limits(self, task):
        return self.limit

    def score(self, task, completion):
        return Score(float(len(completion)), {"graded": 1.0}, self.turn_rewards)


def environment_of(play=None, **fields):
    made = type("Play", (Play,), fields)()
    if play is not None:
        made.play = play
    return made


B = say("b")


def runner_of(environment, script=B, **options):
    engine = ScriptedEngine(script)
    requests = []
    engine.on_request = requests.append
    return make_runner(engine, environment, **({"request_timeout_s": 7.0, "run_timeout_s": 5.0} | options)), requests


async def play(runner, task=TASK, **options):
    how = {"rollout_id": "3.0.1", "group_id": "3.0", "sampling": SAMPLING, "seed": 5}
    return await runner.run(task, **(how | options))


async def two_turns(task, policy):
    reply = await policy.chat(task.prompt)
    reply = await policy.chat([*task.prompt, reply.message, Message("user", "more")])
    return Episode(reply.text, num_turns=2)


async def test_what_the_engine_is_asked_for_each_turn():
    runner, requests = runner_of(environment_of(two_turns))
    began = time.monotonic()
    rollout = await play(runner)
    assert [request.id for request in requests] == ["3.0.1.0-0", "3.0.1.1-1"]
    assert [request.seed for request in requests] == [5, seed_of(5, 1)]
    for request in requests:
        assert (request.group_id, request.timeout_s, request.sampling) == ("3.0", 7.0, SAMPLING)
        assert (request.is_urgent, request.tools, request.images) == (False, (), ())
    assert 0 < rollout.seconds <= time.monotonic() - began
    assert (rollout.id, rollout.task_id, rollout.group_id) == ("3.0.1", "t", "3.0")
    assert (rollout.prompt, rollout.answer, rollout.source) == ("q", "b", "sums")
    assert (rollout.completion, rollout.metrics) == ("b", {"graded": 1.0})
    await play(runner, is_urgent=True)
    assert [request.is_urgent for request in requests] == [False, False, True, True]


@pytest.mark.parametrize(("asked", "most"), [(None, 4), (2, 2), (4, 4), (9, 4), (1, 1), (0, 1)])
async def test_a_turn_may_be_shorter_than_the_run_has_it_and_has_one_token(asked, most):
    async def one(task, policy):
        return Episode((await policy.chat(task.prompt, max_tokens=asked)).text)

    runner, requests = runner_of(environment_of(one), say("bbbbbbbb"))
    rollout = await play(runner)
    assert [request.sampling for request in requests] == [msgspec.structs.replace(SAMPLING, max_tokens=most)]
    assert (rollout.outcome, rollout.stop, rollout.completion) == ("truncated", "length", "b" * most)


@pytest.mark.parametrize(("limit", "most"), [(Limits(max_tokens=3), 3), (Limits(max_tokens=9), 4), (Limits(), 4)])
async def test_a_task_may_limit_its_turns(limit, most):
    runner, requests = runner_of(environment_of(limit=limit))
    await play(runner)
    assert [request.sampling.max_tokens for request in requests] == [most]


def test_a_task_may_have_a_smaller_group():
    for limit, size in ((Limits(group_size=3), 3), (Limits(group_size=9), 8), (Limits(), 8)):
        assert runner_of(environment_of(limit=limit))[0].group_size(TASK, 8) == size


async def fails_at_once(task, policy):
    raise ValueError("before the first turn")


async def test_calls_of_tools_are_counted_where_there_are_any_also_of_an_episode_that_fails():
    async def calls(task, policy):
        reply = await policy.chat(task.prompt)
        for name in ("twice", "thrice"):
            await policy.call_tool(ToolCall(name, {"x": 1}))
        if task.id == "fails":
            raise ValueError("afterwards")
        return Episode(reply.text)

    runner, _ = runner_of(environment_of(calls, tools=(twice,)))
    for task, outcome in ((TASK, "done"), (msgspec.structs.replace(TASK, id="fails"), "environment_error")):
        rollout = await play(runner, task)
        assert rollout.outcome == outcome
        found = {name: rollout.metrics[name] for name in ("tool_calls", "tool_failures")}
        assert found == {"tool_calls": 2.0, "tool_failures": 1.0}
        assert (rollout.completion, rollout.num_turns, len(rollout.turn_spans)) == ("b", 1, 1)
    rollout = await play(runner_of(environment_of(fails_at_once, tools=(twice,)))[0])
    assert rollout.metrics == {"tool_calls": 0.0, "tool_failures": 0.0}
    assert (rollout.num_turns, rollout.turns, rollout.completion, rollout.stop) == (1, [], "", "error")
    assert (rollout.reward, rollout.turn_rewards, rollout.sequences) == (0.0, [], [])
    assert (await play(runner_of(environment_of(fails_at_once))[0])).metrics == {}


async def test_a_rollout_keeps_the_first_traceback_of_a_tool_for_people():
    async def calls(task, policy):
        reply = await policy.chat(task.prompt)
        for word in ("none", "first", "second"):
            await policy.call_tool(ToolCall("raises", {"word": word}))
        return Episode(reply.text)

    def raises(word: str) -> str:
        if word == "none":
            return word
        raise ValueError(word)

    rollout = await play(runner_of(environment_of(calls, tools=(raises,)))[0])
    assert rollout.outcome == "done"
    assert rollout.error.startswith("tool raises:\nTraceback")
    assert rollout.error.endswith("ValueError: first")


@pytest.mark.parametrize(
    ("made", "stop", "outcome"),
    [
        ({}, "answer", "done"),
        ({"stop": "turn_limit"}, "turn_limit", "done"),
        ({"stop": "tool_limit", "outcome": "truncated"}, "tool_limit", "truncated"),
    ],
)
@pytest.mark.parametrize("is_cut", [False, True])
async def test_why_an_episode_ended(made, stop, outcome, is_cut):
    graded = []

    async def one(task, policy):
        return Episode((await policy.chat(task.prompt)).text, **made)

    def score_episode(self, task, episode):
        graded.append(episode)
        return Score(1.0)

    environment = environment_of(one, score_episode=score_episode)
    rollout = await play(runner_of(environment, say("bbbbbbbb" if is_cut else "b"))[0])
    wanted = "length" if is_cut and stop == "answer" else stop
    assert (rollout.stop, rollout.outcome) == (wanted, "truncated" if is_cut else outcome)
    (episode,) = graded
    assert episode.stop == wanted, "as the reward sees it"
    assert [message.content for message in episode.messages] == ["bbbb" if is_cut else "b"]


async def test_messages_and_metrics_of_the_episode_itself_are_kept():
    own = (Message("assistant", "told otherwise"),)
    graded = []

    async def one(task, policy):
        await policy.chat(task.prompt)
        return Episode("x", metrics={"steps": 3.0}, messages=own)

    def score_episode(self, task, episode):
        graded.append((episode.messages, episode.stop))
        return Score(1.0, {"graded": 2.0})

    environment = environment_of(one, score_episode=score_episode)
    for text in ("b", "bbbbbbbb"):
        rollout = await play(runner_of(environment, say(text))[0])
        assert (rollout.metrics, rollout.turns) == ({"steps": 3.0, "graded": 2.0}, [])
    assert graded == [(own, "answer"), (own, "length")]


async def test_an_episode_that_grades_itself_is_graded_by_nobody_else():
    async def one(task, policy):
        reply = await policy.chat(task.prompt)
        return Episode(reply.text, reward=0.25, metrics={"own": 1.0}, turn_rewards=(0.5,))

    rollout = await play(runner_of(environment_of(one))[0])
    assert (rollout.reward, rollout.turn_rewards, rollout.metrics) == (0.75, [0.5], {"own": 1.0})


async def test_turn_rewards_of_the_reward_come_before_those_of_the_episode():
    async def one(task, policy):
        return Episode((await policy.chat(task.prompt)).text, turn_rewards=(0.5,))

    rollout = await play(runner_of(environment_of(one))[0])
    assert (rollout.reward, rollout.turn_rewards) == (1.5, [0.5])
    rollout = await play(runner_of(environment_of(one, turn_rewards=(2.0,)))[0])
    assert (rollout.reward, rollout.turn_rewards) == (3.0, [2.0])


async def test_an_error_is_told_with_the_frames_next_to_it():
    async def deep(task, policy, depth=0):
        if depth == 50:
            raise ValueError("far down")
        await deep(task, policy, depth + 1)

    rollout = await play(runner_of(environment_of(deep))[0])
    assert 'raise ValueError("far down")\nValueError: far down' in rollout.error
    assert 2 < rollout.error.count(", in deep\n") < 10
    assert module.__file__ not in rollout.error


async def test_a_late_environment_says_where_its_process_hung():
    async def never(task, policy):
        await asyncio.sleep(60)

    for hung in ("", " in f, line 3"):
        rollout = await play(runner_of(environment_of(never, hung=hung), run_timeout_s=0.05)[0])
        assert rollout.error.endswith(f"not counted; its process hung:{hung}" if hung else "not counted")
        assert rollout.stop == "timeout"


async def test_an_environment_that_another_one_holds_up_is_not_late():
    async def slow(task, policy):
        await asyncio.sleep(0.2)
        return Episode((await policy.chat(task.prompt)).text)

    rollout = await play(runner_of(environment_of(slow, is_held_up=True), run_timeout_s=0.05)[0])
    assert rollout.outcome == "done"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EnvironmentRaised("its process ended"), "its process ended"),
        (ValueError("odd"), "ValueError: odd"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
async def test_episodes_that_cannot_be_closed_are_told_of_once(error, says):
    async def close_episode(self, task, state):
        raise error

    warnings = []
    runner, _ = runner_of(environment_of(close_episode=close_episode), warn=warnings.append)
    for _ in range(3):
        assert (await play(runner)).outcome == "done"
    assert warnings == [f"close_episode() of environment Play failed: {says}"]


def rollouts_of(*outcomes):
    return [Rollout(f"{n}", "t", f"{n // 4}", [], 0.0, each, error=f"error {n}") for n, each in enumerate(outcomes)]


def batches(rate, seed, num_groups=16):
    """Rollouts of groups of four that fail together at a rate."""
    draw = random.Random(seed)
    while True:
        yield rollouts_of(*(o for _ in range(num_groups) for o in [["done", "reward_error"][draw.random() < rate]] * 4))


@pytest.mark.parametrize("num_groups", [2, 16, 128])
def test_a_rate_at_the_limit_ends_no_run_and_one_far_beyond_does(num_groups):
    for seed in range(3):
        recent = deque(maxlen=RECENT_BATCHES)
        for rollouts in itertools.islice(batches(0.1, seed, num_groups), 150):
            if any(each.outcome == "done" for each in rollouts):
                check_failures(rollouts, "step 3", 0.1, recent)
        recent.clear()
        far_beyond = itertools.islice(batches(0.7, seed, num_groups), RECENT_BATCHES)
        with pytest.raises(EnvironmentFault, match=r"environment\.max_reward_failures"):
            _ = [check_failures(rollouts, "step 3", 0.1, recent) for rollouts in far_beyond]


def test_a_batch_that_fails_does_not_hide_behind_those_before_it():
    recent = deque(maxlen=RECENT_BATCHES)
    for _ in range(RECENT_BATCHES):
        check_failures(rollouts_of(*["done"] * 64), "step 3", 0.1, recent)
    with pytest.raises(EnvironmentFault, match=r"^64 of 64 rollouts of step 4"):
        check_failures(rollouts_of(*["reward_error"] * 64), "step 4", 0.1, recent)


def test_where_none_may_fail_one_is_too_many():
    check_failures(rollouts_of("reward_error", "reward_error"), "step 3", 1.0)
    check_failures(rollouts_of("done", "truncated"), "step 3", 0.0)
    check_failures(rollouts_of("done"), "step 3", 0.0)
    failing = rollouts_of("done", "engine_error", "reward_error", "done")
    says = r"2 of 4 rollouts of step 3 failed, more than chance makes of environment\.max_reward_failures = 0; "
    with pytest.raises(EnvironmentFault, match=rf"^{says}the first \(engine_error\): error 1$"):
        check_failures(failing, "step 3", 0.0)  # half of them are not most
    mostly = rollouts_of("reward_error", "engine_error", "engine_error", "done")
    with pytest.raises(EngineError, match=r"^2 of 4 .* failed in the engine, .* \(engine_error\): error 1$"):
        check_failures(mostly, "step 3", 0.0)


async def test_a_turn_that_the_context_cuts_says_so_and_not_that_its_limit_did():
    """The engine gives two of four tokens; a turn that meets both at once met its limit."""
    for context_length, asked, stop in ((4, None, "context_full"), (4, 2, "length"), (9, None, "length")):

        async def one(task, policy, asked=asked):
            return Episode((await policy.chat(task.prompt, max_tokens=asked)).text)

        runner, _ = runner_of(environment_of(one), lambda prompt, seed: [ord("b")] * 2, context_length=context_length)
        rollout = await play(runner)
        assert (rollout.outcome, rollout.stop) == ("truncated", stop)


async def test_a_full_conversation_is_graded_by_its_own_last_turn_and_not_by_a_sub_agents():
    async def with_agent(task, policy):
        reply = await policy.chat(task.prompt)
        side = await policy.chat([Message("user", "x")])
        assert side.text != reply.text
        await policy.chat([*task.prompt, reply.message, Message("user", "much too long")])

    script = lambda prompt, seed: [*map(ord, "ab" if prompt[-1] == ord("q") else "c"), END]  # noqa: E731
    rollout = await play(runner_of(environment_of(with_agent), script, context_length=8)[0])
    assert (rollout.completion, rollout.stop) == ("ab", "context_full")
    assert [(message.role, message.content) for message in rollout.turns] == [("assistant", "ab")]


async def test_messages_of_another_conversation_than_the_tasks_are_kept_whole():
    async def with_agent(task, policy):
        await policy.chat(task.prompt)
        reply = await policy.chat([Message("user", "x"), Message("user", "y"), Message("user", "z")])
        return Episode(reply.text, num_turns=2)

    rollout = await play(runner_of(environment_of(with_agent))[0])
    assert [message.content for message in rollout.turns] == ["x", "y", "z", "b"]
