"""Coordinates as 1000 tokens, and what this package needs of a tokenizer.

A coordinate c in [0, 1], a share of the image's width or height, is the bin `round(999 c)`; the bin k is the token
`<|coord_k|>` and stands for `k / 999`, so that 0 and 1 are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.errors import ConfigError

NUM_BINS = 1000
LAST_BIN = NUM_BINS - 1
_LITERAL = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")


def fraction_of(bin_: int) -> float:
    """The coordinate in [0, 1] for which a bin stands."""
    return bin_ / LAST_BIN


def literal(bin_: int) -> str:
    """The text of a bin's token."""
    return f"<|coord_{bin_}|>"


LITERALS = tuple(map(literal, range(NUM_BINS)))
"""By bin."""


def literal_bin(text: str) -> int | None:
    """The bin of which `text` is the token, or None."""
    found = _LITERAL.fullmatch(text)
    return int(found[1]) if found else None


def coordinate_ids(id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """The ids of the 1000 coordinate tokens, by bin. `id_of`: a token's id, or None or the unknown token's without one.

    Raises `ConfigError` unless they are 1000 different ids.
    """
    bins: dict[int, int] = {}
    for bin_ in range(NUM_BINS):
        id_ = id_of(literal(bin_))
        if id_ is None or id_ < 0:
            raise ConfigError(f"the tokenizer has no token {literal(bin_)}: add all of {literal(0)} to {literal(999)}")
        if id_ in bins:
            raise ConfigError(
                f"the tokenizer gives {literal(bins[id_])} and {literal(bin_)} the same id {id_}: add all of "
                f"{literal(0)} to {literal(999)} as tokens of their own"
            )
        bins[id_] = bin_
    return tuple(bins)


@dataclass(frozen=True)
class AnswerTokens:
    """What this package needs of a tokenizer. Raises `ConfigError` if it cannot write an answer exactly."""

    encode: Callable[[str], Sequence[int]]
    """Ids of a text, special tokens in it read as such and none added."""
    piece: Callable[[int], bytes]
    """The bytes for which a token stands wherever it is; characters may be divided between tokens."""
    coordinate_ids: tuple[int, ...]
    """By bin, as `coordinate_ids` gives them."""
    end_id: int
    """The token that ends the assistant's turn."""
    end_text: str = "<|im_end|>"
    """Its text, which ends an answer even when it is written with other tokens."""
    bins: Mapping[int, int] = field(init=False, repr=False)
    """The bin of each coordinate token's id."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bins", {id_: bin_ for bin_, id_ in enumerate(self.coordinate_ids)})
        for text, ids in ((literal(0), [self.coordinate_ids[0]]), (literal(999), [self.coordinate_ids[999]])):
            if list(self.encode(text)) != ids:
                raise ConfigError(
                    f"the tokenizer encodes {text} as {list(self.encode(text))}, and its id is {ids[0]}: add it as a "
                    "special token"
                )
        if self.exact("{") is None:
            raise ConfigError("the tokenizer does not give back the text '{': use one that encodes bytes exactly")

    def exact(self, text: str) -> list[int] | None:
        """The ids of a text, or None if they do not stand for exactly this text."""
        ids = list(self.encode(text))
        return ids if b"".join(map(self.piece, ids)) == text.encode() else None
