"""The side of the child of `inference/preimport.py`: it imports, and then waits to be told what for."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
"""Whether there is a driver of NVIDIA's: what can be known without importing torch."""
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
"""What every engine imports, whatever its settings."""


def settings_later(order: Callable[[], bytes]) -> str:
    """Import what every engine needs, and then wait for the order to be one; the path of its settings."""
    for name in _IMPORTED:
        with contextlib.suppress(Exception):  # whoever needs what cannot be imported says so
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
    return given["settings"]
