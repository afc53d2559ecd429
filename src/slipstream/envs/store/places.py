"""The places of registries: a folder, or any address that fsspec opens. An environment lies at
`<registry>/<name>/<digest>.tar`.

Credentials, profile, region and endpoint of a bucket are found as botocore finds them. A message shows the class of an
error and its code. It never shows the text or the cause of an error, which may repeat the keys of a request. For the
same reason botocore's own log is off.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from slipstream.config.addresses import check_address, is_address, is_loopback
from slipstream.envs.store.content import MAX_ARCHIVE_BYTES
from slipstream.errors import ConfigError, DataError, SlipstreamError, first_line
from slipstream.processes.temporary import temporary

T = TypeVar("T")

_SUFFIX = ".tar"
_FILE = re.compile(rf"([0-9a-f]{{64}}){re.escape(_SUFFIX)}")
_ANSWER_S = 120.0
"""How long a request may take with all attempts, beside the time for an archive."""
_SLOWEST_BYTES_PER_S = 32 << 10
_OPTIONS: dict[str, dict[str, Any]] = {
    # s3fs repeats a request itself.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}}
}


@dataclass(frozen=True)
class Archive:
    """An archive in a registry. Nobody has looked yet whether it holds what its name says."""

    name: str
    digest: str
    place: str
    """Its path or address."""
    size_bytes: int
    modified: Any
    """When; of a type that depends on the place."""


class Registry:
    """Keeps archives by name and digest. All methods raise ConfigError where the place cannot be used."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for a text that is no address, and without the package that opens it."""
        if not address.strip():  # as a path it means the current folder
            raise ConfigError("the registry is empty: give a folder, or s3://bucket/prefix")
        self.address = check_address(address) if is_address(address) else str(Path(address).resolve())
        scheme = self.address.partition("://")[0]
        for library in ("botocore", "aiobotocore", "s3fs"):  # what they log has requests with all headers in it
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
            self._asked(lambda: _check_endpoint(self._files.s3.meta.endpoint_url, self.address))

    def __str__(self) -> str:
        return self.address

    def archives(self, name: str, digest: str = "") -> list[Archive]:
        """The archives of an environment with digests that begin so, the oldest first."""

        def listed() -> list[dict[str, Any]]:
            try:
                return self._files.ls(f"{self._root}/{name}", detail=True, **self._limit())
            except (FileNotFoundError, NotADirectoryError):
                return []

        found: list[Archive] = []
        for entry in self._asked(listed):
            whole = _FILE.fullmatch(entry["name"].rpartition("/")[2])
            if whole and whole[1].startswith(digest) and entry["type"] == "file":
                modified = entry.get("LastModified") or entry.get("mtime") or entry.get("created")
                found.append(Archive(name, whole[1], self._place(name, whole[1]), entry["size"], modified))
        return self._asked(lambda: sorted(found, key=lambda archive: (archive.modified, archive.digest)))

    def fetch(self, archive: Archive, here: Path) -> Path:
        """A copy of an archive in the folder `here`. Raises DataError for one that cannot be had whole."""
        file = here / "fetched.tar"
        path = f"{self._root}/{archive.name}/{archive.digest}{_SUFFIX}"
        if archive.size_bytes <= MAX_ARCHIVE_BYTES:
            limit = self._limit(archive.size_bytes)
            self._asked(lambda: self._files.get_file(path, str(file), callback=_Bounded(archive), **limit))
            if file.stat().st_size == archive.size_bytes:
                return file
        raise _damaged(archive)

    def put(self, name: str, digest: str, file: Path) -> str:
        """Keep a file as an archive, whole or not at all, in place of one that is there, and return its place."""
        path = Path(f"{self._root}/{name}/{digest}{_SUFFIX}")

        def write() -> None:
            if not isinstance(self._files, LocalFileSystem):
                self._files.put_file(str(file), str(path), **self._limit(file.stat().st_size))
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary("environment", path.parent) as beside:
                shutil.copyfile(file, beside / path.name)
                (beside / path.name).replace(path)

        self._asked(write)
        return self._place(name, digest)

    def _place(self, name: str, digest: str) -> str:
        return f"{self.address}/{name}/{digest}{_SUFFIX}"

    def _limit(self, num_bytes: int = 0) -> dict[str, float]:
        """The deadline of a call; a file system that is not asynchronous has none."""
        return {"timeout": _ANSWER_S + num_bytes / _SLOWEST_BYTES_PER_S} if self._files.async_impl else {}

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except SlipstreamError:
            raise
        except Exception as error:  # noqa: BLE001 (each kind of place raises other errors)
            what = f"{self.address} cannot be used ({_shown(error)})"
        raise ConfigError(
            f"{what}: correct its address, its endpoint and the credentials, which need the rights s3:ListBucket and "
            "s3:GetObject, and s3:PutObject to push, or check the network"
            if "://" in self.address
            else f"{what}: name another folder"
        )


class _Bounded(Callback):
    """Ends a download that is longer than the archive was listed."""

    def __init__(self, archive: Archive) -> None:
        super().__init__()
        self._archive = archive

    def relative_update(self, inc: int = 1) -> None:
        """Called with the length of each piece."""
        super().relative_update(inc)
        if self.value > self._archive.size_bytes:
            raise _damaged(self._archive)


def _damaged(archive: Archive) -> DataError:
    return DataError(
        f"{archive.place} is larger than {MAX_ARCHIVE_BYTES:,} bytes or not as long as its {archive.size_bytes:,} "
        "listed bytes: it was damaged or replaced, push the environment again"
    )


def _shown(error: BaseException) -> str:
    """The class of an error, and the code that a server gave or the text of the operating system's number."""
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
