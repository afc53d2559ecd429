"""Python files of the user's: importing one runs its code, in the run's process and in every scorer process."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from slipstream.errors import ConfigError


def import_file(path: Path, setting: str) -> ModuleType:
    """The module in `path`, made anew; `setting` named it. Raises `ConfigError`, also for what its code raises."""
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {path} (looked in {Path.cwd()}): correct the path")
    path = path.resolve()
    name = f"slipstream_environment_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:  # as for a script: what lies beside the file can be imported
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code, whatever it raises
        del sys.modules[name]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        number = error.lineno if isinstance(error, SyntaxError) and not frames else None
        place = f", line {frames[-1].lineno if frames else number}" if frames or number else ""
        raise ConfigError(f"{setting}: importing {path}{place} failed: {last_line(error)}") from error
    return module


def last_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return " ".join(traceback.format_exception_only(error)[-1].split())
