"""Writes a config as TOML, with the origin of each value as a comment.

The text loads again to the same config. Keys without effect are written as comments, because setting them would be
refused.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.bounds import Section
from slipstream.config.checks import inapplicable, reason_against
from slipstream.config.parse.keys import (
    CONTROL,
    dotted,
    leaves,
    optional_sections,
    quoted,
    sections,
    with_values,
)
from slipstream.config.parse.load import DEFAULT, Loaded
from slipstream.config.schema import RunConfig


@dataclass(frozen=True)
class Derived:
    """A value that the plan derived in the place of `auto`, or of a value that does not fit."""

    name: str
    """`section.key`."""
    value: Any
    reason: str


def dump_resolved(loaded: Loaded, derived: Sequence[Derived] = ()) -> str:
    """The config with the derived values as TOML text, each line followed by the origin of its value."""
    config = with_values(loaded.config, {item.name: item.value for item in derived})
    comments = loaded.origins | {item.name: f"derived: {item.reason}" for item in derived}
    reasons = inapplicable(config)
    lines: list[str] = []
    for section in optional_sections():
        # Keys of the root can only stand before the first table.
        if getattr(config, section) is None:
            lines.append(f"{section} = false  # {_one_line(comments.get(section, DEFAULT))}")
    for section in sections():
        if getattr(config, section) is None:
            continue
        rows: list[tuple[str, str]] = []
        for path, value in leaves(config, section):
            name, comment = path.removeprefix(f"{section}."), comments.get(path, DEFAULT)
            if value is None:
                rows.append((f"# {name} is not set", comment))
            elif against := reason_against(path, reasons):
                rows.append((f"# {name} = {toml_value(value)}", against))
            else:
                rows.append((f"{name} = {toml_value(value)}", comment))
        lines += ["", f"[{section}]", *_aligned(rows)]
    return "\n".join(lines).lstrip("\n") + "\n"


def dump_given(loaded: Loaded) -> str:
    """The user's own settings as TOML with absolute paths: it loads to the same config in any folder."""
    config, origins = loaded.config, loaded.origins
    lines = [f"{name} = false" for name in optional_sections() if getattr(config, name) is None]
    for section in sections():
        rows = [
            f"{path.removeprefix(section + '.')} = {toml_value(value)}"
            for path, value in leaves(config, section)
            if origins.get(path, DEFAULT) != DEFAULT and value is not None
        ]
        is_asked_for = section not in optional_sections() and RunConfig.model_fields[section].get_default() is None
        if getattr(config, section) is not None and (rows or is_asked_for):
            lines += ["", f"[{section}]", *rows]
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """`value` as TOML, on one line. Raises TypeError for types that TOML does not have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str | Path):
        return quoted(str(value))
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Section):
        return toml_value(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        pairs = (f"{dotted((name,))} = {toml_value(inner)}" for name, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(inner) for inner in value)}]"
    raise TypeError(f"{value!r} has no form in TOML")


def _one_line(text: str) -> str:
    return " ".join(CONTROL.sub(" ", text).split())


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(setting) for setting, _ in rows if len(setting) <= 48), default=0)
    return [f"{setting:<{width}}  # {_one_line(comment)}" for setting, comment in rows]
