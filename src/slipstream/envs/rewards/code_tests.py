"""The reward `code`: the policy's program, run against the row's tests in a sandbox.

Tests are the row's right answer, as JSON or as JSON text:

- `{"inputs": [...], "outputs": [...]}` (verl, PRIME, APPS): each input gets its own run of the program. Its output is
  compared, white space at the ends of lines aside and numbers as numbers;
- the same with `"fn_name"`: inputs are the arguments of a function, or of a method of a class `Solution`;
- a list of assertions (MBPP: also `{"test_list": [...], "test_setup_code": ""}`), or Python source that defines
  `check(candidate)` with `"entry_point"` (HumanEval: `{"test": "def check(candidate): ...", "entry_point": "f"}`).

The right values never enter the sandbox of the program: outputs and values are compared outside of it, assertions run
in another one (`code_harness.py`). The reward is 1 if all tests pass; `tests_passed` is the fraction passed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from slipstream.data.tool_calls import json_or_none
from slipstream.envs.base import RewardFailed, Score
from slipstream.envs.rewards import code_harness
from slipstream.envs.rewards.contract import Checked, Graded, Options, right_answer
from slipstream.envs.rewards.sandbox import Limits, Sandbox, SandboxFailed, why_not
from slipstream.errors import ConfigError, DataError
from slipstream.records import Task

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OPEN_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n", re.MULTILINE)
_HARNESS = Path(code_harness.__file__)
_FORMS = (
    '{"inputs": [...], "outputs": [...]}, the same with "fn_name", a list of assertions, or {"test": "def '
    'check(candidate): ...", "entry_point": ...}'
)
_TOLERANCE = 1e-6


class CodeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the reward `code`."""

    timeout_s: float = 3.0
    """Time limit of one run of the program, or of one call."""
    total_s: float = 0.0
    """Time limit of all tests together; tests not run by then have failed. 0: four fifths of
    `environment.reward_timeout_s`."""
    memory_mib: int = 1024
    processes: int = 16
    folder_mib: int = 64
    output_mib: float = 4.0
    max_tests: int = 0
    """Most tests of a row to run, the first ones; 0: all."""


class Tests(msgspec.Struct, frozen=True):
    """A row's tests."""

    kind: Literal["runs", "calls", "assertions"]
    inputs: list[Any] = []
    outputs: list[Any] = []
    function: str = ""
    setup: str = ""


