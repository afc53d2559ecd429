"""The child's side of `inference.preimport`: imports vLLM, then waits for its settings."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from slipstream.processes import stacks

HAS_GPU = Path("/dev/nvidiactl").exists()
"""Whether an NVIDIA driver is present, found without importing torch."""
_IMPORTED = (
    "uvloop",
    "slipstream.inference.plugin.patches.patch_table",
    "vllm",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader.default_loader",
    f"vllm.v1.worker.{'gpu' if HAS_GPU else 'cpu'}_worker",
    "slipstream.inference.plugin.weights.receiver",
)
"""Modules imported by every engine, whatever its settings."""


def settings_later(order: Callable[[], bytes]) -> str:
    """Import every engine's modules, wait for an order, apply its environment and log; returns the path of
    settings."""
    for name in _IMPORTED:
        with contextlib.suppress(Exception):  # the engine itself reports it
            importlib.import_module(name)
    given = json.loads(order())
    os.environ.update(given["environment"])
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(given["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ[stacks.VARIABLE] = str(stacks.prefix_of(Path(given["log"])))
    stacks.register()
    return given["settings"]
