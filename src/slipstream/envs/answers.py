"""Extracts the graded part of a completion and compares answers; used by all text environments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
# A minus sign after a digit or letter is a dash; commas stand between groups of three digits.
_NUMBER = re.compile(
    r"((?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)])-)?\.\d+)(?:/(\d+)(?![\d.]))?"
)
_MAX_DIGITS = 400


def final_answer(completion: str) -> str | None:
    """The text after the last `</think>` without leading white space; the whole text if there is no thinking. None if a
    `<think>` is never closed: the completion then grades as wrong."""
    _, closed, answer = completion.rpartition(THINK_CLOSE)
    if THINK_OPEN in answer:
        return None
    return answer.lstrip() if closed else answer


def until_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of these strings, which is part of it: a completion ends there."""
    ends = [text.index(each) + len(each) for each in stop if each in text]
    return text[: min(ends, default=len(text))]


def same_text(answer: str, right: str) -> bool:
    """Whether two answers are equal, white space aside."""
    return answer.split() == right.split()


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly (`1,234.50`, `-3`, `3/4`); None if there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    digits, denominator = found[-1]
    if len(digits) > _MAX_DIGITS:
        return None
    number = Fraction(digits.replace(",", ""))
    return number / int(denominator) if denominator and int(denominator) else number
