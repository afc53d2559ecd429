"""Checks that settings can be paths, on any Linux machine and in this process's locale, or addresses where these may
stand instead. Accesses neither file system nor network."""

from __future__ import annotations

import os
from typing import cast

from slipstream.config.addresses import check_address, is_address
from slipstream.config.bounds import Problems
from slipstream.config.parse.messages import show
from slipstream.config.recipes import BUILT_IN
from slipstream.config.schema import RLConfig, RunConfig
from slipstream.errors import ConfigError

MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255


def named_paths(config: RunConfig) -> dict[str, object]:
    """The settings with paths or names, and their values."""
    named: dict[str, object] = {"model.path": config.model.path, "run.folder": config.run.folder}
    for section in ("data", "lora", "teacher"):
        named[f"{section}.path"] = getattr(getattr(config, section), "path", None)
    named["data.eval_path"] = getattr(config.data, "eval_path", None)
    if (environment := config.environment) is not None:
        sections = {"environment": environment}
        for prefix, part in (
            sections | {f"environment.mixture.{k}": p for k, p in environment.mixture.items()}
        ).items():
            named[f"{prefix}.name"] = part.name
            if part.name in ("rows", "detection"):
                for key in ("path", "eval_path"):
                    named |= _paths_at(f"{prefix}.settings.{key}", part.settings.get(key))
    if isinstance(config.algorithm, RLConfig):
        named |= {f"algorithm.{name}": getattr(config.algorithm, name) for name in BUILT_IN}
    return {key: value for key, value in named.items() if value is not None}


def path_problems(config: RunConfig) -> Problems:
    """A sentence for each setting that names a file and cannot be a path, or a bucket and cannot be one."""
    named, environment = named_paths(config), config.environment
    if environment is not None and is_address(environment.registry):
        try:
            check_address(environment.registry, "environment.registry")
        except ConfigError as error:
            yield str(error)
    elif environment is not None:
        named["environment.registry"] = environment.registry
    for key, value in named.items():
        if reason := unusable_path(str(value)):
            yield f"{key} = {show(str(value))} {reason}"


def _paths_at(key: str, value: object) -> dict[str, object]:
    """The paths in a value that is one, a list of them, or a table."""
    if isinstance(value, dict):
        return {f"{key}.{name}": path for name, path in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return {f"{key}[{number}]": path for number, path in enumerate(cast("list[object]", value))}
    return {key: value}


def unusable_path(text: str) -> str:
    """Why `text` cannot be a path, and the remedy; empty if it can."""
    if "\0" in text:
        return "has a NUL character, which no path can have: remove it"
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        return f"cannot be a path in this locale ({error.encoding}): set LC_ALL=C.UTF-8"
    if len(encoded) > MAX_PATH_BYTES:
        return f"has {len(encoded)} bytes, and a path has at most {MAX_PATH_BYTES}: use a shorter one"
    if (longest := max(len(part) for part in encoded.split(b"/"))) > MAX_NAME_BYTES:
        return f"has a part of {longest} bytes, and a file's name has at most {MAX_NAME_BYTES}: use a shorter one"
    return ""
