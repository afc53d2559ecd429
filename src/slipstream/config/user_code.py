"""Imports Python files of the user, in the run's process and in every reward worker."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from slipstream.errors import ConfigError, one_line


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
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code, whatever it raises
        del sys.modules[name]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        number = error.lineno if isinstance(error, SyntaxError) and not frames else None
        place = f", line {frames[-1].lineno if frames else number}" if frames or number else ""
        raise ConfigError(f"{setting}: importing {path}{place} failed: {one_line(error)}") from error
    return module


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
