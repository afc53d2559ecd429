"""Maps each tensor of a LoRA adapter to its place in vLLM's stacked LoRA buffers.

As in `tensor_map`, vLLM's own code is recorded instead of copied into a table: its adapter loader, its packing of q, k,
v and of gate, up, and its slicing over tensor-parallel workers get empty tensors, and every copy into a buffer is noted
instead of made. A published adapter has scaling 1, so that nothing is multiplied on the way; whatever is transformed
all the same is reported as unverified. The rest of a buffer (a rank below the buffer's, layers without an adapter) must
be zero.
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
    """The slot (first index of the buffers) of the first of these adapters. Raises RuntimeError when vLLM holds other
    adapters."""
    loaded = sorted(manager.list_adapters())
    if loaded != sorted(lora_ids) or lora_ids[0] not in manager.lora_index_to_id:
        raise RuntimeError(f"vLLM holds the adapters {loaded}, and should hold {sorted(lora_ids)}")
    return manager.lora_index_to_id.index(lora_ids[0])


@torch.no_grad()
def record(manager: Any, slot: int, parameters: tuple[ParameterSpec, ...]) -> TensorMap:
    """Record where vLLM places the adapter `parameters` (shapes and dtypes; values are not read) in `slot`."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    recorder = Recorder([buffer for module in manager.modules.values() for buffer in _stacked(module)])
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
    """vLLM's mapper of layer names for adapters; its method is named differently before vLLM 0.32."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


@torch.no_grad()
def stray_layers(manager: Any, slot: int, located: TensorMap) -> list[str]:
    """Names of layers whose buffers hold anything but zeros beside the adapter's own elements."""
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
    # One tensor of all counts: on a GPU every single number costs a synchronization.
    counts = [torch.count_nonzero(tensor) for _, buffer, own in roomy for tensor in (buffer, *own)]
    numbers: Iterator[int] = iter(torch.stack(counts).tolist())
    return [name for name, _, own in roomy if next(numbers) != sum(next(numbers) for _ in own)]


@contextmanager
def without_adapters(model: Any, manager: Any) -> Generator[None]:
    """Within the block the model has its own layers in place of vLLM's LoRA wrappers, so that its loader finds them."""
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


def _stacked(module: Any) -> Iterator[Tensor]:
    for name in ("lora_a_stacked", "lora_b_stacked"):
        stacked = getattr(module, name)
        yield from [stacked] if isinstance(stacked, Tensor) else stacked
