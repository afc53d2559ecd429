"""`slipstream env test` of environments with several turns: gold conversations and junk are played and graded."""

import asyncio

import pytest
from msgspec.structs import replace
from tests.inline_scorer import InlineScorer

from slipstream.envs import Environment, Episode, Message, Score, SingleTurn, Task, ToolCall
from slipstream.envs.check import check_environment
from slipstream.envs.scoring.rehearsal import Rehearsal


def colour_of(name: str, task: Task) -> str:
    "Looks up a colour."
    return task.info["colours"][name]


class Lookup(SingleTurn):
    """Graded by whether the tool was asked, which no text shows."""

    tools = (colour_of,)
    max_turns = 3
    said = ""

    def tasks(self, split, num_tasks):
        names = [f"{split}{i}" for i in range(num_tasks)]
        colours = ["red", "green", "blue", "black"]
        return [
            Task(n, (Message("user", f"{n}?"),), colours[i % 4], {"colours": {n: colours[i % 4]}})
            for i, n in enumerate(names)
        ]

    def gold(self, task):
        call = ToolCall("colour_of", {"name": task.id})
        messages = [Message("assistant", "", tool_calls=(call.as_chat(),)), Message("tool", self.said or task.answer)]
        return [*messages, Message("assistant", task.answer)]

    def score_episode(self, task, episode):
        has_asked = any(message.role == "tool" for message in episode.messages)
        return Score(float(has_asked and episode.completion == task.answer))

    def reward(self, task, completion):
        raise NotImplementedError


class Dialogue(Environment):
    """Asks twice; the answer is what was said the second time."""

    max_turns = 2
    wants = 2
    between = None

    def __init__(self, seed=0):
        super().__init__(seed)
        self.num_closed = 0

    def tasks(self, split, num_tasks):
        return [Task(f"{split}{i}", (Message("user", f"{split} {i}?"),), f"word {i}") for i in range(num_tasks)]

    def gold(self, task):
        return [Message("assistant", "first"), Message("user", "and?"), Message("assistant", task.answer)]

    async def run(self, task, policy):
        messages, texts = list(task.prompt), []
        for _ in range(self.wants):
            reply = await policy.chat(messages)
            texts.append(reply.text)
            messages += [reply.message, Message("user", "and?")]
            if self.between is not None:
                await self.between()
        return Episode(" ".join(texts), num_turns=2, turn_rewards=(0.0, 0.5 * (texts[0] == "first")))

    async def close_episode(self, task, state):
        self.num_closed += 1

    def score(self, task, completion):
        return Score(0.5 * float(completion == f"first {task.answer}"))


async def check(environment, timeout_s=60.0):
    scorer = InlineScorer(environment)
    return await check_environment(environment, scorer, 12, rehearsal=Rehearsal(environment, scorer, timeout_s))


async def test_a_gold_conversation_calls_the_tools_and_is_graded_whole():
    result = await check(Lookup())
    assert result.failures == []
    assert [(found.kind, found.mean_reward) for found in result.results][:2] == [("gold", 1.0), ("empty", 0.0)]
    assert result.notes == ()
    alone = await check_environment(Lookup(), InlineScorer(Lookup()), 12)
    assert "gold answers reach the threshold 1 in 0.0%" in alone.failures[0], "its text alone would not pass"


async def test_a_gold_answer_whose_tool_says_something_else_is_told():
    environment = Lookup()
    environment.said = "purple"
    (note,) = (await check(environment)).notes
    assert note == (
        "warning: 12 of 12 gold answers hold other messages than Lookup gives, first tool 'purple', where it says tool "
        "'red': SFT would imitate a conversation that does not happen"
    )


async def test_turns_of_an_environments_own_run_are_played_and_closed():
    environment = Dialogue()
    result = await check(environment)
    assert result.failures == []
    assert result.results[0].mean_reward == 1.0, "with the rewards of its turns"
    assert environment.num_closed == sum(found.num_scored for found in result.results)


@pytest.mark.parametrize(("own_reward", "turns"), [(None, (1.0,)), (1.0, (1.0,)), (None, (0.0, 0.0, 1.0))])
async def test_turn_rewards_that_are_not_one_for_each_turn_fail_the_check(own_reward, turns):
    class Miscounted(Dialogue):
        async def run(self, task, policy):
            return replace(await super().run(task, policy), turn_rewards=turns, reward=own_reward)

    result = await check(Miscounted())
    assert "turn rewards for an episode of 2 turns" in result.failures[0]


async def test_turn_rewards_count_beside_the_episodes_own_reward():
    class Own(Dialogue):
        async def run(self, task, policy):
            return replace(await super().run(task, policy), reward=0.5)

    assert (await check(Own())).results[0].mean_reward == 1.0


async def raises():
    raise KeyError("odd")


async def never_returns():
    await asyncio.sleep(600)


@pytest.mark.parametrize(
    ("between", "wants", "text"),
    [
        (raises, 2, "the episode failed: KeyError: 'odd'"),
        (never_returns, 2, "run() of Dialogue did nothing for 0.2 s"),
        (None, 3, "run() asked for turn 3, and max_turns = 2: raise it in the class"),
    ],
)
async def test_an_episode_that_fails_fails_the_check(between, wants, text):
    environment = Dialogue()
    environment.between, environment.wants = between, wants
    result = await check(environment, 0.2 if between is never_returns else 60.0)
    assert any(text in failure for failure in result.failures), result.failures
    assert environment.num_closed
