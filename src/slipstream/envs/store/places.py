"""The places of registries: a folder, or any address for fsspec. An environment lies at
`<registry>/<name>/<digest>.tar`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.envs.store.content import MAX_ARCHIVE_BYTES
from slipstream.errors import DataError
from slipstream.remote_files import RemoteFolder

_SUFFIX = ".tar"
_FILE = re.compile(rf"([0-9a-f]{{64}}){re.escape(_SUFFIX)}")


@dataclass(frozen=True)
class Archive:
    """An archive in a registry, not yet compared with its name."""

    name: str
    digest: str
    place: str
    """Its path or address."""
    size_bytes: int
    modified: Any
    """Its time; the type depends on the place."""


class Registry:
    """Keeps archives by name and digest. All methods raise ConfigError if the place cannot be used."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an invalid address, and without the package for it."""
        self._files = RemoteFolder(address, rights="s3:ListBucket and s3:GetObject, and s3:PutObject to push")
        self.address = self._files.address

    def __str__(self) -> str:
        return self.address

    def archives(self, name: str, digest: str = "") -> list[Archive]:
        """The archives of an environment with this start of their digests, the oldest first."""
        found: list[Archive] = []
        for entry in self._files.entries(name):
            whole = _FILE.fullmatch(entry.name)
            if whole and whole[1].startswith(digest) and not entry.is_folder:
                place = self._files.place(_name(name, whole[1]))
                found.append(Archive(name, whole[1], place, entry.size_bytes, entry.modified))
        return self._files.ask(lambda: sorted(found, key=lambda archive: (archive.modified, archive.digest)))

    def fetch(self, archive: Archive, here: Path) -> Path:
        """A copy of an archive in the folder `here`. Raises DataError if it cannot be had whole."""
        file = here / "fetched.tar"
        if archive.size_bytes > MAX_ARCHIVE_BYTES:
            raise _damaged(archive)
        try:
            self._files.get(_name(archive.name, archive.digest), file, archive.size_bytes)
        except DataError:
            raise _damaged(archive) from None
        return file

    def put(self, name: str, digest: str, file: Path) -> str:
        """Keep a file as an archive, whole or not at all, in place of an older one, and return its place."""
        self._files.put(file, _name(name, digest))
        return self._files.place(_name(name, digest))


def _name(name: str, digest: str) -> str:
    return f"{name}/{digest}{_SUFFIX}"


def _damaged(archive: Archive) -> DataError:
    return DataError(
        f"{archive.place} is larger than {MAX_ARCHIVE_BYTES:,} bytes or not as long as its {archive.size_bytes:,} "
        "listed bytes: it was damaged or replaced, push the environment again"
    )
