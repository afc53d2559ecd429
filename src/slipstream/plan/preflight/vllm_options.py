"""Checks `inference.options` against the installed vLLM before anything starts.

Importing vLLM takes many seconds, so names are read from its source: the annotated fields of the engine arguments'
classes. If vLLM is not installed, or its source looks different, nothing is refused here and vLLM itself decides.
`slipstream plan` checks values: vLLM parses them in a child process.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from slipstream.config.parse.messages import show
from slipstream.config.parse.suggestions import closest
from slipstream.errors import ConfigError
from slipstream.inference.settings import EngineSettings
from slipstream.processes import exits
from slipstream.processes.launchers import LOCAL
from slipstream.processes.temporary import temporary

TRIAL = "slipstream.inference.plugin.try_settings"
TRIAL_TIMEOUT_S = 600.0
_CLASSES = ("EngineArgs", "AsyncEngineArgs")


def check_options(options: Iterable[str]) -> None:
    """Raise `ConfigError` for the first option that is no engine argument of vLLM."""
    names = list(options)
    known = vllm_options() if names else frozenset[str]()
    for name in names:
        if known and name not in known:
            near = closest(name, sorted(known))
            hint = f"did you mean {near}?" if near else "see the engine arguments of `vllm serve --help`"
            raise ConfigError(f"inference.options.{name} is not an engine argument of the installed vLLM: {hint}")


def try_options(settings: EngineSettings) -> None:
    """Have vLLM build its configuration from `settings`, without an engine. Raises `ConfigError` with vLLM's reason and
    the options in it."""
    environment = {
        **os.environ,
        **exits.OFFLINE,
        **exits.SAFE_PATH,
        "SLIPSTREAM_ENGINE": "1",
        "VLLM_PLUGINS": "slipstream",
    }
    with temporary("trial") as folder:
        path, log = folder / "settings.json", folder / "log"
        path.write_bytes(msgspec.json.encode(settings))
        process = LOCAL.launch(TRIAL, [str(path)], environment, output=log)
        try:
            process.wait(TRIAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"vLLM did not say within {TRIAL_TIMEOUT_S:g} s whether it takes inference.options: remove them"
            ) from None
        finally:
            process.end(0.0)
        reason = "" if process.poll() == 0 else exits.last_error(log).partition(" [type=")[0]
    if process.poll() != 0:
        named = [name for name in settings.options if name in reason] or [*settings.options]
        values = ", ".join(f"inference.options.{name} = {show(settings.options[name])}" for name in named[:3])
        raise ConfigError(f"{values}: the installed vLLM refuses it ({reason or 'it died'}): correct or remove it")


@cache
def vllm_options() -> frozenset[str]:
    """The names of vLLM's engine arguments; empty if they cannot be found."""
    package = importlib.util.find_spec("vllm")
    folders = list(package.submodule_search_locations or ()) if package else []
    files = [Path(folder) / "engine" / "arg_utils.py" for folder in folders]
    found: set[str] = set()
    for file in files:
        if not file.is_file():
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
                fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                found |= {target.id for target in fields if isinstance(target, ast.Name)}
    return frozenset(found)
