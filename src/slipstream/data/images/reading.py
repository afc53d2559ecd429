"""Reads images from files, `data:` URIs and data sets into references, `records.Media`.

Guarantees: an image is decoded once, completely, when it is read, so that one that is missing, truncated or too large
is named with its row before anything starts; its bytes are checked against their digest whenever they are used;
nothing is fetched from a network. Only decoders of `FORMATS` see a file, as others start programs (EPS).
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

from slipstream.errors import ConfigError, DataError, one_line
from slipstream.processes.temporary import cache_root, private_folder
from slipstream.records import Media
from slipstream.regular_files import read_regular

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64_000_000
"""Larger images are refused: decoding one takes three bytes a pixel, and models scale it down to a small part."""
MAX_BYTES = 1 << 29
"""An image's file: more than so many pixels take in any format."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read, by Pillow's names."""
MAX_ASPECT_RATIO = 200
"""Of the longer side to the shorter one, what the image processors of Qwen's models take."""
_UNBOUNDED = ("I", "F")
"""Pillow's modes of pixels without a known range; grey ones of 16 bits are "I;16" and the like."""
_MOST_INLINE = 16 << 10
"""Bytes of an image that a record holds itself; every completion's record has a prompt's images."""
_MOST_NESTED = 8
"""Dictionaries within one another; one from Python may hold itself."""
_DATA_URI = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)
_FORMS = "give a path, a data: URI, or bytes of a PNG or JPEG file"


def read_image(source: Any, where: str, folder: Path | None = None) -> Media:
    """A reference to the image that a value of a data set stands for.

    `source`: a path, relative to `folder`; a `data:` URI; bytes; an image of PIL; or a dictionary with one of these, as
    in OpenAI's parts (`url`), verl's rows (`image`) and those of the library `datasets` (`bytes`, `path`). Raises
    `DataError` that begins with `where`.
    """
    source = _unwrapped(source)
    if isinstance(source, str):
        uri, data = _from_text(source, where, folder)
    elif isinstance(source, bytes | bytearray | memoryview):
        uri, data = "", bytes(source)
    elif hasattr(source, "save") and hasattr(source, "size"):  # an image of PIL
        uri, data = "", _saved(source, where)
    else:
        raise DataError(f"{where} = {source!r:.60} is no image: {_FORMS}")
    picture = decoded(data, where)
    digest = hashlib.sha256(data).hexdigest()
    if not uri or (uri.startswith("data:") and len(data) > _MOST_INLINE):
        uri = _kept(data, digest) or f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    return Media("image", uri, digest, width=picture.width, height=picture.height)


def bytes_of(image: Media) -> bytes:
    """The image's file. Raises `DataError` if it is not what was read before."""
    _, data = _from_text(image.uri, f"image {image.uri:.80}", None)
    if (found := hashlib.sha256(data).hexdigest()) != image.sha256:
        raise DataError(
            f"image {image.uri:.80} has changed since it was read (sha256 {found[:12]}, not {image.sha256[:12]}): "
            "restore it, or start a new run"
        )
    return data


def _kept(data: bytes, digest: str) -> str:
    """The path of a large image's file in this user's cache, so that records need not hold it; empty if it is small, or
    there can be no cache."""
    if len(data) <= _MOST_INLINE:
        return ""
    try:
        folder = private_folder(cache_root(os.environ) / "images")
        path = folder / digest
        if not path.is_file() or read_regular(path, MAX_BYTES) != data:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, path)  # several processes may read the same data
    except (OSError, RuntimeError):
        return ""
    return str(path)


