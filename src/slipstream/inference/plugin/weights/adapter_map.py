"""Where each tensor of a LoRA adapter lies inside vLLM's stacked buffers.

As for whole models (`tensor_map`), vLLM's own code is watched instead of copied into a table: its adapter loader, its
packing of q, k, v and of gate, up, and its slicing over workers get empty tensors, and each copy into a buffer is noted
instead of made. The published adapter's scaling is 1, so that nothing is multiplied on the way; what would be
transformed all the same is reported as unverified. What a buffer holds beside the adapter (a rank below the buffer's,
layers without one) must be zero.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.inference.plugin.weights.tensor_map import Recorder, TensorMap
from slipstream.records import ParameterSpec


def slot_of(manager: Any, lora_ids: list[int]) -> int:
    """The buffers' first index for the first of these adapters; raises when vLLM holds others, or not all of them."""
    loaded = sorted(manager.list_adapters())
    if loaded != sorted(lora_ids) or lora_ids[0] not in manager.lora_index_to_id:
        raise RuntimeError(f"vLLM holds the adapters {loaded}, and should hold {sorted(lora_ids)}")
    return manager.lora_index_to_id.index(lora_ids[0])


@torch.no_grad()
def record(manager: Any, slot: int, parameters: tuple[ParameterSpec, ...]) -> TensorMap:
    """Watch vLLM place the adapter `parameters` (shapes and dtypes; values are not read) in `slot`."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    recorder = Recorder(list(_buffers(manager)))
    tensors = dict(recorder.feed(parameters))
    rank = next(spec.shape[0] for spec in parameters if spec.name.endswith(".lora_A.weight"))
    with recorder:
        lora: Any = LoRAModel.from_lora_tensors(
            lora_model_id=1,
            tensors=tensors,
            peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=_renames(manager.model),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )
        manager._create_merged_loras_inplace(lora)
        for name, module in manager.modules.items():
            layer = manager._get_lora_layer_weights(lora, name)
            if layer:
                module.set_lora(slot, layer.lora_a, layer.lora_b)
    return recorder.map


def _renames(model: Any) -> Any:
    """What vLLM's adapter loader makes of a layer's name; the method has one name in vLLM 0.32, and another before."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


@torch.no_grad()
def stray_layers(manager: Any, slot: int, located: TensorMap) -> list[str]:
    """Names of layers whose buffers hold something beside the adapter's own numbers."""
    owned: dict[int, list[Tensor]] = {}
    for pieces in located.pieces.values():
        for piece in pieces:
            owned.setdefault(piece.target.untyped_storage().data_ptr(), []).append(piece.target)
    roomy: list[tuple[str, Tensor, list[Tensor]]] = []
    for name, module in manager.modules.items():
        for buffer in _stacked(module):
            found = owned.get(buffer.untyped_storage().data_ptr(), [])
            own = list({(t.storage_offset(), t.shape, t.stride()): t for t in found}.values())
            if sum(target.numel() for target in own) != buffer[slot].numel():  # there is room beside them
                roomy.append((name, buffer[slot], own))
    if not roomy:
        return []
    # One tensor of all counts: on a GPU each number by itself would be waited for.
    counts = [torch.count_nonzero(tensor) for _, buffer, own in roomy for tensor in (buffer, *own)]
    numbers: Iterator[int] = iter(torch.stack(counts).tolist())
    return [name for name, _, own in roomy if next(numbers) != sum(next(numbers) for _ in own)]


@contextmanager
def without_adapters(model: Any, manager: Any) -> Generator[None]:
    """Inside, the model has its own layers in the place of those that vLLM put around them, so that its loader finds
    them."""
    for name, module in manager.modules.items():
        _set_module(model, name, module.base_layer)
    try:
        yield
    finally:
        for name, module in manager.modules.items():
            _set_module(model, name, module)


def _set_module(model: Any, name: str, module: Any) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _buffers(manager: Any) -> Iterator[Tensor]:
    for module in manager.modules.values():
        yield from _stacked(module)


def _stacked(module: Any) -> Iterator[Tensor]:
    for name in ("lora_a_stacked", "lora_b_stacked"):
        stacked = getattr(module, name)
        yield from [stacked] if isinstance(stacked, Tensor) else stacked
