"""Checks for parts of messages that the chat template does not read: refuses or counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from slipstream.errors import DataError
from slipstream.records import Message

_CONTENT_FIELDS = (
    *("reasoning_content", "reasoning", "thinking", "thoughts", "tool_calls", "function_call", "tool_plan"),
    *("train", "training", "masked"),
)
"""Fields that hold content or decide what is trained on: without them the model learns other tokens."""
_LINKS = ("role", "content", "tool_call_id")
_MAX_RENDERED = 1000


class _Template(Protocol):
    @property
    def renders_tools(self) -> bool:
        """Whether the template renders the tools of a conversation."""
        ...

    def fields_read(self, messages: Sequence[Message]) -> set[tuple[str, str]]:
        """(role, field name) of the message fields that the template reads while it renders `messages`."""
        ...

    def unrendered(self, messages: Sequence[Message]) -> list[int]:
        """The places of the messages whose content the template leaves out."""
        ...


class ReadRecorder(dict[str, Any]):
    """A message that records which of its fields are read, as (role, field name)."""

    def __init__(self, values: dict[str, Any], read: set[tuple[str, str]]) -> None:
        super().__init__(values)
        self._role = str(values["role"])
        self._read = read

    def _on_read(self, name: str) -> None:
        self._read.add((self._role, name))

    def __getitem__(self, name: str) -> Any:
        self._on_read(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._on_read(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dictionary."""
        self._on_read(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self._on_read(name)
            yield name

    def keys(self) -> Any:
        """As of any dictionary."""
        return list(self)

    def items(self) -> Any:
        """As of any dictionary."""
        return [(name, self[name]) for name in self]


def check_fields(template: _Template, conversations: Sequence[Sequence[Message]], counts: dict[str, int]) -> None:
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
    template: _Template, conversations: Sequence[Sequence[Message]], where: Callable[[Sequence[Message]], str]
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
