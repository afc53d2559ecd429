"""Episodes from their setup to their close, against a scripted engine: how they end, and what is kept of them."""

import asyncio

import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.envs import Environment, Episode, Message, Score, Task
from slipstream.envs.lifetime import in_use
from slipstream.errors import EnvironmentFault
from slipstream.records import Version

from ..quick_time import event_loop_policy  # noqa: F401 (a fixture)
from .test_orchestrator import SAMPLING, make_batcher, make_runner, say

TASK = Task("t", (Message("user", "q"),), "b")


class Talks(Environment):
    """Two turns; what happens between them is the test's."""

    max_turns = 2
    between = None
    turn_rewards = ()

    def __init__(self, seed=0):
        super().__init__(seed)
        self.closed = []

    def tasks(self, split, num_tasks):
        return [TASK]

    async def setup_episode(self, task):
        return {"of": task.id}

    async def close_episode(self, task, state):
        self.closed.append(state)

    async def run(self, task, policy):
        assert policy.state == {"of": "t"}
        reply = await policy.chat(task.prompt)
        if self.between is not None:
            await self.between()
        reply = await policy.chat([*task.prompt, reply.message, Message("user", "more")])
        return Episode(reply.text, num_turns=2)

    def score(self, task, completion):
        return Score(float(len(completion)), {}, self.turn_rewards)


def runner_of(environment, text="ab", **options):
    return make_runner(ScriptedEngine(say(text)), environment, request_timeout_s=5.0, run_timeout_s=0.3, **options)


def attempt(runner):
    return runner.run(TASK, rollout_id="r", group_id="g", sampling=SAMPLING, seed=1)


async def test_an_episode_is_set_up_played_and_closed():
    environment = Talks()
    rollout = await attempt(runner_of(environment))
    assert (rollout.outcome, rollout.stop, rollout.num_turns, rollout.reward) == ("done", "answer", 2, 2.0)
    assert [(span.sequence, span.end - span.start) for span in rollout.turn_spans] == [(0, 3), (1, 3)]
    assert environment.closed == [{"of": "t"}]


async def test_a_context_that_is_full_ends_an_episode_as_it_stands():
    rollout = await attempt(runner_of(Talks(), context_length=6))  # q, ab: the next prompt has 7 tokens
    assert (rollout.outcome, rollout.stop, rollout.completion) == ("truncated", "context_full", "ab")
    assert (rollout.reward, rollout.num_turns, rollout.num_sampled) == (2.0, 1, 3)


async def test_turn_rewards_add_up_and_must_be_one_for_each_turn():
    environment = Talks()
    environment.turn_rewards = (0.5, 0.25)
    rollout = await attempt(runner_of(environment))
    assert (rollout.reward, rollout.turn_rewards) == (2.75, [0.5, 0.25])
    environment.turn_rewards = (0.5,)
    rollout = await attempt(runner_of(environment))
    assert (rollout.outcome, rollout.stop) == ("reward_error", "answer")
    assert "gave 1 turn rewards for an episode of 2 turns" in rollout.error


async def test_a_control_token_in_a_message_of_the_environment_is_said_once():
    warnings = []
    runner = runner_of(Talks(), warn=warnings.append, control_texts=frozenset({"or", "ab"}))
    rollouts = [await attempt(runner) for _ in range(2)]
    assert [rollout.completion for rollout in rollouts] == ["ab", "ab"]  # the policy's own text is its own
    assert len(warnings) == 1
    assert warnings[0].startswith("a user message of environment Talks holds or as text")


async def test_groups_are_graded_together_and_who_fails_is_left_out():
    class Ranked(Talks):
        scores_groups = True

        async def between(self):
            self.num_begun = getattr(self, "num_begun", 0) + 1
            if self.num_begun == 2:
                raise ValueError("the second one fails")

        def score_group(self, task, episodes):
            return [Score(float(len(episodes)), {"place": float(i)}) for i in range(len(episodes))]

    batcher = make_batcher(None, runner=runner_of(Ranked()), group_size=3, max_reward_failures=0.5)
    batch = await batcher.make(0, Version(0, 0), [TASK])
    assert [(r.reward, r.metrics["place"]) for r in batch.rollouts] == [(2.0, 0.0), (2.0, 1.0)]
    assert batch.dropped == {"environment_error": 1}
    alone = await attempt(runner_of(Ranked()))  # as in an evaluation
    assert alone.reward == 1.0


async def test_an_episode_that_grades_itself_does_not_keep_its_group_waiting():
    class Mixed(Talks):
        scores_groups = True
        num_begun = 0

        async def run(self, task, policy):
            self.num_begun += 1
            reward = 3.0 if self.num_begun == 2 else None
            return Episode((await policy.chat(task.prompt)).text, reward=reward)

        def score_group(self, task, episodes):
            return [Score(float(len(episodes))) for _ in episodes]

    batcher = make_batcher(None, runner=runner_of(Mixed()), group_size=3, max_reward_failures=0.0)
    batch = await asyncio.wait_for(batcher.make(0, Version(0, 0), [TASK]), 10.0)
    assert [rollout.reward for rollout in batch.rollouts] == [2.0, 3.0, 2.0]


async def test_turn_rewards_of_the_episode_itself_must_be_finite_too():
    class Infinite(Talks):
        async def run(self, task, policy):
            return Episode((await policy.chat(task.prompt)).text, turn_rewards=(float("inf"),))

    rollout = await attempt(runner_of(Infinite()))
    assert (rollout.outcome, rollout.turn_rewards) == ("reward_error", [])
    assert "turn_rewards[0] = inf, which is not finite" in rollout.error


async def awaits_what_it_cancelled(*_):
    background = asyncio.create_task(asyncio.sleep(60))
    background.cancel()
    await background


async def test_hooks_that_await_a_task_that_they_cancelled_end_nothing_else():
    warnings = []

    class Careless(Talks):
        setup = close = close_episode = awaits_what_it_cancelled

    rollout = await attempt(runner_of(Careless(), warn=warnings.append))
    assert (rollout.outcome, rollout.reward) == ("done", 2.0)
    with pytest.raises(EnvironmentFault, match=r"setup\(\) of Careless raised CancelledError"):
        async with in_use(Careless(), 5.0, warnings.append):
            raise AssertionError
    assert [text.partition(" raised")[0].partition(" failed")[0] for text in warnings] == [
        "close_episode() of environment Careless",
        "close() of Careless",
    ]


async def test_a_timeout_that_close_episode_raises_is_not_taken_for_its_deadline():
    class Refused(Talks):
        async def close_episode(self, task, state):
            raise TimeoutError("the server")

    warnings = []
    assert (await attempt(runner_of(Refused(), warn=warnings.append))).outcome == "done"
    assert warnings == ["close_episode() of environment Refused failed: TimeoutError: the server"]
