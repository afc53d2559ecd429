"""Reads the objects of an answer from its tokens, without repair.

Guarantees: no answer raises. What is kept of it is a prefix of its own tokens, up to the end of its last closed object;
only the last of them, where it goes on beyond that end, is replaced by tokens that stand for exactly the part before.
An object is valid if it is closed, is JSON of a description and one geometry, and its coordinates are coordinate
tokens; whatever else is under an object's key, or in its place, is dropped for one named reason. Keys may have any
number and order, and JSON any whitespace.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

from slipstream_matching.coordinates import AnswerTokens, literal_bin
from slipstream_matching.objects import KINDS, Kind, SceneObject, has_arity

Reason = Literal[
    "unclosed",  # the answer ends within it
    "json",
    "key",  # not object_1, object_2, ... but another key of the answer, or none
    "repeated_key",
    "value",  # what is under an object's key is not an object
    "desc",  # missing, empty or not valid text
    "no_geometry",  # neither bbox_2d nor poly
    "keys",  # a key too many: both geometries, one twice, or an unknown one
    "coordinates",  # too few, too many, or not coordinate tokens
    "polygon",  # only boxes are wanted
    "trailing",  # text after the answer's end
    "divided",  # no tokens stand for the part of the last token to be kept; nothing of the answer is
]
_PART = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*(?:(?P<closed>")|\\?\Z)|[{}\[\]:,]|[^\s"{}\[\]:,]+',  # a string may be open at the end
    re.DOTALL,
)
_KEY = re.compile(rb"object_([0-9]{1,4000})")  # Python converts no more than 4300 digits
_ANY_KEY = re.compile(rb'"object_([0-9]{1,4000})"\s*:')
_DESC = re.compile(rb'"desc"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)


class ParsedObject(NamedTuple):
    """A valid object; places are those of the kept tokens."""

    value: SceneObject
    """Its corners as they were written, in any order."""
    tokens: range
    """The tokens that lie wholly in its JSON, braces included and key excluded."""
    desc_tokens: range
    """The tokens that hold any part of its description."""
    slots: tuple[int, ...]
    """The tokens of its coordinates."""


class Dropped(NamedTuple):
    """A part of the answer that is no valid object."""

    reason: Reason
    text: str
    """At most 200 characters, for whoever looks into it."""


@dataclass(frozen=True)
class ParsedAnswer:
    """The objects of an answer in the order in which they were written, and what is kept of its tokens."""

    objects: list[ParsedObject]
    dropped: list[Dropped]
    prefix_ids: list[int]
    """Up to the last closed object, also an invalid one, or else up to the first `{`. An answer without any leaves a
    `{` that is not its own."""
    has_closed: bool
    """Whether the prefix ends with an object rather than with `{`."""
    next_index: int
    """One more than the largest number of a key in the prefix, of whatever it is the key."""
    is_truncated: bool
    """Whether braces, brackets or a string are unbalanced at the end."""
    is_empty: bool
    """Whether it is a whole answer that lists no objects."""

    @property
    def is_invalid(self) -> bool:
        """Whether nothing can be kept of an answer that is not empty."""
        return not self.has_closed and not self.is_empty


class _Entry(NamedTuple):
    """Something in the answer's outermost braces."""

    key: bytes | None
    start: int
    stop: int | None
    """None: it is not closed."""
    is_object: bool
    """Whether it is in braces."""


@dataclass
class _Scan:
    entries: list[_Entry]
    end: int | None = None
    """After the outermost brace; None if it is not closed."""
    brackets: int = 0
    """How many more were opened than closed."""


def parse(ids: Sequence[int], tokens: AnswerTokens) -> ParsedAnswer:
    """Read a rollout's tokens up to the end of the turn. Polygons are dropped."""
    starts = [0, *accumulate(len(tokens.piece(id_)) for id_ in ids)]
    text = b"".join(map(tokens.piece, ids)).partition(tokens.end_text.encode())[0]
    opening = text.find(b"{")
    if opening < 0:
        return _nothing_of([], tokens)
    scan = _scan(text, opening)
    with_key = [each for each in scan.entries if each.is_object and _index(each) is not None]
    stops = [each.stop for each in with_key if each.stop is not None]
    end = stops[-1] if stops else opening + 1
    if (prefix_ids := _prefix(ids, starts, text, end, tokens)) is None:
        return _nothing_of([Dropped("divided", _shown(text[:end]))], tokens)
    prefix_starts = [0, *accumulate(len(tokens.piece(id_)) for id_ in prefix_ids)]
    objects: list[ParsedObject] = []
    dropped: list[Dropped] = []
    seen: set[int] = set()
    for entry in scan.entries:
        found = _read(entry, text, prefix_ids, prefix_starts, tokens, seen)
        if isinstance(found, ParsedObject) and found.value.kind == "poly":
            found = "polygon"
        if isinstance(found, ParsedObject):
            objects.append(found)
        else:
            dropped.append(Dropped(found, _shown(text[entry.start : entry.stop])))
    if scan.end is not None and text[scan.end :].strip():
        dropped.append(Dropped("trailing", _shown(text[scan.end :])))
    return ParsedAnswer(
        objects,
        dropped,
        prefix_ids,
        has_closed=bool(stops),
        next_index=1 + max((int(index) for index in _ANY_KEY.findall(text, opening, end)), default=0),
        is_truncated=scan.end is None or scan.brackets != 0,
        is_empty=scan.end is not None and not text[opening + 1 : scan.end - 1].strip(),
    )


