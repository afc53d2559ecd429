"""Checks that values can be sent to another process unchanged: text, numbers, booleans, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast


def not_plain(value: Any, path: str) -> str:
    """Names the part of `value`, called `path`, that has another type; empty if none has."""
    # Exact types: a NumPy float is a float to isinstance, but not to msgpack.
    if value is None or type(value) in (bool, float, str):
        return ""
    if type(value) is int:
        return "" if -(2**63) <= value < 2**64 else f"{path} is an integer of more than 64 bits"
    if isinstance(value, list | tuple):
        parts = cast("Sequence[Any]", value)
        return next(filter(None, (not_plain(part, f"{path}[{i}]") for i, part in enumerate(parts))), "")
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        for key, part in entries.items():
            if not isinstance(key, str):
                return f"{path} has the key {key!r:.40}, a {type(key).__name__}"
            if complaint := not_plain(part, f"{path}.{key}"):
                return complaint
        return ""
    return f"{path} is a {type(value).__name__}"


def plain_or_text(value: Any) -> Any:
    """The value itself if it is plain, otherwise its text (a date, for example)."""
    return str(value) if not_plain(value, "") else value


def text_of(answer: str | float) -> str:
    """An answer as text. A column of whole numbers of which one is missing is of floats: its 42.0 is `42`."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def kind_of(value: Any) -> str:
    """What a value of JSON is, with its article."""
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else kinds.get(type(value), f"a value of type {type(value).__name__}")
