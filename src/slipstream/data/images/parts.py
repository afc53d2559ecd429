"""Places images in messages: content parts as in OpenAI's requests, and columns of images beside the messages.

A message's content has a mark, `records.IMAGE_MARK`, at the place of each of its images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.data.images.reading import read_image
from slipstream.errors import DataError
from slipstream.records import IMAGE_MARK, Media, Message

COLUMNS = ("images", "image")
"""Columns of images, in the order of their places in the messages."""
_IMAGE_PARTS = ("image", "image_url", "input_image")
_OPEN = Media("image", "", "")
"""A place whose image is in a column."""


def joined(parts: Sequence[Any], where: str, folder: Path | None) -> tuple[str, tuple[Media, ...]]:
    """Text with marks, and the images, of a message's content parts; those of a column are open places. Raises
    `DataError` that begins with `where`."""
    texts, images = list[str](), list[Media]()
    for number, part in enumerate(parts):
        place = f"{where}[{number}]"
        if not isinstance(part, Mapping):
            raise DataError(f"{place} = {part!r:.60} is no part of a content: give {{'type': 'text', 'text': ...}}")
        entry = {name: value for name, value in cast("Mapping[str, Any]", part).items() if value is not None}
        kind, text = entry.get("type"), entry.get("text", "")
        if kind in _IMAGE_PARTS:
            given = next((entry[name] for name in ("image_url", "image", "url", "path") if name in entry), None)
            if given is None and kind != "image":
                raise DataError(f"{place} = {entry!r:.60} has no image: give {{'type': 'image_url', 'image_url': ...}}")
            images.append(_OPEN if given is None else read_image(given, f"{place}.{kind}", folder))
            texts.append(IMAGE_MARK)
        elif kind != "text" or not isinstance(text, str):
            raise DataError(f"{place} is {entry!r:.60}: give parts of type text and image_url")
        elif IMAGE_MARK in text and any(
            isinstance(other, Mapping) and other.get("type") in _IMAGE_PARTS for other in parts
        ):
            raise DataError(f"{place} has the text {IMAGE_MARK}, which marks the place of an image: remove it")
        else:
            texts.append(text)
    return "".join(texts), tuple(images)


def refuse_open(images: Sequence[Media], where: str) -> None:
    """Raises `DataError` for an open place where there are no columns."""
    if _OPEN in images:
        raise DataError(f"{where} has a part of type image without an image: give {{'type': 'image', 'image': ...}}")


def with_images(turns: Sequence[Message], values: Mapping[str, Any], where: str, folder: Path | None) -> list[Message]:
    """The turns with the images of a row's columns (`COLUMNS`) in their places, in order: marks in texts, and open
    places. Without any place they come before the text of the first message of the user. Raises `DataError`."""
    column = next((name for name in COLUMNS if _is_given(values.get(name))), "")
    given: Any = values[column] if column else []
    sources = list(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else [given]
    if column and not any(map(_num_open, turns)):
        first = next((place for place, turn in enumerate(turns) if turn.role == "user"), 0)
        turns = list(turns)
        given = turns[first]
        turns[first] = msgspec.structs.replace(
            given, content=IMAGE_MARK * len(sources) + given.content, media=(_OPEN,) * len(sources) + given.media
        )
    places = sum(map(_num_open, turns)) if column or any(_OPEN in turn.media for turn in turns) else 0
    if places != len(sources):
        what = f"{column} holds {len(sources)} images" if column else "no column holds images"
        raise DataError(
            f"{where}: {what}, and the messages have {places} places for them ({IMAGE_MARK}, or parts of type image): "
            "give one image for each place"
        )
    if not column:
        return list(turns)
    images = iter([read_image(source, f"{where}: {column}[{n}]", folder) for n, source in enumerate(sources)])
    return [_filled(turn, images) for turn in turns]


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, str | bytes | list | tuple | dict) and not value)


def _num_open(turn: Message) -> int:
    """Places of a turn that a column must fill."""
    return sum(image == _OPEN for image in turn.media) if turn.media else turn.content.count(IMAGE_MARK)


def _filled(turn: Message, images: Any) -> Message:
    media = turn.media or (_OPEN,) * turn.content.count(IMAGE_MARK)
    if not media:
        return turn
    return msgspec.structs.replace(turn, media=tuple(next(images) if each == _OPEN else each for each in media))
