"""Episodes with tools, against a policy that says what the test wrote."""

import pytest

from slipstream.envs import SingleTurn
from slipstream.envs.base import ContextFull, Reply, ToolResult
from slipstream.envs.conversation import converse
from slipstream.envs.single_turn import gold_of, gold_turns, make_tasks
from slipstream.errors import DataError
from slipstream.records import Message, Task, ToolCall


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class Sums(SingleTurn):
    max_turns = 3
    max_tool_calls = 3
    tools = (add,)

    def tasks(self, split, num_tasks):
        return [{"prompt": "1 + 2", "answer": "3"}]

    def gold(self, task):
        call = ToolCall("add", {"a": 1, "b": 2})
        return [Message("assistant", "", tool_calls=(call.as_chat(),)), Message("tool", "3"), Message("assistant", "3")]

    def reward(self, task, completion):
        return float(completion == task.answer)


class Scripted:
    """Says the replies in order; a tool's result is the sum of its arguments."""

    def __init__(self, *replies):
        self.replies, self.prompts = list(replies), []

    async def chat(self, messages, *, max_tokens=None):
        self.prompts.append(list(messages))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def call_tool(self, call):
        return ToolResult(str(sum(call.arguments.values())))


def calls(*pairs, text="calls"):
    return Reply(text, "stop", tuple(ToolCall("add", {"a": a, "b": b}, f"id{a}") for a, b in pairs))


async def play(*replies):
    environment, policy = Sums(), Scripted(*replies)
    (task,) = make_tasks(environment, "train", 1)
    return await converse(environment, task, policy), policy, task


async def test_results_come_back_in_the_order_of_the_calls():
    episode, policy, task = await play(calls((1, 2), (3, 4)), Reply("10", "stop"))
    results = [
        Message("tool", "3", tool_call_id="id1", extra={"name": "add"}),
        Message("tool", "7", tool_call_id="id3", extra={"name": "add"}),
    ]
    assert policy.prompts[1] == [*task.prompt, Message("assistant", "calls"), *results]
    assert task.prompt[0].tools[0]["function"]["name"] == "add"
    assert (episode.completion, episode.stop, episode.num_turns, episode.outcome) == ("10", "answer", 2, "done")
    assert episode.messages == (Message("assistant", "calls"), *results, Message("assistant", "10"))


@pytest.mark.parametrize(
    ("replies", "stop", "outcome"),
    [
        ([calls((1, 1)), calls((1, 1)), calls((1, 1))], "turn_limit", "done"),
        ([calls((1, 1), (2, 2)), calls((1, 1), (2, 2))], "tool_limit", "done"),
        ([calls((1, 1)), Reply("cut", "length", calls((1, 1)).tool_calls)], "length", "truncated"),
    ],
)
async def test_limits_end_an_episode_before_another_call(replies, stop, outcome):
    episode, policy, _ = await play(*replies)
    assert (episode.stop, episode.outcome) == (stop, outcome)
    assert policy.replies == []
    assert episode.messages[-1].role == "assistant"


async def test_a_full_context_is_not_swallowed():
    with pytest.raises(ContextFull):
        await play(calls((1, 1)), ContextFull("no room"))


def test_gold_answers_may_have_turns():
    (task,) = make_tasks(Sums(), "train", 1)
    assert gold_of(Sums(), task) == "3"
    assert [turn.role for turn in gold_turns(Sums(), task)] == ["assistant", "tool", "assistant"]

    class Open(Sums):
        def gold(self, task):
            return [Message("tool", "3")]

    with pytest.raises(DataError, match="return text, or messages that end with the policy's answer"):
        gold_turns(Open(), Task("t", task.prompt))
