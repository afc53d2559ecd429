"""Reads rows of JSON lines, and of `.json` files that hold one list; either may be compressed (`.gz`).

Text is UTF-8, with or without a byte order mark. Any other encoding is refused, as it would be guessed.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from slipstream.data.plain_values import kind_of
from slipstream.errors import DataError
from slipstream.regular_files import MAX_BYTES, lines_of, open_regular

SUFFIXES = (".jsonl", ".json", ".ndjson")
_ONE_A_LINE = "write one JSON object a line, with the columns as its keys"
_POINTER = b"version https://git-lfs.github.com/spec/"
_DECODER = msgspec.json.Decoder()


def json_rows(path: Path, setting: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the values of each row. Raises `DataError`."""
    try:
        with open_regular(path) as raw, _unpacked(raw, path) as file:
            first, start = file.read(2), 0
            if first in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataError(f"{path} is UTF-16 text: save it as UTF-8 (iconv -f utf-16 -t utf-8)")
            file.seek(0)
            for number, line in enumerate(lines_of(file, path), start=1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if number == 1 and text.startswith(_POINTER):
                    raise DataError(f"{path} is a pointer of Git LFS, and the rows are not there: run `git lfs pull`")
                if number == 1 and text.lstrip().startswith(b"["):
                    rest = file.read(MAX_BYTES + 1)
                    if len(rest) > MAX_BYTES:
                        raise DataError(f"{path} is one JSON list of more than {MAX_BYTES:,} bytes: {_ONE_A_LINE}")
                    yield from _list_rows(path, text + rest)
                    return
                if text.strip():
                    where = f"row {number} of {path}"
                    yield where, _object(_decoded(text, where, start + len(line) - len(text)), where)
                start += len(line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): save or download it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): correct {setting}") from error


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if path.suffix.lower() == ".gz" else raw


def _list_rows(path: Path, text: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file that is one JSON list."""
    if not path.name.lower().removesuffix(".gz").endswith(".json"):
        raise DataError(f"{path} is one JSON list: {_ONE_A_LINE}, or call the file .json")
    for number, values in enumerate(_decoded(text, str(path), 0), start=1):
        where = f"row {number} of {path}"
        yield where, _object(values, where)


def _object(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"{where} is {kind_of(values)}: {_ONE_A_LINE}")
    return cast("dict[str, Any]", values)


def _decoded(text: bytes, where: str, start: int) -> Any:
    """The value of a text that begins at byte `start` of its file."""
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            text.decode()
        except UnicodeDecodeError as wrong:
            raise DataError(
                f"{where} is not UTF-8 text (byte {start + wrong.start} of the file): save the file as UTF-8 (of "
                "Windows-1252, iconv -f cp1252 -t utf-8)"
            ) from error
        raise DataError(f"{where} is not JSON ({error}): correct or remove it") from error
    except RecursionError:
        raise DataError(f"{where} nests lists or objects too deeply: correct or remove it") from None
