"""A user's losses, advantages, credits and classes of hooks: `path/to/file.py:name`, or an entry point of another
package.

Guarantee: every error in loading them is a ConfigError with the setting's name. Loading a file runs its code.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from slipstream.config.parse.suggestions import closest
from slipstream.config.recipes import BUILT_IN
from slipstream.config.schema import RLConfig
from slipstream.config.user_code import import_file
from slipstream.errors import ConfigError, one_line

GROUPS = {
    "advantage": "slipstream.advantages",
    "credit": "slipstream.credits",
    "hooks": "slipstream.algorithms",
    "loss": "slipstream.losses",
}
_ARGUMENTS = {"advantage": "rewards_S, group_ids_S", "credit": "group", "loss": "inputs"}
Kind = Literal["advantage", "credit", "hooks", "loss"]


@cache
def user_function(kind: Kind, name: str) -> Callable[..., Any]:
    """The function, or with `hooks` the class, named by a setting of [algorithm]."""
    setting, noun = f"algorithm.{kind}", "class" if kind == "hooks" else "function"
    path, colon, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
    if path.endswith(".py"):
        if not colon:
            raise ConfigError(f"{setting} = {name!r} names a file and no {noun} in it: write {name}:{noun}")
        function = getattr(import_file(Path(path), setting), attribute, None)
        if function is None:
            raise ConfigError(f"{setting}: {path} has no {noun} {attribute!r}: correct the name")
    else:
        function = _from_entry_point(kind, name, setting)
    if kind == "hooks":
        return cast("Callable[..., Any]", function)
    if not callable(function):
        raise ConfigError(f"{setting}: {name} is not a function: define {attribute or name}({_ARGUMENTS[kind]})")
    try:
        inspect.signature(function).bind(*_ARGUMENTS[kind].split(", "))
    except TypeError as error:
        raise ConfigError(f"{setting}: {name} cannot be called with ({_ARGUMENTS[kind]}): {error}") from error
    return function


def _from_entry_point(kind: Kind, name: str, setting: str) -> object:
    points = importlib.metadata.entry_points(group=GROUPS[kind])
    if name not in points.names:
        near = closest(name, [*BUILT_IN[kind], *points.names])
        known = ", ".join([*BUILT_IN[kind], *sorted(points.names)])
        remedy = f"did you mean {near!r}?" if near else f"use one of {known}, or path/to/file.py:function"
        raise ConfigError(f"{setting} = {name!r} is neither built in nor an entry point of {GROUPS[kind]}: {remedy}")
    try:
        return points[name].load()
    except (Exception, SystemExit) as error:  # the package's code may raise anything
        raise ConfigError(f"{setting}: entry point {name!r} cannot be loaded: {one_line(error)}") from error


def reads_reference(settings: RLConfig) -> bool:
    """Whether a frozen copy of the initial model belongs to the run: for a KL term, or for a hook."""
    if settings.kl_coef > 0 or settings.hooks is None:
        return settings.kl_coef > 0
    return "reference_logprobs" in getattr(user_function("hooks", settings.hooks), "reads", ())
