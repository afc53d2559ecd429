"""Tools: functions for the policy to call. Their JSON schemas follow from type hints and docstrings.

A tool is a plain function or a coroutine function with a type hint for every parameter:

    def calculator(expression: str) -> str:
        \"\"\"Computes an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses.
        \"\"\"

A parameter annotated as `Task` receives the task and is not part of the schema. A tool's result is text, or becomes
JSON.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import pydantic
import pydantic_core

from slipstream.errors import ConfigError, one_line
from slipstream.records import Message, Task

Tool = Callable[..., Any]
Schema = dict[str, Any]
SCHEMA_ATTRIBUTE = "tool_schema"
"""A function with this attribute brings its own schema, as tools of other programs do."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def name_of(tool: Tool) -> str:
    """Its name for the policy."""
    schema = getattr(tool, SCHEMA_ATTRIBUTE, None)
    return str(schema["function"]["name"]) if schema is not None else getattr(tool, "__name__", type(tool).__name__)


def schemas_of(tools: Sequence[Tool]) -> tuple[Schema, ...]:
    """The tools' schemas in OpenAI's form. Raises `ConfigError` for an object that is no tool, and for equal names."""
    found = tuple(schema_of(tool) for tool in tools)
    names = [schema["function"]["name"] for schema in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two tools have the name {twice[0]!r}: rename one")
    return found


def schema_of(tool: Tool) -> Schema:
    """A tool's schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    given = getattr(tool, SCHEMA_ATTRIBUTE, None)
    if given is not None:
        return cast("Schema", given)
    if not callable(tool):
        raise ConfigError(f"the tool {tool!r:.60} is a {type(tool).__name__}: give a function")
    name = name_of(tool)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a tool cannot have the name {name!r}: give a function with a name of its own")
    description, arguments = described(inspect.getdoc(tool) or "")
    fields: dict[str, Any] = {}
    for parameter, (annotation, default) in parameters_of(tool).items():
        fields[parameter] = (annotation, pydantic.Field(default, description=arguments.get(parameter)))
    try:
        schema = pydantic.create_model(name, **fields).model_json_schema()
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticSchemaGenerationError, NameError) as error:
        raise ConfigError(
            f"the parameters of tool {name} have no JSON schema ({one_line(error):.200}): use types of JSON"
        ) from error
    rest = {key: schema[key] for key in ("required", "$defs") if key in schema}
    parameters = {"type": "object", "properties": schema.get("properties", {}), **rest}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": cast("Schema", _untitled(parameters))},
    }


def parameters_of(tool: Tool) -> dict[str, tuple[Any, Any]]:
    """Type and default (`...`: none) of the parameters for the policy to fill in, by name. Raises `ConfigError` for a
    parameter without a type hint, and for `*args` or `**kwargs`."""
    hints = _hints(tool)
    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(tool).parameters.items():
        where = f"parameter {name} of tool {name_of(tool)}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where} is {parameter.kind.description}: name each parameter")
        if name not in hints:
            raise ConfigError(f"{where} has no type hint, which its schema needs: write {name}: str, say")
        if hints[name] is not Task:
            found[name] = hints[name], ... if parameter.default is parameter.empty else parameter.default
    return found


def task_parameter_of(tool: Tool) -> str | None:
    """The parameter that receives the task, if there is one."""
    return next((name for name, hint in _hints(tool).items() if hint is Task and name != "return"), None)


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring's text before its sections, and the descriptions of its arguments, in Google's, NumPy's or Sphinx's
    style."""
    from docstring_parser import parse  # takes a tenth of a second; reward workers without tools save it

    found = parse(docstring)
    arguments = {each.arg_name.lstrip("*"): " ".join((each.description or "").split()) for each in found.params}
    return (found.description or "").strip(), arguments


def with_tools(messages: Sequence[Message], schemas: Sequence[Schema]) -> tuple[Message, ...]:
    """The conversation with the tools on its first message, as templates expect."""
    if not schemas or not messages:
        return tuple(messages)
    return (msgspec.structs.replace(messages[0], tools=tuple(schemas)), *messages[1:])


def as_text(value: object) -> str:
    """A tool's result for the policy: text as it is, other values as JSON, values without JSON by `str`."""
    value = list(cast("Iterator[object]", value)) if isinstance(value, Iterator) else value
    try:
        plain = value if isinstance(value, str | dict | list | tuple) else _plain(value)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _plain(value: object) -> object:
    """Numbers, text, lists and dictionaries of the same content: of dataclasses, pydantic's models, dates, arrays."""
    return pydantic_core.to_jsonable_python(value, fallback=_of_array)


def _of_array(value: Any) -> object:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _hints(tool: Tool) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(tool, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"a type hint of tool {name_of(tool)} cannot be resolved ({error}): import its name"
        ) from None
    except TypeError:  # an object with __call__
        return typing.get_type_hints(type(tool).__call__, include_extras=True)


def _untitled(value: Any) -> Any:
    """Without pydantic's titles, which repeat the names. A parameter may itself be called `title`."""
    if isinstance(value, list):
        return [_untitled(each) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    named = cast("Schema", value)
    return {
        key: {name: _untitled(each) for name, each in part.items()}
        if key in ("properties", "$defs")
        else _untitled(part)
        for key, part in named.items()
        if key != "title"
    }