def decoded(data: bytes, where: str) -> Image:
    """The image in a file's bytes, in RGB and upright. Raises `DataError` that begins with `where`."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError(f"{where} needs a package that cannot be imported ({error}): pip install pillow") from error
    _quieten()
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise DataError(
                f"{where} has {width} x {height} pixels, more than {MAX_PIXELS:,}: scale it down, as the model would"
            )
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise DataError(
                f"{where} has {width} x {height} pixels, one side more than {MAX_ASPECT_RATIO} times the other: crop it"
            )
        picture.load()
        return _of_8_bits(ImageOps.exif_transpose(picture), where).convert("RGB")
    except Image.DecompressionBombError as error:
        raise DataError(f"{where} has far more than {MAX_PIXELS:,} pixels ({error}): scale it down") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{where} is in no known format of images: save it as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        ) from error
    except DataError:
        raise
    except Exception as error:  # decoders raise anything for a damaged file, such as IndexError or struct.error
        raise DataError(
            f"{where} cannot be decoded ({one_line(error)}): save it again as PNG or JPEG, or remove the row"
        ) from error


def _of_8_bits(picture: Image, where: str) -> Image:
    """A grey image of 16 bits by its upper eight, as Pillow reads colours of 16 bits; any other of 8 bits as it is.
    Pillow's own conversion makes all that is above 255 white."""
    if picture.mode.startswith("I;16"):
        import numpy as np
        from PIL import Image

        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in _UNBOUNDED:
        raise DataError(
            f"{where} has pixels of type {picture.mode}, without a value for white: save it with 8 or 16 bits a channel"
        )
    return picture


@functools.cache
def _quieten() -> None:
    """Keep Pillow's warnings from the terminal: its limit of pixels is not ours, and errors name the row."""
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
    logging.getLogger("PIL").addHandler(logging.NullHandler())


def is_plain(data: bytes) -> bool:
    """Whether a file's pixels are as they are to be shown; otherwise its EXIF entry says how to turn them, or they have
    more than 8 bits."""
    from PIL import ExifTags, Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
        return picture.mode[0] not in _UNBOUNDED and picture.getexif().get(ExifTags.Base.Orientation, 1) == 1


def encoded(picture: Image) -> bytes:
    """PNG bytes of an image: without loss, and fast rather than small."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _saved(picture: Image, where: str) -> bytes:
    """PNG bytes of an image of a Python program, which may not have been read from its file yet."""
    try:
        return encoded(picture)
    except Exception as error:  # as in `decoded`
        raise DataError(
            f"{where} is an image of PIL that cannot be read ({one_line(error)}): give another one, or remove the row"
        ) from error


def _unwrapped(source: Any) -> Any:
    """The image within a dictionary of OpenAI's, verl's or the library `datasets`'s form."""
    for _ in range(_MOST_NESTED):
        if not isinstance(source, Mapping):
            break
        entry = cast("Mapping[str, Any]", source)
        found = next((entry[name] for name in ("bytes", "url", "image", "path") if entry.get(name)), None)
        if found is None:
            break
        source = found
    return source


def _from_text(text: str, where: str, folder: Path | None) -> tuple[str, bytes]:
    """The URI and the bytes of a path or `data:` URI."""
    if text.startswith("data:"):
        header = _DATA_URI.match(text)
        try:
            if header is None:
                raise ValueError("it does not begin with data:image/png;base64, or the like")
            return text, base64.b64decode(text[header.end() :], validate=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{where} = {text!r:.40} is no data: URI ({error}): encode the file in base64") from error
    if re.match(r"[a-z][a-z0-9+.-]+://", text, re.IGNORECASE) and not text.startswith("file://"):
        raise DataError(f"{where} = {text!r:.80} lies on a network, from which nothing is fetched: give a local path")
    try:
        local = unquote(text.removeprefix("file://").removeprefix("localhost")) if text.startswith("file://") else text
        path = Path(local).expanduser()
        path = path if path.is_absolute() or folder is None else folder / path
        return str(path.absolute()), read_regular(path, MAX_BYTES)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte; RuntimeError: no such user's home
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DataError(f"{where} = {text!r:.120} cannot be read ({reason}): correct the path, relative to the row's "
                        "file") from error  # fmt: skip
