"""Are the `inference.options` of a run file options of the vLLM that is installed? Asked before anything starts.

Importing vLLM takes many seconds, so its source is read for the names: the annotated fields of the engine arguments'
classes. Where vLLM is not installed, or its source is built otherwise, nothing is refused here; vLLM itself will. For
the values `slipstream plan` asks vLLM itself, in a process that ends with the answer.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from slipstream.config.parse.keys import closest
from slipstream.config.parse.messages import show
from slipstream.errors import ConfigError
from slipstream.inference import child_process
from slipstream.inference.settings import EngineSettings
from slipstream.runlog.temporary import temporary

TRIAL = "slipstream.inference.plugin.try_settings"
TRIAL_TIMEOUT_S = 600.0
_CLASSES = ("EngineArgs", "AsyncEngineArgs")


def check_options(options: Iterable[str]) -> None:
    """Raises `ConfigError` for the first option that vLLM's engine arguments do not have."""
    names = list(options)
    known = vllm_options() if names else frozenset[str]()
    for name in names:
        if known and name not in known:
            near = closest(name, sorted(known))
            hint = f"did you mean {near}?" if near else "see the engine arguments of `vllm serve --help`"
            raise ConfigError(f"inference.options.{name} is not an engine argument of the installed vLLM: {hint}")


def try_options(settings: EngineSettings) -> None:
    """Have vLLM make its configuration of `settings`, without an engine. Raises `ConfigError` with its reason and the
    options that it names, where it refuses."""
    environment = {
        **os.environ,
        **child_process.OFFLINE,
        **child_process.SAFE_PATH,
        "SLIPSTREAM_ENGINE": "1",
        "VLLM_PLUGINS": "slipstream",
    }
    with temporary("trial") as folder:
        path, log = folder / "settings.json", folder / "log"
        path.write_bytes(msgspec.json.encode(settings))
        process = child_process.launch([sys.executable, "-m", TRIAL, str(path)], environment, log)
        try:
            process.communicate(timeout=TRIAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"vLLM did not say within {TRIAL_TIMEOUT_S:g} s whether it takes inference.options: remove them"
            ) from None
        finally:
            child_process.end(process, 0.0)
        said = "" if process.returncode == 0 else child_process.last_error(log).partition(" [type=")[0]
    if process.returncode != 0:
        named = [name for name in settings.options if name in said] or [*settings.options]
        values = ", ".join(f"inference.options.{name} = {show(settings.options[name])}" for name in named[:3])
        raise ConfigError(f"{values}: the installed vLLM refuses it ({said or 'it died'}): correct or remove it")


@cache
def vllm_options() -> frozenset[str]:
    """The names of vLLM's engine arguments; none where they cannot be found."""
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
