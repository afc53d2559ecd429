"""Patches vLLM's LoRA loader on GPUs (`lora_model.safetensors.safe_open`) to read an adapter's file at once.

vLLM maps the file and copies each of some hundred matrices into page-locked memory of its own before it copies them to
the GPU. Here the file is read into one page-locked buffer, which torch reuses for later adapters, and the matrices are
views of it. On a CPU, where nothing is page-locked, vLLM's way is shorter.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
from torch import Tensor

from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded
from slipstream.weights.model_files import read_tensors


class _Opened:
    """The methods of an open safetensors file that vLLM's loader calls."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.keys, self.get_tensor = tensors.keys, tensors.__getitem__


def read_at_once(runner: Any) -> None:
    """Patch vLLM's `lora_model` module; `runner` is vLLM's model runner."""
    from vllm.lora import lora_model

    if getattr(runner, "lora_manager", None) is None:
        raise NotNeeded("the engine has no room for adapters")
    module: Any = lora_model
    if getattr(module, "safetensors", None) is not safetensors:
        raise Absent("lora_model.safetensors")
    pinned = bool(getattr(module, "PIN_MEMORY", False))

    @contextmanager
    def safe_open(path: str, framework: str) -> Generator[Any]:
        tensors = read_tensors(Path(path), pinned=pinned)
        if tensors is not None:
            yield _Opened(tensors)
            return
        with safetensors.safe_open(path, framework=framework) as file:
            yield file

    module.safetensors = SimpleNamespace(safe_open=safe_open)
