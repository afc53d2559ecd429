"""User-defined losses, advantages and credits: `path/to/file.py:function`, or an entry point of another package.

Guarantees: every error in it is a ConfigError that names the setting; `check_user_function` finds it before any process
is started, by calling the function on made-up inputs. Loading a file runs its code.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.algo.surrogate_losses import LossInputs, PolicyLoss
from slipstream.config.parse.suggestions import closest
from slipstream.config.recipes import BUILT_IN
from slipstream.config.user_code import import_file, place_of
from slipstream.errors import ConfigError, one_line

GROUPS = {"advantage": "slipstream.advantages", "credit": "slipstream.credits", "loss": "slipstream.losses"}
_ARGUMENTS = {"advantage": "rewards_S, group_ids_S", "credit": "group", "loss": "inputs"}
Kind = Literal["advantage", "credit", "loss"]


@cache
def user_function(kind: Kind, name: str) -> Callable[..., Any]:
    """The function that `algorithm.advantage` or `algorithm.loss` names."""
    setting = f"algorithm.{kind}"
    path, colon, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
    if path.endswith(".py"):
        if not colon:
            raise ConfigError(f"{setting} = {name!r} names a file and no function in it: write {name}:function")
        function = getattr(import_file(Path(path), setting), attribute, None)
        if function is None:
            raise ConfigError(f"{setting}: {path} has no function {attribute!r}: correct the name")
    else:
        function = _from_entry_point(kind, name, setting)
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
    except (Exception, SystemExit) as error:  # the package's code, whatever it raises
        raise ConfigError(f"{setting}: entry point {name!r} cannot be loaded: {one_line(error)}") from error


def check_user_function(kind: Kind, name: str) -> None:
    """Call the function on six made-up tokens of three sequences; raises ConfigError for what cannot train."""
    if name == "auto" or name in BUILT_IN[kind]:
        return
    function, setting = user_function(kind, name), f"algorithm.{kind}: {name}"
    logprobs_N = torch.tensor([-0.5, -1.0, -0.1, -2.0, -0.7, -0.2], requires_grad=True)
    old_N = logprobs_N.detach() + 0.05
    advantages_N, index_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.5]), torch.tensor([0, 0, 0, 1, 1, 2])
    entropy_N = torch.linspace(0.2, 1.2, 6, requires_grad=True)
    streams = {"behaviour_logprobs": old_N - 0.02}
    made_up = LossInputs(logprobs_N, old_N, advantages_N, index_N, 3, 0.2, 0.28, None, streams, entropy_N)
    try:
        if kind == "advantage":
            result = function(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([0, 0, 1]))
        else:
            result = function(made_up)
    except Exception as error:  # the user's code, whatever it raises
        raise ConfigError(
            f"{setting} raised {one_line(error)} on six made-up tokens ({place_of(error)}): correct it"
        ) from error
    values = result.loss_N if isinstance(result, PolicyLoss) else result
    size, unit = (3, "reward") if kind == "advantage" else (6, "token")
    if not isinstance(values, Tensor) or values.shape != (size,):
        found = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(f"{setting} returned {found} for {size} {unit}s: return a tensor with one number for each")
    if not torch.isfinite(values).all():
        raise ConfigError(f"{setting} returned {values.tolist()} for finite inputs: return finite numbers")
    if kind == "loss" and not values.requires_grad:
        raise ConfigError(f"{setting} returned a loss without a gradient: make it depend on inputs.logprobs_N")
