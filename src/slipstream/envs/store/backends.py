"""Where a registry has its archives: what each place can do, and the one that is a folder.

An environment lies at `<registry>/<name>/<digest>.tar`.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.processes.temporary import temporary

SUFFIX = ".tar"
_FILE = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Archive:
    """An archive in a registry. Nobody has looked yet whether it holds what its name says."""

    name: str
    digest: str
    place: str
    """Its path or address."""
    size_bytes: int
    modified: float
    """Seconds since the epoch."""


class Registry(Protocol):
    """Keeps archives by name and digest. All methods raise ConfigError where the place cannot be used."""

    @property
    def address(self) -> str:
        """As a run file names it."""
        ...

    def archives(self, name: str, digest: str = "") -> list[Archive]:
        """Those of an environment with digests that begin so, the oldest first."""
        ...

    def fetch(self, archive: Archive, here: Path) -> Path:
        """A file with the content of an archive, in the registry itself or written into the folder `here`. Raises
        DataError for one that cannot be had whole."""
        ...

    def adding(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Inside, a temporary folder for the file that `put` is given."""
        ...

    def put(self, name: str, digest: str, file: Path) -> str:
        """Keep a file as an archive, whole or not at all, in place of one that is there, and return its place."""
        ...


def digest_in(file_name: str) -> str:
    """The digest of the archive that has this file name; empty if none has."""
    found = _FILE.fullmatch(file_name)
    return found[1] if found else ""


class FolderRegistry:
    """A folder, which is made when the first archive is put."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def address(self) -> str:
        """See `Registry.address`."""
        return str(self._folder.resolve())

    def archives(self, name: str, digest: str = "") -> list[Archive]:
        """See `Registry.archives`."""
        found: list[Archive] = []
        for path in (self._folder / name).glob(f"{digest}*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile, or a link that leads nowhere
                state = path.stat()
                if (whole := digest_in(path.name)) and stat.S_ISREG(state.st_mode):
                    found.append(Archive(name, whole, str(path), state.st_size, state.st_mtime))
        return sorted(found, key=lambda archive: (archive.modified, archive.digest))

    def fetch(self, archive: Archive, here: Path) -> Path:
        """See `Registry.fetch`."""
        return Path(archive.place)

    @contextlib.contextmanager
    def adding(self, name: str) -> Generator[Path]:
        """See `Registry.adding`."""
        folder = self._folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temporary("environment", folder) as here:
                yield here
        except OSError as error:
            raise ConfigError(f"{self} cannot be written to ({error.strerror}): name another folder") from error

    def put(self, name: str, digest: str, file: Path) -> str:
        """See `Registry.put`. The file is one that `adding` has given a place to."""
        return str(file.replace(self._folder / name / f"{digest}{SUFFIX}"))
