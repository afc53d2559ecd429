"""Calls of tools, in their process: arguments are converted to the type hints' types, and results become text of
bounded length."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import pydantic

from slipstream.envs.tools.schemas import SCHEMA_ATTRIBUTE, Tool, as_text, name_of, parameters_of, task_parameter_of
from slipstream.errors import did_you_mean
from slipstream.records import Task

MAX_CONTENT = 32_768
"""Most characters of a result for the policy; the rest is cut, and the result says so."""
_MAX_PROBLEMS, _MAX_PROBLEM = 8, 300
_LENIENT = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=True)


class CallRefused(Exception):
    """A call without execution. The message is for the policy."""

    def __init__(self, failure: Literal["unknown", "arguments"], message: str) -> None:
        super().__init__(message)
        self.failure: Literal["unknown", "arguments"] = failure


def call_function(tools: Sequence[Tool], name: str, arguments: Mapping[str, Any], task: Task) -> Any:
    """Calls the function of `tools` with this name; its result, perhaps a coroutine. Raises `CallRefused`."""
    named = {name_of(tool): tool for tool in tools}
    if name not in named:
        raise CallRefused("unknown", f"There is no tool {name[:80]!r}{did_you_mean(name[:80], named)}")
    tool = named[name]
    values = fitted(tool, arguments)
    if (wants_task := task_parameter_of(tool)) is not None:
        values[wants_task] = task
    return tool(**values)


def fitted(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the types of the type hints, `"3"` as 3 for an `int`. A tool with its own schema gets them
    as they are. Raises `CallRefused`."""
    if hasattr(tool, SCHEMA_ATTRIBUTE):
        _bind(tool, arguments)
        return dict(arguments)
    names, model = _model_of(tool)
    try:
        found = model.model_validate(dict(arguments))
    except pydantic.ValidationError as error:
        raise CallRefused("arguments", f"The arguments of {name_of(tool)} do not fit: {_problems(error)}.") from None
    return {names[field]: getattr(found, field) for field in names if field in found.model_fields_set}


def as_content(value: object) -> str:
    """A tool's result as the policy reads it."""
    # No tokenizer takes half a surrogate pair.
    return cut(as_text(value)).encode("utf-8", "replace").decode()


def cut(text: str) -> str:
    """The text, or its beginning and how much is missing."""
    if len(text) <= MAX_CONTENT:
        return text
    return f"{text[:MAX_CONTENT]}\n[cut: these are the first {MAX_CONTENT:,} of {len(text):,} characters]"


@lru_cache(maxsize=1024)
def _model_of(tool: Tool) -> tuple[dict[str, str], type[pydantic.BaseModel]]:
    """A model of the arguments, and the parameter of each field: some names of parameters are impossible for
    fields."""
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for number, (name, (hint, default)) in enumerate(parameters_of(tool).items()):
        names[f"field_{number}"] = name
        fields[f"field_{number}"] = (hint, pydantic.Field(default, alias=name))
    return names, pydantic.create_model(name_of(tool), __config__=_LENIENT, **fields)


def _problems(error: pydantic.ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(map(str, each['loc'])) or 'all'}: {each['msg']}"[:_MAX_PROBLEM] for each in found]
    more = [f"and {len(texts) - _MAX_PROBLEMS} more"] if len(texts) > _MAX_PROBLEMS else []
    return "; ".join([*texts[:_MAX_PROBLEMS], *more])


def _bind(tool: Tool, arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(tool).bind(**arguments, **dict.fromkeys(filter(None, [task_parameter_of(tool)])))
    except TypeError as error:
        raise CallRefused("arguments", f"The arguments of {name_of(tool)} do not fit: {error}.") from None
