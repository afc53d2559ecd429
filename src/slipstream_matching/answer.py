"""How an answer is written: objects to text, and text to tokens of which each has a region.

`{"object_1": {"desc": "black cat", "bbox_2d": ["<|coord_110|>", "<|coord_310|>", "<|coord_410|>", "<|coord_705|>"]}}`

Keys count from 1. Guarantees: the tokens stand for exactly the text, coordinates are
one token each, and a token that holds a part of a description belongs to the description, whatever else it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from slipstream.errors import DataError
from slipstream_matching.coordinates import AnswerTokens, literal
from slipstream_matching.objects import SceneObject

Region = Literal["context", "structure", "desc", "coordinate"]
"""What a token is trained for: nothing; its label, as a part of the JSON or of a description; a box."""
Fragment = tuple[str, Region]


def object_fragments(index: int, object_: SceneObject) -> list[Fragment]:
    """The key and the value of one object, a box."""
    found: list[Fragment] = [
        (f'"object_{index}": {{"desc": "', "structure"),
        (json.dumps(object_.desc, ensure_ascii=False)[1:-1], "desc"),
        ('", "bbox_2d": ["', "structure"),
    ]
    for place, bin_ in enumerate(object_.coordinates):
        if place:
            found.append(('", "', "structure"))
        found.append((literal(bin_), "coordinate"))
    found.append(('"]}', "structure"))
    return found


def objects_fragments(objects: Iterable[SceneObject], first_index: int = 1) -> list[Fragment]:
    """Objects with consecutive keys and what separates them, without the outer braces."""
    found: list[Fragment] = []
    for index, object_ in enumerate(objects, first_index):
        if found:
            found.append((", ", "structure"))
        found += object_fragments(index, object_)
    return found


def answer_fragments(objects: Iterable[SceneObject]) -> list[Fragment]:
    """A whole answer."""
    return [("{", "structure"), *objects_fragments(objects), ("}", "structure")]


def answer_text(objects: Iterable[SceneObject]) -> str:
    """The answer that lists `objects` in the given order; `{}` for none."""
    return "".join(text for text, _ in answer_fragments(objects))


class Tokenized(NamedTuple):
    """A text's tokens and their regions."""

    ids: list[int]
    regions: list[Region]

    @property
    def slots(self) -> list[int]:
        """Places of the coordinate tokens."""
        return [place for place, region in enumerate(self.regions) if region == "coordinate"]


def tokenized(fragments: Sequence[Fragment], tokens: AnswerTokens) -> Tokenized:
    """The tokens of the fragments' text, encoded as a whole.

    Raises `DataError` if the tokens stand for another text, or a coordinate is not one token.
    """
    text = "".join(part for part, _ in fragments)
    if (ids := tokens.exact(text)) is None:
        raise DataError(
            f"the tokenizer does not give back the answer {text!r:.200}: use one that encodes bytes exactly"
        )
    is_desc = bytearray(b"".join(bytes([region == "desc"]) * len(part.encode()) for part, region in fragments))
    regions: list[Region] = []
    coordinates: list[tuple[int, int]] = []
    end = 0
    for id_ in ids:
        start, end = end, end + len(tokens.piece(id_))
        if id_ in tokens.bins:
            coordinates.append((start, end))
            regions.append("coordinate")
        else:
            regions.append("desc" if any(is_desc[start:end]) else "structure")
    if coordinates != _coordinate_spans(fragments):
        raise DataError(
            f"the answer {text!r:.200} has coordinates that are not one token each: correct its descriptions"
        )
    return Tokenized(ids, regions)


def _coordinate_spans(fragments: Iterable[Fragment]) -> list[tuple[int, int]]:
    """First byte of each coordinate and the byte after it."""
    found: list[tuple[int, int]] = []
    end = 0
    for part, region in fragments:
        start, end = end, end + len(part.encode())
        found += [(start, end)] if region == "coordinate" else []
    return found
