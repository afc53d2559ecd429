"""Parses settings on the command line: `--section.key value`, `--section.key=value`, `--section.[no-]flag`.

A value means what it would mean in a TOML file, a bare word is text, and nothing is ignored. Whether the value fits the
key is checked after the settings are merged into the run file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config.parse.keys import Key, all_keys, optional_sections, sections
from slipstream.config.parse.run_file import MAX_DEPTH, unusable
from slipstream.config.parse.suggestions import suggestion
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class Override:
    """One setting from the command line."""

    path: tuple[str, ...]
    """Section, key, and further keys inside a free table; a single name turns a section on or off."""
    value: Any
    flag: str
    """The flag as typed, without its value."""


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parses `arguments` in order. Returns the settings, and a sentence for each argument that cannot be parsed."""
    overrides: list[Override] = []
    problems: list[str] = []
    rest = [_as_utf8(argument) for argument in arguments]
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            problems.append(f"{argument[:60]!r} is not a setting: write --section.key VALUE after the run file")
            continue
        flag, equals, text = argument.partition("=")
        value: str | None = text if equals else None
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        try:
            override = _override(flag, value)
            if problem := unusable(override.value, override.path):
                raise ConfigError(problem)
            overrides.append(override)
        except ConfigError as error:
            problems.append(str(error))
    return overrides, problems


def parse_value(text: str) -> Any:
    """Parses `text` as a TOML value; text that is not TOML is returned as it is. Raises ConfigError for a value that no
    setting can have."""
    try:
        document = tomllib.loads(f"value = [ {text} ]")
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError):  # `int` refuses thousands of digits
        raise ConfigError(f"{text[:20]}... is too long a number or nested too deeply: write a shorter value") from None
    # Brackets, commas and line ends in the text could make it several values.
    is_one_value = list(document) == ["value"] and len(document["value"]) == 1
    return document["value"][0] if is_one_value else text


def _as_utf8(argument: str) -> str:
    """Decodes the argument as UTF-8 whatever the locale. Raises ConfigError."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        shown = argument.encode("ascii", "backslashreplace").decode()
        raise ConfigError(f"{shown[:60]} on the command line is not UTF-8 text: write it in the run file") from None


def _override(flag: str, text: str | None) -> Override:
    names = flag.removeprefix("--").split(".")
    if "" in names:
        raise ConfigError(f"{flag[:60]} is not a setting: write --section.key VALUE")
    if len(names) > MAX_DEPTH:
        raise ConfigError(f"{flag[:60]}... has {len(names)} parts: use at most {MAX_DEPTH}")
    if len(names) == 1:
        return _section_switch(flag, names[0], text)
    path = tuple(part.replace("-", "_") for part in names)
    if key := all_keys().get(".".join(path)):
        return Override(path, _value(flag, key, text), flag)
    section, name = path[:2]
    if len(names) > 2:
        table = all_keys().get(f"{section}.{name}")
        if table is not None and table.is_free:
            return _inside_free_table(flag, (section, name, *names[2:]), text)
        # The longest known prefix shows where the path goes wrong.
        reason = f"{section}.{name} has no keys of its own" if table else suggestion(f"{section}.{name}", names[-1])
        raise ConfigError(f"{flag[:60]} is not a known setting: {reason}")
    if names[1].startswith("no-"):
        positive = all_keys().get(f"{section}.{name.removeprefix('no_')}")
        if positive is not None and positive.is_flag:
            if text is not None:
                raise ConfigError(f"{flag} takes no value, but was given {text[:60]!r}: remove it")
            return Override((section, positive.name), False, flag)
        remedy = f"use --{positive.path} VALUE" if positive else suggestion(f"{section}.{name[3:]}")
        raise ConfigError(f"{flag[:60]} is not a flag that can be turned off: {remedy}")
    raise ConfigError(f"{flag[:60]} is not a known setting: {suggestion(f'{section}.{name}')}")


def _value(flag: str, key: Key, text: str | None) -> Any:
    if text is None:
        if key.is_flag:
            return True
        raise ConfigError(f"{flag} has no value: use {key.requirement}")
    value = parse_value(text)
    return text if key.is_text and not isinstance(value, str) else value


def _inside_free_table(flag: str, path: tuple[str, ...], text: str | None) -> Override:
    if text is not None:
        return Override(path, parse_value(text), flag)
    last = path[-1]
    return Override((*path[:-1], last.removeprefix("no-")), not last.startswith("no-"), flag)


def _section_switch(flag: str, name: str, text: str | None) -> Override:
    """`--evaluation` and `--no-evaluation`; `--data PATH`, as `slipstream sft` has it, sets `data.path`."""
    section = name.removeprefix("no-")
    if name == "data" and text not in (None, "true", "false"):
        return Override(("data", "path"), text, flag)
    if section in optional_sections():
        switched_off = name.startswith("no-")
        if text is None or (not switched_off and text in ("true", "false")):
            return Override((section,), not switched_off and text != "false", flag)
        raise ConfigError(f"{flag} takes no value, but was given {text[:60]!r}: write --{section}.KEY VALUE")
    if section in sections():
        raise ConfigError(f"{flag} is a section: write --{section}.KEY VALUE")
    raise ConfigError(f"{flag[:60]} is not a known setting: {suggestion(name.replace('-', '_'))}")


def apply_override(tree: dict[str, Any], override: Override) -> None:
    """Writes the override into the tree of a run file and creates tables as needed. A value in the place of a table is
    replaced, except a section that is not a table: the schema refuses that."""
    section = override.path[0]
    if len(override.path) == 1:
        if override.value is False:
            tree[section] = False
        elif tree.get(section) is False:
            tree[section] = {}
        return
    if section in tree and not isinstance(tree[section], dict) and tree[section] is not False:
        return
    table: dict[str, Any] = tree
    for name in override.path[:-1]:
        inner = table.get(name)
        table[name] = inner if isinstance(inner, dict) else {}
        table = table[name]
    table[override.path[-1]] = override.value