def _nothing_of(dropped: list[Dropped], tokens: AnswerTokens) -> ParsedAnswer:
    brace = list(tokens.encode("{"))
    return ParsedAnswer([], dropped, brace, has_closed=False, next_index=1, is_truncated=True, is_empty=False)


def _shown(text: bytes) -> str:
    return text.decode(errors="replace")[:200]


def _index(entry: _Entry) -> int | None:
    found = _KEY.fullmatch(entry.key or b"")
    return int(found[1]) if found else None


def _prefix(ids: Sequence[int], starts: list[int], text: bytes, end: int, tokens: AnswerTokens) -> list[int] | None:
    """The tokens of `text[:end]`, the last one replaced if it goes on beyond; None if that cannot be done exactly."""
    num_tokens = bisect_left(starts, end)
    if starts[num_tokens] == end:
        return list(ids[:num_tokens])
    try:
        part = text[starts[num_tokens - 1] : end].decode()
    except UnicodeDecodeError:
        return None
    last = tokens.exact(part)
    return None if last is None else [*ids[: num_tokens - 1], *last]


def _scan(text: bytes, opening: int) -> _Scan:
    """Find what is directly in the outermost braces, from the one at `opening` to where it closes."""
    found = _Scan([])
    depth = arrays = 0  # open braces; open brackets directly in the outermost braces
    name: bytes | None = None  # a string that is a key if a colon follows
    key: bytes | None = None  # a key that waits for its value
    opened: tuple[bytes | None, int] | None = None  # key and start of an object
    for part in _PART.finditer(text, opening):
        first = part[0][:1]
        is_direct = depth == 1 and not arrays
        if first == b"{":
            if is_direct:
                opened, key, name = (key, part.start()), None, None
            depth += 1
        elif first == b"}":
            depth -= 1
            if depth == 1 and opened:
                found.entries.append(_Entry(*opened, part.end(), is_object=True))
                opened = None
            if depth == 0:
                found.end = part.end()
                return found
        elif first == b"[":
            found.brackets += 1
            if is_direct:
                found.entries.append(_Entry(key, part.start(), part.end(), is_object=False))
                key = name = None
            arrays += depth == 1
        elif first == b"]":
            found.brackets -= 1
            arrays -= depth == 1 and arrays > 0
        elif not is_direct:
            pass
        elif first == b":":
            key, name = name, None
        elif first == b",":
            key = name = None
        elif key is not None:
            found.entries.append(_Entry(key, part.start(), part.end(), is_object=False))
            key = None
        elif first == b'"' and part["closed"]:
            name = part[0][1:-1]
    if opened:
        found.entries.append(_Entry(*opened, None, is_object=True))
    return found


def _read(
    entry: _Entry, text: bytes, prefix_ids: list[int], starts: list[int], tokens: AnswerTokens, seen: set[int]
) -> ParsedObject | Reason:
    """The object of an entry; `seen`: the numbers of the keys before it, to which its own is added."""
    if (index := _index(entry)) is None:
        return "key"
    if index in seen:
        return "repeated_key"
    seen.add(index)
    if not entry.is_object:
        return "value"
    if entry.stop is None:
        return "unclosed"
    found = _object_of(text[entry.start : entry.stop])
    if isinstance(found, str):
        return found
    value, (desc_start, desc_stop) = found
    first, last = bisect_left(starts, entry.start), bisect_right(starts, entry.stop) - 1
    slots = tuple(place for place in range(first, last) if prefix_ids[place] in tokens.bins)
    if tuple(tokens.bins[prefix_ids[place]] for place in slots) != value.coordinates:
        return "coordinates"
    desc_start, desc_stop = entry.start + desc_start, entry.start + desc_stop
    desc_tokens = range(bisect_right(starts, desc_start) - 1, bisect_left(starts, desc_stop))
    return ParsedObject(value, range(first, last), desc_tokens, slots)


def _object_of(text: bytes) -> tuple[SceneObject, tuple[int, int]] | Reason:
    """An object from its JSON, and where in it the description is."""
    try:
        fields = cast("tuple[tuple[str, Any], ...]", json.loads(text.decode(), object_pairs_hook=tuple))
    except (ValueError, RecursionError):
        return "json"
    keys = [key for key, _ in fields]
    geometries = [key for key in keys if key in KINDS]
    if not geometries:
        return "no_geometry"
    if len(geometries) > 1 or len(keys) > len(geometries) + keys.count("desc") or keys.count("desc") > 1:
        return "keys"
    values = dict(fields)
    desc = values.get("desc")
    place = _DESC.search(text)
    if not isinstance(desc, str) or not desc.strip() or not place or _has_surrogate(desc):
        return "desc"
    kind: Kind = "poly" if geometries == ["poly"] else "bbox_2d"
    coordinates = _coordinates(values[kind], kind)
    return "coordinates" if coordinates is None else (SceneObject(desc, kind, coordinates), place.span(1))


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _coordinates(value: Any, kind: Kind) -> tuple[int, ...] | None:
    """The bins of a list of four, or of pairs."""
    if not isinstance(value, list):
        return None
    values = cast("list[Any]", value)
    if kind == "poly":
        if not all(isinstance(pair, list) and len(cast("list[Any]", pair)) == 2 for pair in values):
            return None
        values = [each for pair in values for each in pair]
    bins = [literal_bin(each) for each in values if isinstance(each, str)]
    found = tuple(bin_ for bin_ in bins if bin_ is not None)
    return found if len(found) == len(values) and has_arity(kind, len(found)) else None
