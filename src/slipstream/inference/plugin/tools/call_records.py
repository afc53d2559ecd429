"""Turns the findings of vLLM's tool parsers into `ToolCall` records; knows nothing of vLLM.

Every call from this module can be encoded, sent and decoded: a model may write any JSON.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.inference.plugin.tools.formats import Format, excerpt
from slipstream.records import ToolCall

MAX_CALLS = 256
"""Most of one completion; one call with an error stands for all further ones."""
MAX_DEPTH = 64
"""How deep arguments may be nested."""
_ID_LENGTH = 9
_MAX_NAME = 256


@dataclass(frozen=True)
class Found:
    """A call as a parser of vLLM returns it: `arguments` is text."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Parsed:
    """The result of a vLLM parser for a text."""

    calls: tuple[Found, ...]
    content: str


class Unreadable(Exception):
    """Why the arguments of a call cannot be read."""


def read_calls(text: str, parse: Callable[[str], Parsed], format_: Format | None) -> tuple[list[Found | ToolCall], str]:
    """The calls in a text, in order, and the text apart from them. Unreadable ones are `ToolCall`s with an error."""
    regions = format_.regions(text) if format_ else []
    if format_ is None or all(region.is_whole for region in regions):
        parsed = parse(text)
        if format_ is None or len(parsed.calls) >= len(regions):
            return list(parsed.calls), parsed.content
    # One broken call must not take the others with it: each is parsed by itself.
    calls: list[Found | ToolCall] = []
    for region in regions[: MAX_CALLS + 1]:
        alone = parse(format_.alone(region)).calls if region.is_whole else ()
        calls += alone or [ToolCall(format_.name_of(region), error=format_.complaint(region))]
    edges = [0, *(edge for region in regions for edge in (region.start, region.end)), len(text)]
    content = "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    return calls, content


def as_records(found: Sequence[Found | ToolCall], text: str, token_ids: Sequence[int]) -> list[ToolCall]:
    """The calls as records. An id written by the policy itself stays; all others follow from `token_ids`, prompt and
    completion: the next prompt is the same whenever this one is."""
    calls = [_record(each) for each in found[:MAX_CALLS]]
    if len(found) > MAX_CALLS:
        calls.append(ToolCall("", error=f"there are more than {MAX_CALLS} calls in one turn: make fewer"))
    digest = hashlib.sha256(array("q", token_ids).tobytes())
    return [
        call if call.id and call.id in text else msgspec.structs.replace(call, id=_new_id(digest.digest(), number))
        for number, call in enumerate(calls)
    ]


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments; raises `Unreadable`."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"its arguments are not valid JSON ({error}): {excerpt(text)}") from error
    if not isinstance(value, dict):
        raise Unreadable(f"its arguments are not a JSON object: {excerpt(text)}")
    if _is_deeper(value, MAX_DEPTH):
        raise Unreadable(f"its arguments are nested more than {MAX_DEPTH} deep")
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise Unreadable(f"a number in its arguments has more than 64 bits: {excerpt(text)}") from error
    except UnicodeEncodeError as error:
        raise Unreadable(f"its arguments hold half of a surrogate pair: {excerpt(text)}") from error
    return value


def _record(found: Found | ToolCall) -> ToolCall:
    if isinstance(found, ToolCall):
        return found
    name = found.name.encode(errors="replace").decode()[:_MAX_NAME].strip()
    if not name:
        return ToolCall("", id=found.id, error="the call has no name")
    try:
        return ToolCall(name, arguments_of(found.arguments), found.id)
    except Unreadable as error:
        return ToolCall(name, id=found.id, error=str(error))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _is_deeper(value: object, depth: int) -> bool:
    if isinstance(value, dict):
        parts: Sequence[object] = list(value.values())
    elif isinstance(value, list):
        parts = value
    else:
        return False
    return depth == 0 or any(_is_deeper(part, depth - 1) for part in parts)


def _new_id(digest: bytes, number: int) -> str:
    """Nine letters and digits, the only ids for Mistral's templates."""
    return hashlib.sha256(digest + number.to_bytes(4, "big")).hexdigest()[:_ID_LENGTH]
