"""Run folders in the queue, and the state folder with a link to each.

Guarantees: a record is replaced atomically, under its own lock, and only along allowed transitions. The links are the
list of runs; nothing else is. A name is checked before it becomes a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path

import msgspec

from slipstream.config.addresses import RUN_NAME
from slipstream.errors import ConfigError, DataError, DeadlineError, SlipstreamError
from slipstream.processes.files import open_own, write_whole
from slipstream.runlog.files import LINKS, SERVICE_FOLDER, link_target, read_record, require_own, state_folder, try_lock
from slipstream.service.records import Record, step

RUN_FILE, OUTPUT = f"{SERVICE_FOLDER}/run.toml", f"{SERVICE_FOLDER}/output.log"
"""A run's settings and the output of its processes, below the run folder."""
_RECORD, _LOCK = f"{SERVICE_FOLDER}/record.json", f"{SERVICE_FOLDER}/lock"
_NAME = re.compile(RUN_NAME)
_WAIT_S, _PAUSE_S = 120.0, 0.01


def name_from(text: str) -> str:
    """A run's name made of any text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:60] or "run"


def record_of(folder: Path) -> Record | None:
    """The record in a run folder; None if the run was not submitted. Raises DataError for a damaged one."""
    try:
        return read_record(folder / _RECORD, Record)
    except DataError as error:
        raise DataError(f"{error}, and the run leaves the queue; all its other files stay") from error


def update(folder: Path, change: Callable[[Record], Record]) -> Record:
    """Change a run's record by compare-and-set: `change` gets the newest one. Returns the new record."""
    with locked(folder / _LOCK):
        old = record_of(folder)
        if old is None:
            raise ConfigError(f"{folder} has no record of a submitted run: submit it again")
        new = step(old, change(old), time.time())
        if new != old:
            _write(folder, new)
        return new


class Store:
    """The runs of a state folder."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or state_folder()
        self._links = self.root / LINKS
        self._links.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)
        require_own(self.root)

    def add(self, folder: Path, record: Record) -> None:
        """Write the record of a new run, and then its link. Raises ConfigError if the name is taken."""
        if not _NAME.fullmatch(record.id):
            raise ConfigError(f"{record.id!r} is no name of a run: use letters, digits, '.', '_' and '-'")
        _write(folder, record)
        try:
            (self._links / record.id).symlink_to(folder.absolute())
        except FileExistsError:
            if self.folder_of(record.id) != folder.absolute():
                raise ConfigError(f"there is a run {record.id} already: name another folder") from None

    def has(self, name: str) -> bool:
        """Whether a name is taken."""
        return os.path.lexists(self._links / name)

    def folder_of(self, name: str) -> Path | None:
        """The folder of a run by its name; None for an unknown one."""
        if not _NAME.fullmatch(name):
            return None
        return link_target(self._links / name)

    def find(self, run: str | Path) -> tuple[Path, Record]:
        """A run by its name or folder. Raises ConfigError, and DataError for a damaged record."""
        for folder in (self.folder_of(str(run)), Path(run).absolute()):
            if folder is not None and (record := record_of(folder)) is not None:
                return folder, record
        raise ConfigError(f"there is no run {str(run)!r} in the queue: slipstream status lists them")

    def all(self) -> dict[str, Path]:
        """Names and folders of all runs."""
        names = sorted(name for name in os.listdir(self._links) if _NAME.fullmatch(name))
        return {name: folder for name in names if (folder := self.folder_of(name)) is not None}

    def records(self) -> list[tuple[Path, Record]]:
        """All readable runs, in the order of submission. A removed folder is left out, and a damaged record."""
        found: list[tuple[Path, Record]] = []
        for name, folder in self.all().items():
            with contextlib.suppress(SlipstreamError, OSError):
                if (record := record_of(folder)) is not None and record.id == name:
                    found.append((folder, record))
        return sorted(found, key=lambda each: (each[1].submitted, each[1].id))

    def damaged(self, known: Collection[str]) -> list[tuple[str, Path, DataError]]:
        """Names and folders of runs with a damaged record, and its damage; `known` are readable."""
        found: list[tuple[str, Path, DataError]] = []
        for name, folder in self.all().items():
            try:
                if name not in known:
                    record_of(folder)
            except DataError as error:
                found.append((name, folder, error))
            except OSError:
                continue
        return found

    @contextlib.contextmanager
    def dispatching(self) -> Generator[None]:
        """In this context this process alone starts runs. Raises DeadlineError."""
        with locked(self.root / "dispatch.lock"):
            yield


def _write(folder: Path, record: Record) -> None:
    write_whole(folder / _RECORD, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a lock file; the kernel releases it with the process. Raises DeadlineError."""
    handle = open_own(path, os.O_RDWR)
    try:
        until = time.monotonic() + _WAIT_S
        while not try_lock(handle, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise DeadlineError(f"{path} was locked for {_WAIT_S:g} s: look for a stopped process of slipstream")
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(handle)
