"""Schemas of tools, against those that transformers makes of the same functions."""

import dataclasses
import datetime
from typing import Literal

import numpy as np
import pydantic
import pytest
from transformers.utils import get_json_schema

from slipstream.envs.tools.schemas import (
    as_text,
    described,
    name_of,
    parameters_of,
    schema_of,
    schemas_of,
    task_parameter_of,
)
from slipstream.errors import ConfigError
from slipstream.records import Task


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / and
            parentheses.

    Returns:
        The value as text.
    """


def search(query: str, most: int = 5, kinds: list[str] | None = None, exact: bool = False) -> list[dict[str, str]]:
    """Find pages.

    Args:
        query: What to look for.
        most: How many.
        kinds: Only these.
        exact: The very words.
    """


def simplified(schema):
    """Without differences of form that mean the same: defaults, and null as a type or as `nullable`."""
    parameters = schema["function"]["parameters"]
    properties = {}
    for name, given in parameters["properties"].items():
        kinds = [each for each in given.get("anyOf", [given]) if each.get("type") != "null"]
        (kind,) = kinds
        items = kind.get("items")
        properties[name] = (kind["type"], items and items["type"], given.get("description"))
    return schema["function"]["name"], schema["function"]["description"], properties, parameters.get("required", [])


@pytest.mark.parametrize("tool", [calculator, search])
def test_a_schema_is_that_of_transformers(tool):
    assert simplified(schema_of(tool)) == simplified(get_json_schema(tool))


def test_a_parameter_for_the_task_is_not_the_policys():
    def look_up(key: str, task: Task) -> str: ...

    assert parameters_of(look_up) == {"key": (str, ...)}
    assert task_parameter_of(look_up) == "task"
    assert schema_of(look_up)["function"]["parameters"]["required"] == ["key"]


def test_choices_nested_types_and_a_parameter_called_title():
    def write(title: str, kind: Literal["a", "b"], rows: list[list[float]]) -> None: ...

    parameters = schema_of(write)["function"]["parameters"]
    assert parameters["properties"]["title"] == {"type": "string"}
    assert parameters["properties"]["kind"]["enum"] == ["a", "b"]
    assert parameters["properties"]["rows"]["items"]["items"] == {"type": "number"}


def test_what_is_no_tool_is_said():
    def bare(x): ...

    def many(*words: str): ...

    def odd(x: object()): ...

    with pytest.raises(ConfigError, match="parameter x of tool bare has no type hint"):
        schema_of(bare)
    with pytest.raises(ConfigError, match="parameter words of tool many is variadic positional"):
        schema_of(many)
    with pytest.raises(ConfigError, match="the parameters of tool odd have no JSON schema"):
        schema_of(odd)
    with pytest.raises(ConfigError, match=r"a tool cannot have the name '<lambda>'"):
        schema_of(lambda: 1)
    with pytest.raises(ConfigError, match="the tool 3 is a int: give a function"):
        schema_of(3)
    with pytest.raises(ConfigError, match="two tools have the name 'calculator'"):
        schemas_of([calculator, calculator])


def test_a_tool_may_bring_its_own_schema():
    async def call(**arguments): ...

    call.tool_schema = {"type": "function", "function": {"name": "far-away", "description": "", "parameters": {}}}
    assert schemas_of([call]) == (call.tool_schema,)
    assert name_of(call) == "far-away"


@pytest.mark.parametrize(
    ("text", "description", "arguments"),
    [
        ("", "", {}),
        ("Adds.\n\nIn Z.", "Adds.\n\nIn Z.", {}),
        (
            "Adds.\n\nArgs:\n  a (int): First: of two.\n  b: Second\n     and last.\n\nRaises:\n  ValueError: never\n",
            "Adds.",
            {"a": "First: of two.", "b": "Second and last."},
        ),
        ("Adds.\n\nParameters\n----------\na : int\n    First.\n", "Adds.", {"a": "First."}),
        ("Adds.\n\n:param a: First.", "Adds.", {"a": "First."}),
        ("Adds.\n\nArgs:\n    a - First", "Adds.\n\nArgs:\n    a - First", {}),
    ],
)
def test_docstrings_of_each_style_and_odd_ones(text, description, arguments):
    assert described(text) == (description, arguments)


@dataclasses.dataclass
class Page:
    title: str
    seen: set[int]


class Answer(pydantic.BaseModel):
    pages: list[Page]


def test_results_become_text():
    page, odd = Page("a", {2}), type("Odd", (), {"__str__": lambda self: "odd"})()
    values = {
        "é": "é",
        '{"a": [1, null]}': {"a": [1, None]},
        "2.5": 2.5,
        "[2]": {2},
        '{"title": "a", "seen": [2]}': page,
        '[{"pages": [{"title": "a", "seen": [2]}]}]': [Answer(pages=[page])],
        '[1, "2026-11-30"]': (each for each in (1, datetime.date(2026, 11, 30))),
        "[1.5, 2.0]": np.array([1.5, 2.0]),
        '{"size": 3}': {"size": np.int64(3)},
        "text": b"text",
        "odd": odd,
        "{(1, 2): 3}": {(1, 2): 3},
        "[[...]]": (circle := []),
    }
    circle.append(circle)
    assert [as_text(value) for value in values.values()] == list(values)


def test_an_iterator_that_raises_is_no_result():
    with pytest.raises(ValueError, match="no page"):
        as_text(int("no page") for _ in range(1))
