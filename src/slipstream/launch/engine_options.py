"""Are the `inference.options` of a run file options of the vLLM that is installed? Asked before anything starts.

Importing vLLM takes many seconds, so its source is read instead: the annotated fields of the engine arguments' classes.
Where vLLM is not installed, or its source is built otherwise, nothing is refused here; vLLM itself will.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from slipstream.config.keys import closest
from slipstream.errors import ConfigError

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
