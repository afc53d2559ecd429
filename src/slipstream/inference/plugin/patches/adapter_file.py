"""The file of a LoRA adapter, read for vLLM's loader at once; for engines on a GPU.

vLLM maps the file and copies each matrix, some hundred of them, into page-locked memory of its own before it copies
them to the GPU. Here the file is read into one stretch of such memory, which torch keeps for a later adapter, and its
matrices are views of that. What vLLM's loader makes of them is its own. On a CPU, where nothing is page-locked, vLLM's
way is the shorter one.
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
    """The part of an open safetensors file that vLLM's loader asks for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.keys, self.get_tensor = tensors.keys, tensors.__getitem__


def read_at_once(runner: Any) -> None:
    """Have vLLM's loader of adapters read files so; `runner` is vLLM's model runner."""
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
