"""The conversation of an episode of `verifiers`: chat completions there, records here.

An environment sends the whole conversation in every turn, with the policy's own turns, in OpenAI's form. An unchanged
turn of the policy is replaced by the sampled text. So a template renders the sampled tokens, and the conversation
continues its token sequence. A changed turn stays as it is. It begins a new sequence, with a mask on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.envs import Message, Reply, ToolCall, as_message, with_tools

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Conversation:
    """The turns of one episode."""

    def __init__(self) -> None:
        self._given: list[tuple[tuple[str, str], Reply]] = []
        self._num_calls = 0

    @property
    def num_turns(self) -> int:
        """The policy's turns so far."""
        return len(self._given)

    @property
    def last(self) -> Reply | None:
        """The policy's last turn."""
        return self._given[-1][1] if self._given else None

    def messages(self, wire: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """The conversation as the policy reads it; `tools` are on its first message. Raises ValueError for what cannot
        be said to a policy of text."""
        found: list[Message] = []
        free = list(self._given)
        for message in map(as_message, wire):
            calls = [(call["id"], call["function"]["name"]) for call in message.tool_calls]
            key = _key_of(message.content, calls) if message.role == "assistant" else None
            place = next((place for place, (given, _) in enumerate(free) if given == key), None)
            if place is None:
                found.append(message)
            else:
                found.append(free[place][1].message)
                del free[: place + 1]  # turns come back in their order
        return list(with_tools(found, tools))

    def reply(self, reply: Reply) -> dict[str, Any]:
        """What the environment gets for a turn."""
        text = reply.content if reply.tool_calls or reply.content else reply.text
        calls = [self._call(call) for call in reply.tool_calls]
        self._given.append((_key_of(text, [(call["id"], call["name"]) for call in calls]), reply))
        return {
            "op": "reply",
            "name": f"turn-{len(self._given)}",
            "content": text,
            "tool_calls": calls,
            "finish_reason": reply.finish_reason,
            "num_prompt_tokens": reply.num_prompt_tokens,
            "num_tokens": reply.num_tokens,
        }

    def _call(self, call: ToolCall) -> dict[str, str]:
        self._num_calls += 1
        # What cannot be read as arguments is not JSON either: the environment says so in its own words.
        arguments = call.error or json.dumps(call.arguments, ensure_ascii=False)
        return {"id": call.id or f"call_{self._num_calls}", "name": call.name, "arguments": arguments}


def _key_of(text: str, calls: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The key by which a turn of the policy is found again: its text without thinking, and its calls' ids and names."""
    after = text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]
    return after.strip(), " ".join(f"{id_}:{name}" for id_, name in calls)
