"""Answers as texts, where there is no tokenizer: for rewards, and for what a run kept.

Guarantees: a text gives the objects that any tokenizer of the same text gives; what is not valid Unicode in it is
replaced.
"""

from __future__ import annotations

import re

from slipstream_matching.coordinates import LITERALS, NUM_BINS, AnswerTokens
from slipstream_matching.parser import ParsedAnswer, parse

_LITERAL = re.compile("|".join(map(re.escape, sorted(LITERALS, key=len, reverse=True))).encode())
_BYTES = 256


def _encode(text: str) -> list[int]:
    """A token for each byte, and one for each coordinate."""
    found: list[int] = []
    data, end = text.encode(errors="replace"), 0
    for each in _LITERAL.finditer(data):
        found += [*data[end : each.start()], _BYTES + LITERALS.index(each[0].decode())]
        end = each.end()
    return [*found, *data[end:]]


_PIECES = [bytes([byte]) for byte in range(_BYTES)] + [text.encode() for text in LITERALS] + [b"<|im_end|>"]
_TEXT_TOKENS = AnswerTokens(_encode, _PIECES.__getitem__, tuple(range(_BYTES, _BYTES + NUM_BINS)), _BYTES + NUM_BINS)


def parsed_text(text: str) -> ParsedAnswer:
    """The objects of an answer that is a text, without repair; see `parse`."""
    return parse(_TEXT_TOKENS.encode(text), _TEXT_TOKENS)
