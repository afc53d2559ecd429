"""Names of models and tasks as people know them, for titles, tables and messages. Pure: no file is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

_STEP = re.compile(r"step-0*(\d+)$")
_USUAL = re.compile(r"(weights|model|final|best|merged|export(ed)?|adapter|checkpoint[-_]?\d*|latest)$", re.IGNORECASE)
"""Names of folders that say nothing without the folder above."""


def model_name(path: str) -> str:
    """The hub id that `path` is, or is the snapshot of; of a run's checkpoint the run and the step; of another folder
    its name, with the folder above where it is a usual one."""
    parts = [part for part in PurePath(path).parts if part not in ("/", ".", "..", "~")]
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    if parts[-1:] == ["weights"]:
        parts = parts[:-1] if len(parts) > 1 else parts
    if parts and (found := _STEP.match(parts[-1])):
        run = [part for part in parts[:-1] if part not in ("checkpoints", "weights")]
        return f"{run[-1]} step {found[1]}" if run else f"step {found[1]}"
    if not Path(path).is_absolute() and path.count("/") == 1 and not path.startswith((".", "~")):
        return path
    if len(parts) > 1 and _USUAL.match(parts[-1]):
        return "/".join(parts[-2:])
    return parts[-1] if parts else path


def task_namer(settings: dict[str, Any]) -> Callable[[str], str]:
    """How tasks are called, by their ids: those of rows after the file that they are from, in the place of the setting
    that names it. `settings`: `environment.settings`."""
    files: dict[str, str] = {}
    for key in ("path", "eval_path"):
        value = settings.get(key)
        if isinstance(value, str):
            files[key] = value
        elif isinstance(value, list):
            files |= {f"{key}/{number}": str(path) for number, path in enumerate(value)}
        elif isinstance(value, dict):
            files |= {f"{task}/{key}": str(path) for task, path in value.items()}

    def name(task_id: str) -> str:
        prefix, slash, row = task_id.rpartition("/")
        return f"{PurePath(files[prefix]).name}{slash}{row}" if prefix in files else task_id

    return name
