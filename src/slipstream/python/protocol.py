"""What a Python program and the child process of its call say to each other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from slipstream.config.python_objects import PythonObject


class Call(msgspec.Struct, frozen=True):
    """What to do: `command` is train, sft or evaluate; `settings` are a run file's tables."""

    command: Literal["train", "sft", "evaluate"]
    settings: dict[str, Any]
    objects: tuple[PythonObject, ...] = ()
    resume: bool | Literal["auto"] = False
    view: Literal["auto", "none"] = "auto"


class Outcome(msgspec.Struct, frozen=True):
    """The result: a summary, and of an evaluation its samples; or an error by its class, exit code and message; or a
    request to continue in a new process (`again`)."""

    summary: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    error: str = ""
    message: str = ""
    exit_code: int = 0
    again: bool = False
