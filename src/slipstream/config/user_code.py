"""Imports Python files of the user, in the run's process and in every reward worker, and notes what was read.

Inside `recorded` every import of a user's file, and every data set that was read, leaves a `CodeRead` or a `DataRead`:
what a run was made with is known without looking for it, or running anything, a second time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from slipstream.errors import ConfigError, one_line

Stamp = tuple[int, int, int, int]
"""Device, inode, size and time of a file: while these stay, so does its content."""


@dataclass(frozen=True)
class CodeRead:
    """A Python file that was executed."""

    setting: str
    path: Path
    sha256: str
    """Of the file as it was before."""


@dataclass(frozen=True)
class FileRead:
    """One file of a data set."""

    path: Path
    num_rows: int
    stamp: Stamp | None
    """Before it was read."""


@dataclass(frozen=True)
class DataRead:
    """A data set that was read: from files, from the hub (`revision`), or of a Python caller (`revision`: a digest)."""

    setting: str
    source: str
    split: str
    files: tuple[FileRead, ...] = ()
    revision: str = ""
    num_rows: int = 0


_recorders: list[list[CodeRead | DataRead]] = []


@contextmanager
def recorded() -> Generator[list[CodeRead | DataRead]]:
    """Inside, what is read by any thread of this process is added to the list."""
    found: list[CodeRead | DataRead] = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders[:] = [other for other in _recorders if other is not found]


def note(read: CodeRead | DataRead) -> None:
    """Tell those who record."""
    for found in _recorders:
        found.append(read)


def stamp_of(path: Path) -> Stamp | None:
    """The file's stamp; None where it cannot be had."""
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return None


def import_file(path: Path, setting: str) -> ModuleType:
    """Imports the file `path` as a new module; `setting` is the setting that named it. Raises `ConfigError`, also when
    the file's code raises."""
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {path} (looked in {Path.cwd()}): correct the path")
    path = path.resolve()
    name = f"slipstream_environment_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:  # as for a script, so that it can import modules beside it
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    if _recorders:
        note(CodeRead(setting, path, hashlib.sha256(path.read_bytes()).hexdigest()))
    try:
        with _own_bytecode():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code, whatever it raises
        del sys.modules[name]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        number = error.lineno if isinstance(error, SyntaxError) and not frames else None
        place = f", line {frames[-1].lineno if frames else number}" if frames or number else ""
        raise ConfigError(f"{setting}: importing {path}{place} failed: {one_line(error)}") from error
    return module


@contextmanager
def _own_bytecode() -> Generator[None]:
    """Undo `compile_caches` for a user's file: with the same time and size, a changed one would run as before."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    given = os.environ.get("PYTHONPYCACHEPREFIX")
    sys.pycache_prefix, sys.dont_write_bytecode = given or None, bool(sys.flags.dont_write_bytecode)
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def place_of(error: BaseException) -> str:
    """Where the user's code raised `error`, such as `line 12 of /home/me/count.py`: the last frame outside the standard
    library, other packages and this one."""
    frames = traceback.extract_tb(error.__traceback__)
    paths = sysconfig.get_paths()
    python, packages = [paths["stdlib"], paths["platstdlib"]], [paths["purelib"], paths["platlib"]]
    # Code of an installed environment is in a package, too.
    theirs = _outside(frames, [*python, *packages]) or _outside(frames, python) or frames
    return f"line {theirs[-1].lineno} of {theirs[-1].filename}"


def _outside(frames: Sequence[traceback.FrameSummary], folders: Sequence[str]) -> list[traceback.FrameSummary]:
    hidden = [Path(folder).resolve() for folder in (*folders, Path(__file__).parents[1])]
    files = [(frame, Path(frame.filename).resolve()) for frame in frames if not frame.filename.startswith("<")]
    return [frame for frame, file in files if not any(file.is_relative_to(folder) for folder in hidden)]
