"""Marks the start-up phases of an engine: each of its processes appends a line to one file when a phase begins.

Phases begin with methods of vLLM's `Executor`, wrapped by this module. If a vLLM lacks one, its time counts for the
phase before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.processes import heartbeat

VARIABLE = "SLIPSTREAM_MARKS"
"""In the environment of an engine's processes: the file."""
READY = "ready"
_EXECUTOR = "vllm.v1.executor.abstract"
_BEGUN_BY = {
    "__init__": "load",
    "determine_available_memory": "profile",
    "initialize_from_config": "cache",
    "compile_or_warm_up_model": "cache",
}
"""Methods of vLLM's executors, and the phases begun by them."""
_DOING = {
    "import": "importing vLLM",
    "load": "loading weights",
    "profile": "measuring memory or compiling",
    "cache": "making the KV cache or capturing graphs",
    "verify": "looking at the weights",
    READY: "in service",
}


def phase_names(*, eager: bool) -> dict[str, str]:
    """A description of each mark, in order. Without `eager` vLLM compiles in its memory profiling run, and captures
    CUDA graphs once it has its KV cache."""
    return {
        "import": "import vLLM",
        "load": "load weights",
        "profile": "measure memory" if eager else "compile",
        "cache": "make the KV cache" if eager else "capture graphs",
        "verify": "look at the weights",
    }


def mark(name: str) -> None:
    """Note that the phase `name` begins, or that the engine is `READY`."""
    heartbeat.doing(_DOING[name])
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError), open(path, "a", encoding="ascii") as file:
            file.write(f"{time.monotonic():.3f} {name}\n")


def read_marks(path: Path) -> list[tuple[str, float]]:
    """Each mark with its first time by `time.monotonic`, common to all processes."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii", errors="replace").split("\n"):
            at, _, name = line.partition(" ")
            with contextlib.suppress(ValueError):
                found.setdefault(name, float(at)) if name else None
    return list(found.items())


def follow_executor() -> None:
    """Wrap the methods of vLLM's `Executor` in this process; safe to call again."""
    try:
        executor: Any = importlib.import_module(_EXECUTOR).Executor
    except (ImportError, AttributeError):
        return
    for method, name in _BEGUN_BY.items():
        done = vars(executor).get(method)
        if callable(done) and not hasattr(done, "marks"):
            setattr(executor, method, _marked(done, name))


def _marked(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def begun(*args: Any, **kwargs: Any) -> Any:
        mark(name)
        try:
            return method(*args, **kwargs)
        finally:
            heartbeat.doing("")  # this process says no more: the server's shows its work

    begun.marks = name  # type: ignore[attr-defined]
    return begun
