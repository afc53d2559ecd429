"""The reward `math`: a mathematical answer, compared with the right one by the library `math-verify`.

Right answers are LaTeX (`\\frac{1}{2}`, `$x^2$`), text with a `\\boxed{...}`, GSM8K's `... #### 72`, or plain numbers
and expressions; of completions math-verify takes the boxed answer, other LaTeX, or the last expression.

Sympy may compute for ever on a policy's text. math-verify's own time limits are alarm signals. These work in a main
thread only, and others may have taken them; they are off here, and the reward's worker is killed instead. Right
answers are parsed before a run in other processes, killed at their deadline, too.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

from slipstream.envs.base import RewardFailed, Score
from slipstream.envs.rewards.contract import Checked, Graded, right_answers, texts_of
from slipstream.errors import ConfigError, DataError
from slipstream.records import Task

PARSE_S = 10.0
"""Time limit of one right answer at the start."""
CHECK_S = 60.0
"""Time limit of all of them; the rest are parsed when needed."""
_PLAIN = re.compile(r"\s*-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?\s*")
_IN_LATEX = re.compile(r"\\boxed|\\fbox|\$|\\\(|\\\[")
_CURRENCY_AFTER_MINUS = re.compile(r"(?<![\w.)%])(?<!\d\$)-(?:(\$)|\\\$|[\u20ac\u00a3\u00a5\u20b9]) ?(?=[\d\\.])")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,2})(?!\w)")
_PROSE = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]{2,}(\s+[A-Za-z]{2,}){2,}")


class Math(Graded):
    """1 if math-verify finds the answer equal to a right one. The metric `answer_found` is 0 if nothing in the
    completion could be parsed."""

    name = "math"

    def __init__(self, setting: str) -> None:
        try:
            import math_verify  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError as error:
            raise ConfigError(
                f"{setting} = math needs the package math-verify, which cannot be imported ({error}): pip install "
                "'slipstream[math]'"
            ) from error

    def check(self, rows: Sequence[Checked]) -> None:
        """Raises `DataError` for an unparseable right answer."""
        places: dict[str, str] = {}
        for where, answer in texts_of(rows, self.name):
            if not _PLAIN.fullmatch(answer):
                places.setdefault(answer, where)
        for answer, reason in _unparseable(list(places)):
            raise DataError(
                f'{places[answer]}: the answer {answer!r:.80} {reason}, which reward = "math" needs: write it as LaTeX '
                "or a number, remove the row, or use another reward"
            )

    def grade(self, task: Task, answer: str) -> Score:
        """See the class."""
        from math_verify import parse, verify

        _quiet()
        found = parse(_readable(answer), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        is_right = False
        for right in right_answers(task) if found else []:
            if not (gold := _parsed(str(right))):
                raise RewardFailed(
                    f"the right answer {right!r:.80} of task {task.id} cannot be parsed: correct the row"
                )
            if verify(list(gold), found, timeout_seconds=None):  # pyright: ignore[reportArgumentType]
                is_right = True
                break
        return Score(float(is_right), {"answer_found": float(bool(found))})


def right_expression(answer: str) -> str:
    """The parsed part of a right answer, in LaTeX for math-verify."""
    _, marked, last = answer.rpartition("####")
    text = _readable(last if marked else answer)
    return text if _IN_LATEX.search(text) else f"\\boxed{{{text.strip()}}}"


def _readable(text: str) -> str:
    """The text with signs and exponents as math-verify reads them: it takes the minus sign of typographers for
    none, loses the one of `-$5`, and reads `1.5e3` as 1.5."""
    text = _CURRENCY_AFTER_MINUS.sub(r"\1-", text.replace("\u2212", "-"))
    return _EXPONENT.sub(lambda found: f"{Decimal(f'{found[1]}e{found[2]}'):f}", text)


@functools.lru_cache(maxsize=4096)
def _parsed(answer: str) -> tuple[Any, ...]:
    """A right answer, parsed; empty if it is no mathematics."""
    from math_verify import parse

    _quiet()
    if _PROSE.search(text := right_expression(answer)) and not _IN_LATEX.search(answer):
        return ()
    found: list[Any] = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return tuple(found) if any(not isinstance(part, str) for part in found) else ()


@functools.cache
def _quiet() -> None:
    """Silences the warning about time limits being off."""
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)


def _unparseable(answers: Sequence[str]) -> list[tuple[str, str]]:
    """The first unparseable one of these right answers, and why; empty if there is none."""
    if not answers:
        return []
    share = -(-len(answers) // max(1, min(len(os.sched_getaffinity(0)), len(answers) // 50)))
    parts = [answers[start : start + share] for start in range(0, len(answers), share)]
    with ThreadPoolExecutor(len(parts)) as threads:
        return [found for found in threads.map(_first_unparseable, parts) if found is not None][:1]


def _first_unparseable(answers: Sequence[str]) -> tuple[str, str] | None:
    """The first answer another process cannot parse, and why; None if there is none, or none in `CHECK_S`."""
    command = (sys.executable, "-P", "-c", f"from {__name__} import parse_all; parse_all({PARSE_S})")
    given = json.dumps(answers).encode()
    try:
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    num_right = done.stdout.count(b"+")
    if num_right == len(answers):
        return None
    if done.stdout.endswith(b"-"):
        return answers[num_right], "is not mathematics that math-verify can parse"
    if done.returncode == -signal.SIGALRM:
        return answers[num_right], f"takes more than {PARSE_S:g} s to parse and compare"
    return answers[num_right], "ends the process that parses it"


def parse_all(most_s: float) -> None:
    """Reads a list of right answers as JSON and writes `+` for each; stops with `-` at the first without mathematics.
    An answer taking over `most_s` ends the process. Each is also compared, with itself and with another number: an
    endless comparison would take every completion with it."""
    from math_verify import verify
    from sympy import Integer

    another = Integer(7919)
    for answer in json.loads(sys.stdin.buffer.read()):
        signal.setitimer(signal.ITIMER_REAL, most_s)  # nobody handles it, so it ends C code, too
        found = list(_parsed(answer))
        if not found or not verify(found, found, timeout_seconds=None):  # pyright: ignore[reportArgumentType]
            os.write(1, b"-")
            return
        verify(found, another, timeout_seconds=None)  # pyright: ignore[reportArgumentType]
        os.write(1, b"+")
