"""Files in a folder, or at any address of fsspec, such as an S3 bucket.

Guarantees: a file appears whole or not at all, with the size and digest of its source; no listing is cached; each
request has a deadline.

Credentials, profile, region and endpoint of a bucket are found as botocore finds them. A message shows the class of an
error and its code. It never shows the text or the cause of an error: both may repeat the keys of a request. For the
same reason botocore's own log is off.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from slipstream.config.addresses import check_address, is_address, is_loopback
from slipstream.errors import ConfigError, DataError, SlipstreamError, first_line
from slipstream.processes.temporary import temporary
from slipstream.regular_files import open_regular

T = TypeVar("T")

_ANSWER_S = 120.0
"""How long a request may take with all attempts, beside the time for the file."""
_SLOWEST_BYTES_PER_S = 32 << 10
_PART_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_MAX_TEXT_BYTES = 256 << 20
_OPTIONS: dict[str, dict[str, Any]] = {
    # s3fs repeats a request itself.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}}
}


class Unavailable(ConfigError):
    """The files cannot be reached now."""


@dataclass(frozen=True)
class Entry:
    """A file there."""

    name: str
    """Its last part."""
    size_bytes: int
    modified: Any
    """When; each kind of place has its own type."""
    is_folder: bool


@dataclass(frozen=True)
class Digest:
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str


class RemoteFolder:
    """A folder at an address; names are relative to it. All methods raise `Unavailable` if the place cannot be used."""

    def __init__(self, address: str, setting: str = "", rights: str = "s3:ListBucket and s3:GetObject") -> None:
        """`setting` has the address; `rights` are those of S3, for messages. Raises ConfigError for any other
        text, and without the package for it."""
        if not address.strip():  # as a path it means the current folder
            raise ConfigError(f"{setting or 'the registry'} is empty: give a folder, or s3://bucket/prefix")
        self.address = check_address(address, setting) if is_address(address) else str(Path(address).resolve())
        self._rights = rights
        scheme = self.address.partition("://")[0]
        for library in ("botocore", "aiobotocore", "s3fs"):  # their messages have requests with all headers
            logging.getLogger(library).setLevel(logging.CRITICAL)
        try:
            self._files: Any  # methods of asynchronous file systems also take a timeout
            self._files, self._root = url_to_fs(
                self.address, skip_instance_cache=True, use_listings_cache=False, **_OPTIONS.get(scheme, {})
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{self.address} cannot be opened ({first_line(error)}): give a folder, or s3://bucket/prefix with the "
                "extra s3 (pip install 'slipstream[s3]')"
            ) from None
        if scheme == "s3":
            self.ask(lambda: _check_endpoint(self._files.s3.meta.endpoint_url, self.address))

    def __str__(self) -> str:
        return self.address

    def entries(self, name: str) -> list[Entry]:
        """The entries of a folder; none for a missing one."""

        def listed() -> list[dict[str, Any]]:
            try:
                return self._files.ls(self._path(name), detail=True, **self._limit())
            except (FileNotFoundError, NotADirectoryError):
                return []

        return [
            Entry(
                each["name"].rstrip("/").rpartition("/")[2],
                each.get("size") or 0,
                each.get("LastModified") or each.get("mtime") or each.get("created"),
                each["type"] == "directory",
            )
            for each in self.ask(listed)
        ]

    def get(self, name: str, file: Path, size_bytes: int) -> None:
        """Copy a file here. Raises DataError for one of another size, and does not read it to its end."""
        limit = self._limit(size_bytes)

        def copy() -> None:
            self._files.get_file(self._path(name), str(file), callback=_Bounded(size_bytes, self.place(name)), **limit)

        self.ask(copy)
        if file.stat().st_size != size_bytes:
            raise _of_another_size(self.place(name), size_bytes)

    def put(self, file: Path, name: str) -> Digest:
        """Copy a file there, in place of one of its name, and compare it with its source; its digest. Raises DataError
        for a difference."""
        expected, etag = _digests(file)

        def copy() -> None:
            path = self._path(name)
            if isinstance(self._files, LocalFileSystem):
                _copy_whole(file, Path(path))
                return
            # `open(..., "wb")` would commit a part of the file when the block raises.
            options = {"chunksize": _PART_BYTES} if self.address.startswith("s3:") else {}
            self._files.put_file(str(file), path, **options, **self._limit(expected.size_bytes))

        self.ask(copy)
        info: dict[str, Any] = self.ask(lambda: self._files.info(self._path(name), **self._limit()))
        if info["size"] != expected.size_bytes or not (
            str(info.get("ETag", "")).strip('"') == etag or self._digest_of(name, expected.size_bytes) == expected
        ):
            raise DataError(f"{self.place(name)} is not what was copied from {file}: the copy was damaged, try again")
        return expected

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it is not there."""

        def content() -> bytes | None:
            try:
                if self._files.info(self._path(name), **self._limit())["size"] > _MAX_TEXT_BYTES:
                    raise DataError(f"{self.place(name)} is too large: it was replaced")
                return self._files.cat_file(self._path(name), **self._limit())
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self.ask(content)

    def write(self, name: str, data: bytes) -> Digest:
        """Replace a small file."""
        with temporary("upload") as here:
            file = here / "content"
            file.write_bytes(data)
            return self.put(file, name)

    def size_of(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there."""

        def size() -> int | None:
            try:
                return self._files.info(self._path(name), **self._limit())["size"]
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self.ask(size)

    def sizes(self, name: str) -> dict[str, int]:
        """Names and bytes of all files below a folder."""

        def found() -> dict[str, dict[str, Any]]:
            try:
                return self._files.find(self._path(name), detail=True, **self._limit())
            except FileNotFoundError:
                return {}

        start = len(self._path(name)) + 1
        return {path[start:]: each["size"] for path, each in self.ask(found).items()}

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        self.ask(remove)

    def place(self, name: str) -> str:
        """The path or address of a file."""
        return f"{self.address}/{name}"

    def ask(self, call: Callable[[], T]) -> T:
        """The call's result. Raises `Unavailable` with one sentence for any error but ours."""
        try:
            return call()
        except SlipstreamError:
            raise
        except Exception as error:  # noqa: BLE001 (each kind of place raises other errors)
            problem = f"{self.address} cannot be used ({_shown(error)})"
        raise Unavailable(
            f"{problem}: correct its address, its endpoint and the credentials (rights "
            f"{self._rights}), or check the network"
            if "://" in self.address
            else f"{problem}: make room there, or name another folder"
        )

    def _digest_of(self, name: str, size_bytes: int) -> Digest:
        """Read a file back."""

        def read() -> Digest:
            found, size = hashlib.sha256(), 0
            with self._files.open(self._path(name), "rb") as file:
                for data in _pieces(file):
                    found.update(data)
                    size += len(data)
                    if size > size_bytes:
                        break
            return Digest(size, found.hexdigest())

        return self.ask(read)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _limit(self, num_bytes: int = 0) -> dict[str, float]:
        """The deadline of a call, if the file system is asynchronous."""
        return {"timeout": _ANSWER_S + num_bytes / _SLOWEST_BYTES_PER_S} if self._files.async_impl else {}


class _Bounded(Callback):
    """Ends a download of more bytes than were listed."""

    def __init__(self, size_bytes: int, place: str) -> None:
        super().__init__()
        self._size_bytes, self._place = size_bytes, place

    def relative_update(self, inc: int = 1) -> None:
        """Called with the length of each piece."""
        super().relative_update(inc)
        if self.value > self._size_bytes:
            raise _of_another_size(self._place, self._size_bytes)


def _of_another_size(place: str, size_bytes: int) -> DataError:
    return DataError(f"{place} is not as long as its {size_bytes:,} listed bytes: it was damaged or replaced")


def _copy_whole(file: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary("upload", path.parent) as beside:
        new = beside / path.name
        shutil.copyfile(file, new)
        handle = os.open(new, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        new.replace(path)


def _digests(file: Path) -> tuple[Digest, str]:
    """The digest of a file, and its digest in S3: MD5, or for several parts the MD5 of theirs."""
    whole, size, parts = hashlib.sha256(), 0, list[Any]()
    with open_regular(file) as opened:
        is_one = os.fstat(opened.fileno()).st_size < 2 * _PART_BYTES  # as s3fs divides it
        for data in _pieces(opened):
            whole.update(data)
            if not parts or (not is_one and size % _PART_BYTES == 0):
                parts.append(_md5())
            parts[-1].update(data)
            size += len(data)
    digest = Digest(size, whole.hexdigest())
    if is_one:
        return digest, (parts or [_md5()])[0].hexdigest()
    return digest, f"{_md5(b''.join(part.digest() for part in parts)).hexdigest()}-{len(parts)}"


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _pieces(file: Any) -> Iterator[bytes]:
    while data := file.read(_READ_BYTES):
        yield data


def _shown(error: BaseException) -> str:
    """The class of an error, and the code of a server or the text of the operating system's number."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
    if re.fullmatch(r"[A-Za-z0-9.]{1,60}", code) is None:
        code = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return ", ".join(filter(None, (type(error).__name__, code)))


def _check_endpoint(endpoint: str, address: str) -> None:
    """Raises ConfigError for an endpoint where others could listen."""
    parts = urlsplit(endpoint)
    shown = f"the endpoint {parts.scheme}://{parts.hostname} of {address}"
    if parts.username or parts.password:
        raise ConfigError(f"{shown} is given with a name or a password, which logs would show: remove them")
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"{shown} is another machine's, where anybody on the network could read and replace what is sent without "
            "TLS: use https://"
        )
