"""Program inside the sandboxes of the reward `code`; also the encoding of values from them.

`code_harness.py serve`: loads `program.py`, the model's, and answers calls of its functions, a line of JSON each.
`code_harness.py check`: runs the row's assertions in a sandbox of their own, without the model's program: a name they
do not define is a function of the program, called over the caller. So only plain values leave the program (none with
its own `==`), and nothing it prints, returns or exits with is a verdict.

It imports only the standard library and is started by path.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

PROGRAM = "program.py"
_MAX_LINE = 8 << 20
_ENDS = (StopIteration, StopAsyncIteration)


def encode(value: Any) -> Any:
    """A plain value as JSON with tags. Raises TypeError for any other."""
    if value is None or type(value) in (bool, str, float):
        return value
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, dict):
        return {"d": [[encode(key), encode(part)] for key, part in value.items()]}
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
        if isinstance(value, kind):
            return {tag: [encode(part) for part in value]}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def decode(found: Any) -> Any:
    """Reverses `encode`. Raises ValueError, TypeError or KeyError for anything else."""
    if not isinstance(found, dict):
        if isinstance(found, list):
            raise ValueError("a list without a tag")
        return found
    ((tag, inner),) = found.items()
    makers: dict[str, Callable[[Any], Any]] = {
        "d": lambda pairs: {decode(key): decode(part) for key, part in pairs},
        "l": lambda parts: [decode(part) for part in parts],
        "t": lambda parts: tuple(decode(part) for part in parts),
        "s": lambda parts: {decode(part) for part in parts},
        "f": lambda parts: frozenset(decode(part) for part in parts),
        "b": bytes.fromhex,
        "c": lambda parts: complex(*parts),
    }
    return makers[tag](inner)


def unknown_names(source: str) -> list[str]:
    """Names read, and neither defined nor imported, in Python source."""
    tree = ast.parse(source)
    read: dict[str, None] = {}
    known = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read[node.id] = None
            else:
                known.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return [name for name in read if name not in known]


class _Line:
    """Lines of JSON over the first streams of this process; nothing else here can reach them by accident."""

    def __init__(self) -> None:
        self._in, self._out = os.fdopen(os.dup(0), "rb"), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)

    def read(self) -> Any:
        line = self._in.readline(_MAX_LINE)
        if not line:
            os._exit(0)
        return json.loads(line)

    def write(self, value: Any) -> None:
        data = json.dumps(value).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]


def _program(setup: str) -> dict[str, Any]:
    with open(PROGRAM, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    names: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    if setup:
        exec(compile(setup, "setup.py", "exec"), names)
    exec(compile(source, PROGRAM, "exec"), names)
    return names


def _function(names: dict[str, Any], name: str) -> Any:
    """A function of the program, or a method of its class `Solution`."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    return names[name]


def serve() -> None:
    """Answers `{"call", "args", "kwargs"}` with `{"value"}`, or `{"error", "text"}`."""
    line = _Line()
    names: dict[str, Any] | None = None
    while True:
        asked = line.read()
        try:
            names = _program(asked.get("setup", "")) if names is None else names
            args, kwargs = decode(asked["args"]), decode(asked["kwargs"])
            answer = {"value": encode(_function(names, asked["call"])(*args, **kwargs))}
        except BaseException as error:  # noqa: BLE001 (any error of the program, SystemExit too)
            answer = {"error": type(error).__name__, "text": f"{error}"[:200]}
        line.write(answer)


class _Remote:
    """A function of the program, run elsewhere."""

    def __init__(self, line: _Line, name: str) -> None:
        self._line, self._name = line, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._line.write({"call": self._name, "args": encode(args), "kwargs": encode(kwargs)})
        answer = self._line.read()
        if "value" in answer:
            return decode(answer["value"])
        kind: Any = getattr(builtins, str(answer.get("error")), None)
        # Over the caller's `all(map(f, ...))` a StopIteration would be the end of the values.
        is_error = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS)
        error: Callable[[str], Exception] = kind if is_error else RuntimeError
        raise error(str(answer.get("text")))


def check() -> None:
    """Runs the assertions of the first line, `{"setup", "tests", "entry_point"}`; writes `{"passed": [...]}`, a
    boolean for each, or `{"failed"}` if their setup fails."""
    line = _Line()
    given = line.read()
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    sources = [given["setup"], *given["tests"]]
    for name in dict.fromkeys(name for source in sources for name in unknown_names(source)):
        names[name] = _Remote(line, name)
    if given["entry_point"]:
        names["candidate"] = _Remote(line, given["entry_point"])
    try:
        with _no_exit():
            exec(compile(given["setup"], "setup.py", "exec"), names)
    except Exception as error:  # noqa: BLE001 (the row's code)
        line.write({"failed": f"{type(error).__name__}: {error}"[:200]})
        return
    passed: list[bool] = []
    for source in given["tests"]:
        try:
            with _no_exit():
                exec(compile(source, "test.py", "exec"), dict(names))
            passed.append(True)
        except Exception:  # noqa: BLE001 (a test fails by raising)
            passed.append(False)
    line.write({"passed": passed})


@contextlib.contextmanager
def _no_exit() -> Generator[None]:
    try:
        yield
    except SystemExit as error:
        raise RuntimeError("a test ends the process") from error


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    serve() if sys.argv[1:] == ["serve"] else check()
