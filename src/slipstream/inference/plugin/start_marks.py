"""What a starting engine is doing: each of its processes adds a line to one file when a phase begins.

The phases are begun by methods that every executor of vLLM has. One that this vLLM lacks is not told, and its time
counts for the phase before it.
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
"""Methods of vLLM's executors, and the phases that begin with them."""


def phase_names(*, eager: bool) -> dict[str, str]:
    """What people are told of each mark, in order. An engine that is not `eager` compiles in the run that measures what
    its activations take, and captures CUDA graphs once it has its KV cache."""
    return {
        "import": "import vLLM",
        "load": "load weights",
        "profile": "measure memory" if eager else "compile",
        "cache": "make the KV cache" if eager else "capture graphs",
        "verify": "look at the weights",
    }


def mark(name: str) -> None:
    """A phase begins, or the engine is `READY`."""
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError), open(path, "a", encoding="ascii") as file:
            file.write(f"{time.monotonic():.3f} {name}\n")


def read_marks(path: Path) -> list[tuple[str, float]]:
    """Each mark and when it was made first, on the clock of `time.monotonic`, which all processes share."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii", errors="replace").split("\n"):
            at, _, name = line.partition(" ")
            with contextlib.suppress(ValueError):
                found.setdefault(name, float(at)) if name else None
    return list(found.items())


def follow_executor() -> None:
    """Mark what an executor of this process does; safe to call again."""
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
        return method(*args, **kwargs)

    begun.marks = name  # type: ignore[attr-defined]
    return begun
