"""The report on runs: one HTML file that opens from the disk, asks the network for nothing, and shows a run whole.

Guarantees: it is made from what `slipstream.runlog` reads, of runs in any state; a missing number is said to be
missing; no text of a model, a task or a setting can become markup or script. Pictures are drawn without script, which
only adds read-outs; each has its numbers beside it as a table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.report.page import page
from slipstream.runlog import read_run

__all__ = ["write_report"]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report on one run, or on several side by side; by default to `report.html` in the current folder.

    Raises `ConfigError` when a folder holds no run, or the file cannot be written.
    """
    records = [read_run(folder) for folder in folders]
    path = out or Path("report.html")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give --out the name of a file, for example {path / 'report.html'}")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(page(records), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give --out another place") from error
    return path
