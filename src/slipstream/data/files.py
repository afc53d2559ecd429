"""Conversations from JSONL files. A row that cannot be used is an error with its file and number, never left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from slipstream.errors import DataError
from slipstream.records import Message, Role

Conversation = tuple[Message, ...]
_FORMS = '{"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}'


def read_conversations(path: str | Path) -> list[Conversation]:
    """The conversations of a JSONL file, in its order; each has at least one assistant turn.

    A row is {"messages"}, or {"prompt", "completion"} where either is a text or a list of messages; other keys are
    ignored, and so are blank lines. Raises `DataError`.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        raise DataError(f"{path} is not a JSONL file: convert it to one {_FORMS} a line")
    decoder = msgspec.json.Decoder()
    conversations: list[Conversation] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"row {number} of {path}"
                try:
                    row = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise DataError(f"{where} is not JSON ({error}): correct or remove it") from error
                conversations.append(conversation_from(row, where))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): correct data.path") from error
    if not conversations:
        raise DataError(f"{path} holds no conversation: give lines {_FORMS}")
    return conversations


def conversation_from(row: Any, where: str) -> Conversation:
    """The conversation in one decoded row."""
    if not isinstance(row, dict):
        raise DataError(f"{where} is a {type(row).__name__}: give {_FORMS}")
    entry = cast("dict[str, Any]", row)
    if "messages" in entry:
        turns = _messages(entry["messages"], "messages", None, where)
    elif "prompt" in entry and "completion" in entry:
        turns = [
            *_messages(entry["prompt"], "prompt", "user", where),
            *_messages(entry["completion"], "completion", "assistant", where),
        ]
    else:
        raise DataError(f"{where} has the keys {', '.join(sorted(entry)) or 'none'}: give {_FORMS}")
    if not any(turn.role == "assistant" for turn in turns):
        raise DataError(f"{where} has no assistant message, so nothing to train on: add one or remove the row")
    return tuple(turns)


def _messages(value: Any, key: str, text_role: Role | None, where: str) -> list[Message]:
    if isinstance(value, str) and text_role is not None:
        return [Message(text_role, value)]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key} = {value!r:.60} is not a list of messages: give {_FORMS}")
    return [_message(turn, f"{key}[{place}]", where) for place, turn in enumerate(cast("Sequence[Any]", value))]


def _message(turn: Any, path: str, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {path} is a {type(turn).__name__}: give {{'role': ..., 'content': ...}}")
    entry = cast("dict[str, Any]", turn)
    role = entry.get("role")
    if role not in get_args(Role):
        raise DataError(f"{where}: {path}.role = {role!r} is unknown: use {', '.join(get_args(Role))}")
    calls = tuple(entry.get("tool_calls") or ())
    content = entry.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):  # the parts of OpenAI's format; text is all that a text model takes
        parts = cast("list[Any]", content)
        if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            content = "".join(str(part.get("text", "")) for part in parts)
    if not isinstance(content, str):
        raise DataError(f"{where}: {path}.content = {content!r:.60} is not text: give it as text")
    return Message(cast("Role", role), content, tool_calls=calls, tool_call_id=str(entry.get("tool_call_id") or ""))
