"""Messages between an environment process and the policy: chat completions there, records here.

An environment sends the whole conversation in every turn, the policy's own turns among it, in OpenAI's form. A turn
that it sends back as it got it is replaced by the very text that was sampled, so that a template renders the tokens
that were sampled and the conversation continues its token sequence. One that it changed stays as it is and begins a
new sequence, in which it is masked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from slipstream.envs.answers import THINK_CLOSE, THINK_OPEN
from slipstream.envs.base import Reply
from slipstream.envs.tools.schemas import with_tools
from slipstream.records import Message, Role

_KNOWN = frozenset(("role", "content", "tool_calls", "tool_call_id", "reasoning_content"))
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "text": "user",
}

Wire = Mapping[str, Any]


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

    def messages(self, wire: Sequence[Wire], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """The conversation as the policy reads it; `tools` are on its first message. Raises ValueError for what cannot
        be said to a policy of text."""
        found: list[Message] = []
        free = list(self._given)
        for message in wire:
            if message.get("role") == "assistant":
                key = _key(message)
                place = next((place for place, (given, _) in enumerate(free) if given == key), None)
                if place is not None:
                    found.append(free[place][1].message)
                    del free[: place + 1]  # turns come back in their order
                    continue
            found.append(as_message(message))
        return list(with_tools(found, tools))

    def reply(self, reply: Reply) -> dict[str, Any]:
        """What the environment gets for a turn."""
        text = reply.content if reply.tool_calls or reply.content else reply.text
        calls: list[dict[str, str]] = []
        for call in reply.tool_calls:
            self._num_calls += 1
            # What cannot be read as arguments is not JSON either: the environment says so in its own words.
            arguments = call.error or json.dumps(call.arguments, ensure_ascii=False)
            calls.append({"id": call.id or f"call_{self._num_calls}", "name": call.name, "arguments": arguments})
        self._given.append((_key_of(text, calls), reply))
        return {
            "op": "reply",
            "name": f"turn-{len(self._given)}",
            "content": text,
            "tool_calls": calls,
            "finish_reason": reply.finish_reason,
            "num_prompt_tokens": reply.num_prompt_tokens,
            "num_tokens": reply.num_tokens,
        }


def as_message(wire: Wire) -> Message:
    """A message in OpenAI's form as a record. Raises ValueError for parts that are not text."""
    role = _ROLES.get(str(wire.get("role")))
    if role is None:
        raise ValueError(f"a message has the role {wire.get('role')!r:.40}: use {', '.join(_ROLES)}")
    calls = cast("Sequence[Wire]", wire.get("tool_calls") or ())
    reasoning = wire.get("reasoning_content")
    return Message(
        role,
        _text(wire.get("content")),
        tool_calls=tuple(_call(call) for call in calls),
        tool_call_id=str(wire.get("tool_call_id") or ""),
        extra={key: value for key, value in wire.items() if key not in _KNOWN and isinstance(value, str)}
        | ({"reasoning_content": reasoning} if isinstance(reasoning, str) else {}),
    )


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in cast("Sequence[Any]", content):
        if isinstance(part, str):
            parts.append(part)
        elif part.get("type") == "text":
            parts.append(part.get("text") or "")
        else:
            raise ValueError(f"a message has a part of type {part.get('type')!r:.40}: only text is supported")
    return "\n".join(parts)


def _call(call: Wire) -> dict[str, Any]:
    """A call as chat templates expect it: arguments as an object."""
    function = cast("Wire", call.get("function") or call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"": arguments}
    found: dict[str, Any] = {"name": function.get("name", ""), "arguments": arguments or {}}
    return {"id": str(call.get("id") or ""), "type": "function", "function": found}


def _key(wire: Wire) -> tuple[str, str]:
    """The key by which a turn of the policy is found again: its text without thinking, and its calls."""
    calls: list[dict[str, str]] = []
    for call in cast("Sequence[Wire]", wire.get("tool_calls") or ()):
        function = cast("Wire", call.get("function") or call)
        calls.append({"id": str(call.get("id") or ""), "name": str(function.get("name") or "")})
    return _key_of(_text(wire.get("content")), calls)


def _key_of(text: str, calls: Sequence[Wire]) -> tuple[str, str]:
    after = text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]
    return after.strip(), " ".join(f"{call['id']}:{call['name']}" for call in calls)
