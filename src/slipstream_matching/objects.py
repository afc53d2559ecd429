"""Objects of an image, and the checks of those that a data set declares true.

Guarantees: whatever an answer could not hold, or would hold ambiguously, is a `DataError` that names sample, object,
value and remedy; nothing is clipped, reordered or left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from slipstream.errors import DataError
from slipstream_matching.coordinates import LAST_BIN, literal_bin

Kind = Literal["bbox_2d", "poly"]
KINDS: tuple[Kind, ...] = ("bbox_2d", "poly")
_KEYS = {"desc", "bbox_2d", "poly", "poly_points"}
_AMBIGUOUS = ("\n", "\r", "\t", " ,", ", ", " /", "/ ", " :", ": ", "  ", "<|")
"""What a description must not contain: separators with spaces, and the beginnings of special tokens."""


@dataclass(frozen=True)
class SceneObject:
    """A described box; or a polygon of an answer, never trained on."""

    desc: str
    kind: Kind
    coordinates: tuple[int, ...]
    """Bins from 0 to 999, x before y: two opposite corners of a box, or at least three corners of a polygon."""

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """x1, y1, x2, y2 of the smallest box around it, `x1 <= x2` and `y1 <= y2` whatever the order of corners."""
        xs, ys = self.coordinates[::2], self.coordinates[1::2]
        return min(xs), min(ys), max(xs), max(ys)


def has_arity(kind: Kind, num_values: int) -> bool:
    """Whether a geometry of this kind has so many values."""
    return num_values == 4 if kind == "bbox_2d" else num_values >= 6 and num_values % 2 == 0


def in_reading_order(objects: Iterable[SceneObject]) -> list[SceneObject]:
    """Sorted by y, then x, of the top left corner; equal ones keep their order."""
    return sorted(objects, key=lambda each: (each.bounds[1], each.bounds[0]))


def true_objects(given: Any, sample: str) -> list[SceneObject]:
    """The objects of a sample as its row lists them: mappings of `desc` and `bbox_2d` (x1, y1, x2, y2), in coordinate
    tokens or bins.

    `sample` names the row in errors. Raises `DataError`, also for a sample without objects, and for a polygon (`poly`):
    no loss covers it.
    """
    if not _is_list(given):
        raise DataError(f"{sample}: objects is {given!r:.80}: give a list of objects")
    if not given:
        raise DataError(f"{sample} has no objects: leave it out, as nothing can be matched to it")
    return [_true_object(each, f"{sample}, object {place}") for place, each in enumerate(given, 1)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _true_object(given: Any, where: str) -> SceneObject:
    if not isinstance(given, Mapping):
        raise DataError(f"{where} is {given!r:.80}: give desc, and bbox_2d or poly")
    fields = cast("Mapping[str, Any]", given)
    if unknown := [key for key in fields if key not in _KEYS]:
        raise DataError(f"{where} has the key {unknown[0]!r}, which nothing reads: use desc, and bbox_2d or poly")
    kinds: list[Kind] = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        raise DataError(f"{where} has {' and '.join(kinds) or 'no geometry'}: give exactly one of bbox_2d and poly")
    if kinds == ["poly"]:
        raise DataError(f"{where} is a polygon, and only boxes can be trained on: give its bbox_2d")
    coordinates = _true_coordinates(fields["bbox_2d"], where)
    x1, y1, x2, y2 = coordinates
    if x2 < x1 or y2 < y1:
        raise DataError(f"{where}: bbox_2d {list(coordinates)} has its corners in the wrong order: give x1, y1, x2, y2")
    return SceneObject(_true_desc(fields.get("desc"), where), "bbox_2d", coordinates)


def _true_desc(desc: Any, where: str) -> str:
    if not isinstance(desc, str) or not desc.strip():
        raise DataError(f"{where}: desc is {desc!r:.80}: give a text that is not empty")
    if desc != desc.strip():
        raise DataError(f"{where}: desc {desc!r:.80} begins or ends with a space: strip it")
    for text in _AMBIGUOUS:
        if text in desc:
            raise DataError(f"{where}: desc {desc!r:.80} contains {text!r}, which answers cannot hold: reword it")
    try:
        desc.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: desc {desc!r:.80} is not valid Unicode ({error.reason}): correct it") from error
    return desc


def _true_coordinates(values: Any, where: str) -> tuple[int, ...]:
    if not _is_list(values) or not has_arity("bbox_2d", len(values)):
        raise DataError(f"{where}: bbox_2d is {values!r:.80}: give 4 values, x1, y1, x2, y2")
    found: list[int] = []
    for value in values:
        bin_ = literal_bin(value) if isinstance(value, str) else value
        if not isinstance(bin_, int) or isinstance(bin_, bool) or not 0 <= bin_ <= LAST_BIN:
            raise DataError(
                f"{where}: bbox_2d has the coordinate {value!r:.80}, which is no bin: give integers from 0 to 999 or "
                "tokens <|coord_0|> to <|coord_999|>"
            )
        found.append(bin_)
    return tuple(found)
