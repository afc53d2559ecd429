"""Patches of vLLM's LoRA: the layers with room for an adapter, and the reading of an adapter's file."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
from torch import Tensor

from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded, changeable
from slipstream.weights.model_files import read_tensors


class _Opened:
    """The methods of an open safetensors file used by vLLM's loader."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.keys, self.get_tensor = tensors.keys, tensors.__getitem__


def of_linear_layers() -> None:
    """Patch `LoRAModelManager._match_target_modules`: a name selects linear layers only.

    For vLLM 0.26 to 0.33: it knows targets by the last part of their names, and refuses one if a module of another
    kind has it too: a patch embedding is called `proj` as the last layer of a tower's attention, a decoder layer `0`.
    """
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager

    manager = changeable(LoRAModelManager, "_match_target_modules")
    matches = manager._match_target_modules

    def matches_linear(self: Any, module_name: str) -> bool:
        if not matches(self, module_name):
            return False
        module = self.model.get_submodule(module_name)
        # Modules vLLM can quantize: linear layers, embeddings, experts.
        has_weights = hasattr(module, "quant_method") or hasattr(module, "_quant_method")
        return has_weights or isinstance(module, BaseLayerWithLoRA)

    manager._match_target_modules = matches_linear


def read_at_once(runner: Any) -> None:
    """Patch `lora_model.safetensors.safe_open`; `runner` is vLLM's model runner.

    vLLM maps the file and copies each of some hundred matrices into page-locked memory of its own before it copies them
    to the GPU. Here the file is read into one page-locked buffer, reused by torch for later adapters, and the
    matrices are views of it. On a CPU nothing is page-locked, and vLLM's way is shorter.
    """
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