class Code(Graded):
    """The reward `code`. Raises `ConfigError` if the sandbox cannot be made."""

    name = "code"
    answer_is_gold = False

    def __init__(self, options: Options | None = None, setting: str = "reward") -> None:
        options = options or Options()
        try:
            self._given = msgspec.convert(dict(options.code), CodeLimits)
        except msgspec.ValidationError as error:
            fields = ", ".join(CodeLimits.__struct_fields__)
            raise ConfigError(f"environment.settings.code: {error}: it has {fields}") from None
        given = self._given
        if min(given.timeout_s, given.memory_mib, given.processes, given.folder_mib, given.output_mib) <= 0:
            raise ConfigError("environment.settings.code has a limit that is not greater than 0: correct it")
        self._total_s = given.total_s or 0.8 * options.reward_timeout_s
        if self._total_s >= options.reward_timeout_s:
            raise ConfigError(
                f"environment.settings.code.total_s = {self._total_s:g} is not below environment.reward_timeout_s = "
                f"{options.reward_timeout_s:g}, at which the reward is killed: lower it, or raise that"
            )
        self._limits = Limits(
            namespaces=options.sandbox == "namespaces",
            memory_mib=given.memory_mib,
            processes=given.processes,
            folder_mib=given.folder_mib,
            output_mib=given.output_mib,
        )
        if reason := why_not(self._limits):
            if options.sandbox == "limits":
                raise ConfigError(f"{setting} = code cannot run a program here ({reason}): correct it")
            raise ConfigError(
                f"{setting} = code needs a sandbox, and this machine gives no namespaces for one ({reason}): allow "
                "user namespaces, or accept limits alone, with network and your files in reach of what the model "
                'writes, by environment.settings.sandbox = "limits"'
            )

    def check(self, rows: Sequence[Checked]) -> None:
        """Raises `DataError` for unreadable tests."""
        for where, task in rows:
            try:
                read_tests(right_answer(task))
            except ValueError as error:
                raise DataError(f'{where}: {error}, and reward = "code" runs tests: give {_FORMS}') from None

    def grade(self, task: Task, answer: str) -> Score:
        """See the module."""
        try:
            tests = read_tests(right_answer(task))
        except ValueError as error:
            raise RewardFailed(f"task {task.id}: {error}: give {_FORMS}") from None
        if most := self._given.max_tests:
            tests = msgspec.structs.replace(tests, inputs=tests.inputs[:most], outputs=tests.outputs[:most])
        program = program_of(answer)
        try:
            compile(program, "program.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return Score(0.0, {"tests_passed": 0.0, "runs": 0.0})
        run = {"runs": self._runs, "calls": self._calls, "assertions": self._assertions}[tests.kind]
        try:
            passed = run(program, tests, time.monotonic() + self._total_s)
        except SandboxFailed as error:
            raise RewardFailed(f"the sandbox of reward code could not be made: {error}") from None
        part = sum(passed) / len(tests.inputs)
        return Score(float(part == 1.0), {"tests_passed": part, "runs": 1.0})

    def _sandbox(self, files: Mapping[str, str], command: Sequence[str], seconds: float) -> Sandbox:
        return Sandbox(files, command, self._limits, seconds)

    def _runs(self, program: str, tests: Tests, due: float) -> list[bool]:
        passed: list[bool] = []
        for given, expected in zip(tests.inputs, tests.outputs, strict=True):
            start = time.monotonic()
            if start >= due:
                break
            with self._sandbox({"main.py": program}, ["main.py"], self._given.timeout_s) as sandbox:
                data = _text(given).encode(errors="surrogatepass")
                found = sandbox.run(data, min(due, start + self._given.timeout_s))
            same = found.status == 0 and same_output(found.output.decode(errors="replace"), _text(expected))
            passed.append(same)
        return passed

    def _calls(self, program: str, tests: Tests, due: float) -> list[bool]:
        passed: list[bool] = []
        with self._served(program, "", due) as ask:
            for given, expected in zip(tests.inputs, tests.outputs, strict=True):
                if time.monotonic() >= due:
                    break
                answer = ask({"call": tests.function, "args": code_harness.encode(given), "kwargs": {"d": []}})
                passed.append(answer is not None and _same_value(answer, expected))
        return passed

    def _assertions(self, program: str, tests: Tests, due: float) -> list[bool]:
        """Passes calls from the tests' own sandbox to the program's."""
        files = {"harness.py": _HARNESS.read_text(encoding="utf-8")}
        given = {"setup": tests.setup, "tests": tests.inputs, "entry_point": tests.function}
        with (
            self._sandbox(files, ["harness.py", "check"], self._total_s) as checker,
            self._served(program, tests.setup, due) as ask,
        ):
            checker.send(json.dumps(given).encode(), due)
            while (line := checker.receive(due)) is not None:
                asked = _decoded(line)
                if "passed" in asked:
                    return [found is True for found in asked["passed"]]
                if "failed" in asked:
                    raise RewardFailed(f"the setup of the row's assertions raised {asked['failed']}: correct it")
                checker.send(ask(asked) or b'{"error": "RuntimeError", "text": "the program hangs or has ended"}', due)
        if time.monotonic() < due:
            raise RewardFailed("the process of the row's assertions ended without a verdict: correct them")
        return []

    @contextlib.contextmanager
    def _served(self, program: str, setup: str, due: float) -> Generator[Callable[[Mapping[str, Any]], bytes | None]]:
        """Gives a function, for the time of the block, to call the program's functions. It returns the answer, or None
        if the answer is late or not our harness's. The next call then gets another process."""
        files = {"harness.py": _HARNESS.read_text(encoding="utf-8"), code_harness.PROGRAM: program}
        server: Sandbox | None = None

        def ask(asked: Mapping[str, Any]) -> bytes | None:
            nonlocal server
            if server is None:
                server = self._sandbox(files, ["harness.py", "serve"], max(1.0, due - time.monotonic()))
                asked = {**asked, "setup": setup}
            late = min(due, time.monotonic() + self._given.timeout_s)
            server.send(json.dumps(asked).encode(), late)
            answer = server.receive(late)
            if answer is not None and _decoded(answer):
                return answer
            server.end()
            server = None
            return None

        try:
            yield ask
        finally:
            if server is not None:
                server.end()


def program_of(answer: str) -> str:
    """The last fenced block of an answer, closed or not; without any, the whole answer."""
    if blocks := _BLOCK.findall(answer):
        rest = answer[answer.rindex(blocks[-1]) + len(blocks[-1]) :]
        rest = rest.partition("```")[2]
        opened = _OPEN_BLOCK.search(rest)
        return rest[opened.end() :] if opened and rest[opened.end() :].strip() else str(blocks[-1])
    opened = _OPEN_BLOCK.search(answer)
    return answer[opened.end() :] if opened else answer


def read_tests(answer: Any) -> Tests:
    """Reads a row's tests. Raises ValueError with their fault."""
    if isinstance(answer, str):
        if answer.lstrip()[:1] not in ("{", "["):
            return _assertions([answer], "", "")
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the answer is no JSON ({error})") from None
    if isinstance(answer, list):
        return _assertions(cast("list[Any]", answer), "", "")
    if not isinstance(answer, Mapping):
        raise ValueError(f"the answer {answer!r:.60} is a {type(answer).__name__}")
    table = cast("Mapping[str, Any]", answer)
    entry, function = (_function_name(table.get(key)) for key in ("entry_point", "fn_name"))
    setup = table.get("test_setup_code") or table.get("setup") or ""
    if "test" in table:
        return _assertions([f"{table['test']}\ncheck(candidate)" if entry else table["test"]], setup, entry)
    for name in ("test_list", "assert_case", "asserts"):
        if name in table:
            return _assertions(table[name], setup, entry)
    inputs, outputs = table.get("inputs", table.get("input")), table.get("outputs", table.get("output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"the answer has the keys {', '.join(sorted(map(str, table))) or 'none'}")
    pairs = (cast("list[Any]", inputs), cast("list[Any]", outputs))
    if len(pairs[0]) != len(pairs[1]) or not pairs[0]:
        raise ValueError(f"the answer has {len(pairs[0])} inputs and {len(pairs[1])} outputs")
    if not function:
        return Tests("runs", *pairs)
    return Tests("calls", *_arguments(*pairs), function)


def _function_name(given: Any) -> str:
    if not given:
        return ""
    if not isinstance(given, str) or not given.isidentifier():
        raise ValueError(f"{given!r:.60} is no name of a function or method")
    return given


def _arguments(inputs: list[Any], outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Arguments and values of calls; as text they are JSON, an argument a line."""
    args: list[Any] = []
    values: list[Any] = []
    for given, expected in zip(inputs, outputs, strict=True):
        if isinstance(given, str):
            try:
                given = [json.loads(line) for line in given.split("\n") if line.strip()]
                expected = json.loads(expected) if isinstance(expected, str) else expected
            except (ValueError, RecursionError) as error:
                raise ValueError(f"arguments of {given!r:.60} are no JSON ({error})") from None
        elif not isinstance(given, list):
            raise ValueError(f"arguments {given!r:.60} are a {type(given).__name__}, not a list")
        args.append(tuple(cast("list[Any]", given)))
        values.append(expected)
    return args, values


def _assertions(tests: Any, setup: Any, entry: str) -> Tests:
    lines = cast("list[Any]", tests) if isinstance(tests, list) else [tests]
    if not lines or not all(isinstance(line, str) and line.strip() for line in lines) or not isinstance(setup, str):
        raise ValueError(f"the assertions {tests!r:.60} are no texts")
    for source in (*lines, setup):
        try:
            compile(source, "test.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{source!r:.60} is no Python ({error})") from None
    if not entry and not any(code_harness.unknown_names(line) for line in lines):
        raise ValueError(f"the assertions {lines[0]!r:.60} call no function of the program")
    if not any(_can_fail(source) for source in (*lines, setup)):
        raise ValueError(f"the assertions {lines[0]!r:.60} assert nothing, and any program would pass")
    return Tests("assertions", lines, lines, entry, setup)


def _can_fail(source: str) -> bool:
    """Whether Python source asserts or raises, by itself or by a function such as `self.assertEqual`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Attribute) and node.attr.startswith("assert"):
            return True
    return False


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are equal, white space at the ends aside and numbers as numbers."""
    ours, theirs = found.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(ours) == len(theirs) and all(
        left.rstrip() == right.rstrip()
        or (len(left.split()) == len(right.split()) and all(map(_same_word, left.split(), right.split())))
        for left, right in zip(ours, theirs, strict=True)
    )


def _same_word(our: str, their: str) -> bool:
    if our == their:
        return True
    if not {".", "e", "E"} & {*their}:  # whole numbers and words are exact
        return False
    try:
        left, right = float(our), float(their)
        exponent = Decimal(their).as_tuple().exponent
    except (ValueError, ArithmeticError):
        return False
    if not math.isfinite(right) or not isinstance(exponent, int):
        return False
    # A rounded number is right to its last digit; near 0 a millionth would be the whole number.
    return abs(left - right) <= max(_TOLERANCE * abs(right), min(_TOLERANCE, 0.5 * 10.0**exponent))


def _same_value(line: bytes, expected: Any) -> bool:
    """Whether a call gave the expected value; as in APPS, this may also be the only element of a list."""
    try:
        value = _as_json(code_harness.decode(_decoded(line)["value"]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return False
    if value == expected:
        return True
    return isinstance(expected, list) and len(cast("list[Any]", expected)) == 1 and value == expected[0]


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        return {key if isinstance(key, str) else json.dumps(key): _as_json(part) for key, part in table.items()}
    return value


def _text(value: Any) -> str:
    """An input or output as text; some data sets store lines as a list."""
    return "\n".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def _decoded(line: bytes) -> dict[str, Any]:
    found = json_or_none(line)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
