"""Checks for parts of messages that the chat template does not read: refuses or counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import DataError
from slipstream.records import Message

_CONTENT_FIELDS = (
    *("reasoning_content", "reasoning", "thinking", "thoughts", "tool_calls", "function_call", "tool_plan"),
    *("train", "training", "masked"),
)
"""Fields that hold content or decide what is trained on: without them the model learns other tokens."""
_LINKS = ("role", "content", "tool_call_id")
_MAX_RENDERED = 1000


def check_fields(template: ChatTokenizer, conversations: Sequence[Sequence[Message]], counts: dict[str, int]) -> None:
    """Counts the messages with a field that the template reads in none of the conversations (of up to a thousand that
    have it). Raises `DataError` if the field holds content, and for tools that the template does not render."""
    with_tools = sum(bool(conversation and conversation[0].tools) for conversation in conversations)
    if with_tools and not template.renders_tools:
        raise DataError(
            f"{with_tools} rows have tools, which the model's chat template does not render: use a model whose "
            "template does, or remove the column"
        )
    unread = Counter(field for conversation in conversations for field in _fields(conversation))
    left = _MAX_RENDERED
    for conversation in conversations:
        if not unread or not left:
            break
        if not unread.keys().isdisjoint(_fields(conversation)):
            left -= 1
            for field in template.fields_read(conversation):
                del unread[field]
    for (role, name), count in unread.items():
        if name in _CONTENT_FIELDS:
            raise DataError(
                f"{count} {role} messages have the field {name}, which the model's chat template does not read, so it "
                "would not be learned: rename it as the template calls it, put it into content, or remove it"
            )
        counts[f"field {name} of {role} messages, not read by the chat template"] = count


def check_contents(
    template: ChatTokenizer, conversations: Sequence[Sequence[Message]], where: Callable[[Sequence[Message]], str]
) -> None:
    """Raises `DataError` for messages whose content the template leaves out; `where` is a conversation's place. Which
    these are is a matter of the roles of a conversation's messages: one of each kind is rendered."""
    places: dict[Any, list[int]] = {}
    counts: Counter[str] = Counter()
    first = ""
    for conversation in conversations:
        turns = ((turn.role, bool(turn.content.strip()), len(turn.tool_calls)) for turn in conversation)
        kind = (bool(conversation[0].tools), *turns)
        if kind not in places:
            if len(places) == _MAX_RENDERED:
                continue
            places[kind] = template.unrendered(conversation)
        first = first or (where(conversation) if places[kind] else "")
        counts.update(conversation[place].role for place in places[kind])
    for role, count in counts.items():
        raise DataError(
            f"the model's chat template leaves out the text of {count} {role} messages (first: {first}): use a model "
            "whose template renders them, put their text into other messages, or remove them"
        )


def _fields(conversation: Sequence[Message]) -> list[tuple[str, str]]:
    return [
        (message.role, name)
        for message in conversation
        if message.extra or message.tool_calls
        for name, value in message.as_chat().items()
        if name not in _LINKS and value not in (None, "", [], {})
    ]
