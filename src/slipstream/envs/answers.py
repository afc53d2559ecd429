"""Extracts the graded part of a completion and compares answers; used by all text environments."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from slipstream.config.environment import GradedText

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MINUS = "-\u2212\u2013\ufe63\uff0d"
"""A hyphen, and what is set in place of a minus sign. After a digit, a letter or a bracket they are dashes."""
_CURRENCY = r"(?:[A-Z]{1,2})?\\?[$\u20ac\u00a3\u00a5\u20b9]"
_THOUSANDS = r",\\!|\{,\}\\!|,|\{,\}|\\[,;: ]|_|'|\u2019|\u00a0|\u2009|\u202f"
_PART = rf"[{_MINUS}]?\d+(?:\.\d+)?"
_RAISED = r"\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b"
_NUMBER = re.compile(
    rf"""
    [\^_]\{{?[+{_MINUS}]?\d[\d.]*                                   # an exponent or an index is no number
    | (?:(?<![\w.)%])(?<!\d\$)(?P<sign>[{_MINUS}])
      | (?:(?<=[=<>\u2248(])|(?<=[=<>\u2248(][ ]))(?P<spaced>[{_MINUS}])[ ]
      | \b(?:negative|(?<!\d[ ])minus)(?P<word>[ ]))?
    (?:{_CURRENCY}[ ]?(?P<inner>[{_MINUS}])?)?
    (?:
        (?P<whole>\d+)?(?P<latex>\\[cdt]?frac)
          (?:\{{(?P<top>{_PART})\}}\{{(?P<under>{_PART})\}}|(?P<top1>\d)(?P<under1>\d))
        | (?:(?P<mixed>\d+)[ ](?=\d+/\d))?
          (?P<digits>(?:\d{{1,3}}(?P<sep>{_THOUSANDS})\d{{3}}(?:(?P=sep)\d{{3}})*(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)
          (?:
              /(?P<denominator>\d+)(?!\d|\.\d)
              | e(?P<exponent>[+{_MINUS}]?\d+)(?!\w)
              | [ ]?(?:\*|\u00d7|\u00b7|\\times|\\cdot)[ ]?10(?:\^\{{?|(?=[{_RAISED}]))
                (?P<power>[+{_MINUS}]?[\d{_RAISED}]+)
              | \^\{{?(?P<root>[{_MINUS}]?\d+)
          )?
          \}}?
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_VULGAR = re.compile("[ \u00a0]?([\u00bc-\u00be\u2150-\u215e])")
"""Fractions that are one character."""
_PLAIN_DIGITS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_MAX_DIGITS = 400
_TAIL, _CONTEXT = 1000, 16
"""Characters at a text's end that are searched first, and how far a match there looks back."""


def final_answer(completion: str) -> str | None:
    """The text after the last `</think>` without leading white space; the whole text if there is no thinking. None if a
    `<think>` is never closed: the completion then grades as wrong."""
    _, closed, answer = completion.rpartition(THINK_CLOSE)
    if THINK_OPEN in answer:
        return None
    return answer.lstrip() if closed else answer


def graded_part(completion: str, part: GradedText) -> str | None:
    """The text selected by `environment.graded_text`; None without it. Unclosed thinking stays: `score` reports it."""
    answer = completion if part == "all" else final_answer(completion)
    if part == "all" or answer is None:
        return completion
    if part == "tag":
        found = _ANSWER_TAG.findall(answer)
        return found[-1].strip() if found else None
    return next((line.strip() for line in reversed(answer.splitlines()) if line.strip()), None)


def until_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of these strings, which is part of it: a completion ends there."""
    ends = [text.index(each) + len(each) for each in stop if each in text]
    return text[: min(ends, default=len(text))]


def same_text(answer: str, right: str) -> bool:
    """Whether two answers are equal, white space aside."""
    return answer.split() == right.split()


def last_number(text: str) -> Fraction | None:
    r"""The last number in a text, exactly (`1,234.50`, `-3`, `-$3`, `3/4`, `\frac{3}{4}`, `1.5e3`, `10^3`); None
    without one. A percent sign changes nothing: `50%` is 50."""
    size = _TAIL
    while True:
        start = max(0, len(text) - size)
        # One that begins at the start of the tail may have begun before it.
        least = _CONTEXT if start else 0
        tail = _VULGAR.sub(_written_out, text[start:])
        found = [each for each in _NUMBER.finditer(tail) if each.start() >= least and each[0][0] not in "^_"]
        if found:
            return _value_of(found[-1])
        if not start:
            return None
        size *= 8


def is_number(text: str) -> bool:
    """Whether a text is a number and nothing else."""
    return text[:1] not in ("^", "_") and _NUMBER.fullmatch(_VULGAR.sub(_written_out, text).strip()) is not None


def _written_out(found: re.Match[str]) -> str:
    """One half as a character, or with a number before it, as ` 1/2`."""
    return " " + unicodedata.normalize("NFKC", found[1]).replace("\u2044", "/")


def _value_of(found: re.Match[str]) -> Fraction | None:
    """The number of a match; None where it has too many digits."""
    parts = found.groupdict()
    sign = -1 if parts["sign"] or parts["spaced"] or parts["inner"] or parts["word"] else 1
    if len(found[0]) > _MAX_DIGITS:
        return None
    if parts["latex"]:
        top, under = parts["top"] or parts["top1"], parts["under"] or parts["under1"]
        number = _divided(_fraction_of(top), _fraction_of(under))
        return sign * (int(parts["whole"] or 0) + number)
    number = Fraction(re.sub(_THOUSANDS, "", parts["digits"]))
    if parts["denominator"]:
        return sign * (int(parts["mixed"] or 0) + _divided(number, Fraction(parts["denominator"])))
    if power := parts["exponent"] or parts["power"]:
        return None if (size := _int_of(power)) is None else sign * number * Fraction(10) ** size
    if root := parts["root"]:
        size = _int_of(root)
        too_large = size is None or abs(size) * len(parts["digits"]) > _MAX_DIGITS or (size < 0 and not number)
        return None if too_large else sign * number ** (size or 0)
    return sign * number


def _fraction_of(text: str) -> Fraction:
    return Fraction(re.sub(f"[{_MINUS}]", "-", text))


def _divided(number: Fraction, denominator: Fraction) -> Fraction:
    return number / denominator if denominator else number


def _int_of(text: str) -> int | None:
    """An exponent; None where it is too large for a number of `_MAX_DIGITS`."""
    number = int(re.sub(f"[{_MINUS}]", "-", text.translate(_PLAIN_DIGITS)))
    return number if abs(number) <= _MAX_DIGITS else None
