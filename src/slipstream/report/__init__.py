"""Writes the report on one or several runs: one HTML file that works offline.

It is made from what `slipstream.runlog` reads, for runs in any state; a missing number is shown as missing; no text of
a model, a task or a setting can become markup or script. Plots are drawn without script, which only adds read-outs;
each has a table of its numbers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.errors import ConfigError, DataError
from slipstream.names import task_namer
from slipstream.regular_files import open_regular
from slipstream.report.html_report import TITLE_END, page
from slipstream.runlog import RunRecord, read_run, read_settings

__all__ = ["write_report"]

_HEAD_BYTES = 1 << 16


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report on one run, or on several side by side; by default to `report.html` in the current folder.
    Raises `ConfigError` if a folder holds no run, the file cannot be written, or it exists and is not a report."""
    records = [_with_names(read_run(folder)) for folder in folders]
    path = out or Path("report.html")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give --out the name of a file, for example {path / 'report.html'}")
    if path.exists() and not _is_report(path):
        raise ConfigError(f"{path} exists and is no report of ours: give --out another place, or remove it")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(page(records), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give --out another place") from error
    return path


def _is_report(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return TITLE_END.encode() in file.read(_HEAD_BYTES)
    except OSError:  # a FIFO, or a file that this user may not read
        return False


def _with_names(record: RunRecord) -> RunRecord:
    """The record with its tasks as people call them."""
    with contextlib.suppress(DataError):  # which the record says already
        found = read_settings(record.summary.folder).get("environment.settings")
        name = task_namer(found if isinstance(found, dict) else {})
        return replace(record, samples=[{**each, "task": name(str(each.get("task", "")))} for each in record.samples])
    return record
