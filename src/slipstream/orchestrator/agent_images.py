"""Images in requests of agents, in the forms of OpenAI and Anthropic: scaled here, as the trainer scales them.

Guarantee: the engine gets scaled images as `data:` URIs alone, so nobody fetches an address or reads a file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, cast

from slipstream.data.images.processor import ImageProcessor
from slipstream.data.images.reading import read_image
from slipstream.errors import DataError

_KINDS = ("image_url", "input_image", "image")
_WHERE = "an image of the request"
_NESTED = ("content", "output")
"""Parts within a part: results of tools."""
Part = dict[str, Any]


def with_scaled_images(body: bytes, images: ImageProcessor | None) -> bytes:
    """A request's body with its images scaled; `images` is None if the run has none. Raises `DataError`."""
    if b"image" not in body:
        return body
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # vLLM reports the error
        return body
    given = [fields.get(name) for name in ("messages", "input")] if isinstance(fields, dict) else []
    parts = [part for each in given for part in _images_in(each)]
    if not parts:
        return body
    if images is None:
        raise DataError("the run's tasks have no images, and its plan has no room for any: leave them out")
    for part in parts:
        _scale(part, images)
    return json.dumps(fields).encode()


def _images_in(content: Any) -> Iterator[Part]:
    if not isinstance(content, list):
        return
    for part in cast("list[Any]", content):
        if not isinstance(part, dict):
            continue
        part = cast("Part", part)
        if part.get("type") in _KINDS:
            yield part
        for name in _NESTED:
            yield from _images_in(part.get(name))


def _scale(part: Part, images: ImageProcessor) -> None:
    """Puts the scaled image in the place of a part's own."""
    source = part.get("source") if part["type"] == "image" else None
    if source is not None:  # Anthropic's
        data = source.get("data") if isinstance(source, dict) and source.get("type") == "base64" else None
        part["source"] = {"type": "base64", "media_type": "image/png", "data": _scaled(_uri(data), images)}
        return
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    scaled = f"data:image/png;base64,{_scaled(url, images)}"
    part["image_url"] = {**given, "url": scaled} if isinstance(given, dict) else scaled


def _uri(data: Any) -> Any:
    return f"data:application/octet-stream;base64,{data}" if isinstance(data, str) else None


def _scaled(url: Any, images: ImageProcessor) -> str:
    if not isinstance(url, str) or not url.startswith("data:"):
        raise DataError(f"{_WHERE} has no data: nothing is fetched, so send it in base64")
    return base64.b64encode(images.scaled_now(read_image(url, _WHERE))).decode()
