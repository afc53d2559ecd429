"""Reads a run file: its tables, and the line number of each key.

A file that cannot be read raises one ConfigError that names it, in time linear in its length. Integers have 64 bits,
and tables and lists are nested at most `MAX_DEPTH` deep, so that values can be copied, shown and written again. The
meaning of keys is not checked here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.parse.keys import dotted, flatten
from slipstream.config.schema import ArgumentsConfig
from slipstream.errors import ConfigError

MAX_BYTES = 1 << 22
MAX_DEPTH = 32
_TOKEN = re.compile(
    r'''"""(?:[^"\\]|\\.|"(?!""))*"{3,5}|\'{3}(?:[^']|'(?!''))*\'{3,5}'''
    r"""|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\#[^\n]*|[\[\]{}\n]""",
    re.DOTALL,
)
"""Tokens that determine where a statement of a valid TOML document ends: strings, comments, brackets, line ends."""


_OLD = re.compile(rf"^({'|'.join(ArgumentsConfig.model_fields)})(?= =)", re.MULTILINE)
"""Former keys of [algorithm] in the `resolved.toml` of earlier runs; now they are arguments."""
_APART = re.compile(r"^apart = (true|false)\b", re.MULTILINE)
"""`environment.processes` there."""


@dataclass(frozen=True)
class RunFile:
    """A parsed run file."""

    path: Path
    tables: dict[str, Any]
    lines: dict[str, int]
    """The line of every leaf, by dotted path, and of every `[section]` header; 0 where it is on none."""

    def where(self, path: str) -> str:
        """`run.toml:12` for a key or header in the file, else `run.toml`."""
        line = self.lines.get(path)
        return self.path.name if not line else f"{self.path.name}:{line}"


def read_run_file(path: Path | str) -> RunFile:
    """The run file at `path`; raises ConfigError when there is none, or when it is not TOML."""
    path = Path(path)
    text = _read_text(path)
    if path.name == "resolved.toml":
        text = _OLD.sub(r"arguments.\1", text)
        text = _APART.sub(lambda found: f"processes = {int(found[1] == 'true')}", text)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = ": write texts in quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"run file {path} is not valid TOML: {error}{hint}") from None
    except RecursionError:
        raise ConfigError(f"run file {path} nests lists or tables too deeply: use at most {MAX_DEPTH} levels") from None
    except ValueError:  # `int` refuses thousands of digits
        line = next((number for number, statement in _statements(text) if _has_long_integer(statement)), 1)
        raise ConfigError(f"an integer of thousands of digits: use a smaller number ({path.name}:{line})") from None
    if problem := unusable(tables):
        raise ConfigError(f"run file {path}: {problem}")
    return RunFile(path, tables, _lines(text))


def unusable(value: Any, path: tuple[str, ...] = ()) -> str:
    """Why a parsed value cannot be a setting, with the path of the part that is wrong; empty if it can."""
    waiting = [(path, value, 0)]
    while waiting:
        at, inner, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"{dotted(at[:2])} nests lists or tables too deeply: use at most {MAX_DEPTH} levels"
        if isinstance(inner, int) and not -(1 << 63) <= inner < 1 << 63:
            return f"{dotted(at)} is an integer of {inner.bit_length()} bits, and TOML's have 64: use a smaller number"
        if isinstance(inner, dict):
            waiting += [((*at, name), each, depth + 1) for name, each in inner.items()]
        elif isinstance(inner, list):
            waiting += [(at, each, depth + 1) for each in inner]
    return ""


def _read_text(path: Path) -> str:
    if "\0" in str(path):
        raise ConfigError(f"run file {str(path)!r} has a NUL in its name: give the path of a .toml file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"run file {path} does not exist: give the path of a .toml file") from None
    except IsADirectoryError:
        raise ConfigError(f"run file {path} is a folder: give the path of a .toml file") from None
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"run file {path} is larger than {MAX_BYTES >> 20} MiB: give the path of a .toml file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"run file {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None


def _lines(text: str) -> dict[str, int]:
    """Line numbers of all keys and headers of a valid TOML document."""
    found: dict[str, int] = {}
    section: tuple[str, ...] = ()
    for number, statement in _statements(text.replace("\r\n", "\n")):
        parsed = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            section = _header(parsed)
            found.setdefault(dotted(section), number)
        else:
            for path, _ in flatten(section, parsed):
                found[path] = number
    return found


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of a valid TOML document, comments and empty lines included, each with its first line number."""
    begin, number, line, depth = 0, 1, 1, 0
    for token in _TOKEN.finditer(text):
        found = token.group()
        line += found.count("\n")
        depth += (found in ("[", "{")) - (found in ("]", "}"))
        if found == "\n" and depth == 0:
            yield number, text[begin : token.start()]
            begin, number = token.end(), line
    yield number, text[begin:]


def _has_long_integer(statement: str) -> bool:
    try:
        tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return False
    except ValueError:
        return True
    return False


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
