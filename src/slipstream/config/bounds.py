"""What the sections of a run file are made of: their base class, and bounded types of numbers.

A bound is where a value is certainly a typing error, or where a library below would refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

GIB = 1 << 30
"""Bytes of one unit of a setting named `..._gib`."""
KEPT_FEATURES = 1 << 30
"""Bytes of images' features that the trainer keeps between steps; a 4B model has 20 MB for an image of 1,000 tokens."""
TOWER_PATCHES = 16_384
"""Patches that a vision tower computes at once, but at least one image."""


class Section(BaseModel):
    """Base of every section: unknown keys and infinite numbers are refused, values never change later."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


Problems = Iterator[str | tuple[str, str]]
"""Settings that cannot be run together. A sentence begins with the key to blame; a pair (key, sentence) names another
one."""


def keyed(problems: Iterable[str | tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The key of each problem, and the sentence."""
    for problem in problems:
        yield (problem.partition(" ")[0], problem) if isinstance(problem, str) else problem


def put(tables: dict[str, Any], path: str, value: Any) -> None:
    """Replace the value at `path`, such as `section.key`, in nested tables."""
    *above, key = path.split(".")
    for name in above:
        tables = tables[name]
    tables[key] = value


Rule = tuple[bool, str, str]
"""Whether it holds, the keys without an effect then, with spaces between them, and the reason."""


def without_effect(rules: Iterable[Rule]) -> dict[str, str]:
    """The keys of all rules in force, each with the reason."""
    return {key: reason for holds, keys, reason in rules if holds for key in keys.split()}


Auto = Literal["auto"]
"""The plan replaces it by a value."""
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""As NumPy and vLLM take them."""
LONGEST_S = 604_800.0
Seconds = Annotated[float, Field(gt=0.0, le=LONGEST_S)]
"""Up to a week: the operating system counts the milliseconds of a wait in 31 bits."""
Temperature = Annotated[float, Field(ge=0.01, le=2.0)]
"""What vLLM draws at; a lower one it would raise to 0.01."""
GreedyTemperature = Annotated[float, Field(ge=0.0, le=2.0)]
"""The same, and 0 for the likeliest token."""
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
"""A learning rate."""
Factor = Annotated[float, Field(gt=0.0, le=1e12)]
"""A weight or bound that float32 can be multiplied by."""
NonNegativeFactor = Annotated[float, Field(ge=0.0, le=1e12)]
Times = Annotated[int, Field(gt=0, le=1000)]
"""How often something is repeated."""
UpToThousand = Annotated[int, Field(ge=0, le=1000)]
Processes = Annotated[int, Field(gt=0, le=256)]
"""Of one machine."""
EnvironmentProcesses = Annotated[int, Field(ge=0, le=64)]
Threads = Annotated[int, Field(gt=0, le=1024)]
GroupSize = Annotated[int, Field(gt=0, le=10_000)]
Tokens = Annotated[int, Field(gt=0, le=1_000_000_000)]
Items = Annotated[int, Field(gt=0, le=100_000_000)]
"""Steps, prompts, tasks."""
NonNegativeItems = Annotated[int, Field(ge=0, le=100_000_000)]
Gibibytes = Annotated[float, Field(gt=0.0, le=65_536.0)]
