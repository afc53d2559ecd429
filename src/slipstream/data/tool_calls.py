"""Tools and their calls as rows give them, in one form: a call's arguments are an object, whether the row has an object
or JSON text of one, as in OpenAI's messages; a template gets them as it wants them (`chat_template.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from slipstream.errors import DataError

_FORM = "[{'type': 'function', 'function': {'name': ..., 'arguments': ...}}]"


def calls_of(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """The calls of a message's `tool_calls`. Raises `DataError` that begins with `where`."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(call, Mapping) for call in cast("list[Any]", value)):
        raise DataError(f"{where} = {value!r:.60} is not a list of calls: give {_FORM}")
    return tuple(_call(call, f"{where}[{n}]") for n, call in enumerate(cast("Sequence[Mapping[str, Any]]", value)))


def _call(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A call with its arguments as an object. Some templates read `call.name`, so those without `function` stay so."""
    if "function" not in given:
        return _with_object(given, where)
    if not isinstance(function := given["function"], Mapping):
        raise DataError(f"{where}.function = {function!r:.60} is no function: give {_FORM}")
    return {**given, "function": _with_object(cast("Mapping[str, Any]", function), f"{where}.function")}


def _with_object(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = function.get("arguments")
    arguments = {} if given is None or given == "" else json_or_none(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise DataError(
            f"{where}.arguments = {given!r:.60} is no JSON object, nor the text of one: give an object that has the "
            "arguments by name"
        )
    return {**function, "arguments": arguments}


def earlier_calls(value: Any) -> list[dict[str, Any]]:
    """Calls in the forms of before `tool_calls`: OpenAI's `function_call`, and the text of ShareGPT's role of that
    name. `calls_of` refuses any other value in it."""
    found = json_or_none(value) if isinstance(value, str) else value
    return [{"type": "function", "function": call} for call in (found if isinstance(found, list) else [found or value])]


def tools_of(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Tools in OpenAI's form; some data sets store the list, or each of them, as JSON text. Raises `DataError`."""
    found = json_or_none(value) if isinstance(value, str) else [] if value is None else value
    if isinstance(found, list):
        listed = cast("list[Any]", found)
        found = [json_or_none(tool) if isinstance(tool, str) else tool for tool in listed]
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", found)):
        raise DataError(f"{where}: tools = {value!r:.60} is not a list of functions' JSON schemas: correct it")
    return tuple(_tool(tool) for tool in cast("list[dict[str, Any]]", found))


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """A function that stands alone, as in OpenAI's earlier `functions`, or with Anthropic's `input_schema`, in the form
    that chat templates read and servers pass: of another form a template may leave out the parameters."""
    if "function" in given or "name" not in given:
        return given
    function = {("parameters" if name == "input_schema" else name): value for name, value in given.items()}
    if function.pop("type", "function") not in ("function", "custom"):
        return given  # a tool of the server, such as a search, is no function
    return {"type": "function", "function": function}


def json_or_none(text: str | bytes) -> Any:
    """The value of a JSON text; None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def with_text(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the arguments of calls as JSON text."""
    calls = [list(map(_as_text, message.get("tool_calls") or ())) for message in chat]
    return [{**message, "tool_calls": made} if made else message for message, made in zip(chat, calls, strict=True)]


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(call)
    if isinstance(function := found.get("function"), Mapping):
        return found | {"function": _as_text(cast("Mapping[str, Any]", function))}
    if isinstance(found.get("arguments"), dict):
        found["arguments"] = json.dumps(found["arguments"], ensure_ascii=False)
    return found
