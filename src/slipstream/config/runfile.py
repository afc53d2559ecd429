"""Reads a run file: its tables, and the line on which each key stands.

Guarantees: any file that cannot be read is one ConfigError that names it. The meaning of keys is not known
here.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.keys import flatten
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class RunFile:
    """A parsed run file."""

    path: Path
    tables: dict[str, Any]
    lines: dict[str, int]
    """The line of every leaf, by dotted path, and of every `[section]` header."""

    def where(self, path: str) -> str:
        """`run.toml:12` for a key or header in the file, else `run.toml`."""
        line = self.lines.get(path)
        return self.path.name if line is None else f"{self.path.name}:{line}"


def read_run_file(path: Path | str) -> RunFile:
    """The run file at `path`; raises ConfigError when there is none, or when it is not TOML."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"run file {path} does not exist: give the path of a .toml file") from None
    except IsADirectoryError:
        raise ConfigError(f"run file {path} is a folder: give the path of a .toml file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"run file {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = ": write texts in quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"run file {path} is not valid TOML: {error}{hint}") from None
    return RunFile(path, tables, _lines(text))


def _lines(text: str) -> dict[str, int]:
    """The line of every key and header of a valid TOML document.

    A statement is the shortest run of lines that is TOML by itself, so strings and lists over several lines
    need no care: none of their beginnings parses.
    """
    found: dict[str, int] = {}
    section: tuple[str, ...] = ()
    statement: list[str] = []
    start = 1
    for number, line in enumerate(text.splitlines(), start=1):
        statement.append(line)
        try:
            parsed = tomllib.loads("\n".join(statement))
        except tomllib.TOMLDecodeError:
            continue
        if line.lstrip().startswith("[") and len(statement) == 1:
            section = _header(parsed)
            found.setdefault(".".join(section), start)
        elif parsed:
            for path, _ in flatten(section, parsed):
                found[path] = start
        statement, start = [], number + 1
    return found


def _header(parsed: dict[str, Any]) -> tuple[str, ...]:
    path: list[str] = []
    table: Any = parsed
    while table:
        if isinstance(table, list):  # [[section]]
            table = table[0]
            continue
        name, table = next(iter(table.items()))
        path.append(name)
    return tuple(path)
