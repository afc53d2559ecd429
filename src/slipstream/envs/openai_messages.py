"""Messages of OpenAI's chat completions as records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

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
