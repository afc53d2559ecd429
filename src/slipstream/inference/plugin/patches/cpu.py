"""Patches of vLLM's CPU workers: weights that can be updated in place, and three corrections of its CPU kernels.

Each public function without arguments is a patch of `patch_table.TABLE`; it raises `Absent` if this vLLM lacks
the code it changes.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch

from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.plugin.patches.patch_table import Absent, changeable

_packed_layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_packed_experts: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
"""MoE layers, and vLLM's `CPUUnquantizedExperts` of each."""
_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
_pack: Callable[..., None] | None = None


def one_adapter() -> None:
    """Patch `PunicaWrapperCPU.add_lora_linear`: two matrix products for each adapter of the step, mostly one.

    For vLLM 0.32: its CPU kernels copy both LoRA matrices once for every token of the step.
    """
    from vllm.lora.punica_wrapper import punica_cpu

    wrapper = changeable(changeable(punica_cpu, "PunicaWrapperCPU").PunicaWrapperCPU, "add_lora_linear")
    original = wrapper.add_lora_linear

    def add_lora_linear(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        slots = self.token_lora_indices
        if not len(slots) == len(x) == len(y) or kwargs or scale != 1.0:
            original(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
            return
        parts = y.split(output_slices, dim=-1)
        used = slots.unique().tolist()
        for slot in used:
            if slot < 0:  # tokens without an adapter
                continue
            rows = None if len(used) == 1 else (slots == slot).nonzero()[:, 0]
            mine = x if rows is None else x[rows]
            for part, a, b in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
                if rows is None:
                    part.addmm_(mine @ a[slot, 0].t(), b[slot, 0].t())
                else:
                    part.index_add_(0, rows, mine @ a[slot, 0].t() @ b[slot, 0].t())

    wrapper.add_lora_linear = add_lora_linear


def seeded_prefill() -> None:
    """Patch `GPUModelRunner._sample` and `_bookkeeping_sync`: chunked prefill of a seeded request on a CPU.

    For vLLM 0.32: it discards the token sampled after a chunk of the prompt and rewinds the request's generator with
    `get_offset`. CPU generators lack it, and the engine dies. Here the generator's state is restored instead.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = changeable(GPUModelRunner, "_sample", "_bookkeeping_sync")
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync

    def discarded(self: Any) -> dict[int, torch.Generator]:
        mask, generators = self.discard_request_mask.np, self.input_batch.generators
        return {i: g for i, g in generators.items() if i < self.input_batch.num_reqs and mask[i]}

    def sample_and_rewind(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = {g: g.get_state() for g in discarded(self).values()}
        output = sample(self, *args, **kwargs)
        for generator, state in states.items():
            generator.set_state(state)
        return output

    def bookkeeping_without_rewinding(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = discarded(self)
        for i in hidden:
            del self.input_batch.generators[i]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    runner._sample = sample_and_rewind
    runner._bookkeeping_sync = bookkeeping_without_rewinding


def live_weights() -> None:
    """Patch `dispatch_cpu_unquantized_gemm`: keep a linear layer's weight beside its kernel's packed copy.

    For vLLM 0.26 to 0.32: it packs the weight for oneDNN or SGL and then frees it, and later updates reach
    nothing. `repack` packs the updated weight.
    """
    global _pack
    from vllm.model_executor.layers import utils, vocab_parallel_embedding

    attribute = "dispatch_cpu_unquantized_gemm"
    _pack = original = getattr(changeable(utils, attribute), attribute)

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        original(layer, remove_weight=False)
        _packed_layers.add(layer)

    setattr(utils, attribute, keep_weight)
    if hasattr(vocab_parallel_embedding, attribute):
        setattr(vocab_parallel_embedding, attribute, keep_weight)


def live_experts() -> None:
    """Patch `CPUUnquantizedExperts`: keep the weights of an MoE layer beside its kernel's packed copies.

    For vLLM 0.32: it replaces the weights with packed copies of the same shape. An update would overwrite these, and
    the kernel would read it as packed.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        raise Absent("CPUUnquantizedExperts") from None
    experts: Any = CPUUnquantizedExperts
    process, compute = experts.process_weights_after_loading, experts.apply

    def pack_beside(self: Any, layer: Any) -> None:
        own = [getattr(layer, weight) for weight in _EXPERT_WEIGHTS]
        process(self, layer)
        if self._use_zentorch:  # packs nothing
            return
        packed = [getattr(layer, weight).data for weight in _EXPERT_WEIGHTS]
        for weight, parameter in zip(_EXPERT_WEIGHTS, own, strict=True):
            setattr(layer, weight, parameter)
        self._slipstream_packed = packed
        _packed_experts[layer] = self

    def compute_packed(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> None:
        w1, w2 = getattr(self, "_slipstream_packed", (w1, w2))
        compute(self, output, hidden_states, w1, w2, *args, **kwargs)

    experts.process_weights_after_loading = pack_beside
    experts.apply = compute_packed


def experts_under_lora() -> None:
    """Patch `select_unquantized_moe_backend`: use the CPU's MoE kernel also in an engine with LoRA enabled.

    For vLLM 0.32: it then selects the Triton kernel (adapters of experts need it); on a CPU this kernel hangs.
    Adapters of other layers do not need it.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    module = changeable(method, "select_unquantized_moe_backend")
    select = module.select_unquantized_moe_backend

    def select_as_without(moe_config: Any) -> Any:
        return select(moe_config=dataclasses.replace(moe_config, is_lora_enabled=False))

    module.select_unquantized_moe_backend = select_as_without


def _packed(model: torch.nn.Module) -> list[tuple[str, Any]]:
    if not _packed_layers:  # on a GPU: an update need not walk through the model
        return []
    return [(name, layer) for name, layer in model.named_modules() if layer in _packed_layers]


def _experts(model: torch.nn.Module) -> list[tuple[str, Any, Any]]:
    if not _packed_experts:
        return []
    layers = [(name, layer, _packed_experts.get(layer)) for name, layer in model.named_modules()]
    return [(name, layer, experts) for name, layer, experts in layers if experts is not None]


def check_live(model: torch.nn.Module) -> None:
    """Raises RuntimeError if a model on a CPU cannot be updated in place."""
    parameters = dict(model.named_parameters())
    if not parameters or next(iter(parameters.values())).device.type != "cpu":
        return
    patch_table.require("live_cpu_weights")
    if any(name.endswith(_EXPERT_WEIGHTS) for name in parameters):
        patch_table.require("live_cpu_experts")


def repack(model: torch.nn.Module) -> int:
    """Pack the weights of all layers again after an update; returns the number of layers."""
    layers, experts = _packed(model), _experts(model)
    for _, layer in layers:
        assert _pack is not None
        _pack(layer, remove_weight=False)
    for _, layer, kernel in experts:
        kernel.process_weights_after_loading(layer)
    return len(layers) + len(experts)


def stale_packed_layers(model: torch.nn.Module, max_products: int = 1 << 32) -> list[str]:
    """Names of layers whose packed copy differs from the layer's weight.

    A linear layer's kernel multiplies the identity matrix: the product is the weight exactly, without rounding. Layers
    with more than `max_products` multiplications are left to the probe. The packed copies of an MoE layer are
    compared with its weights packed again.
    """
    stale: list[str] = []
    for name, layer in _packed(model):
        weight: torch.Tensor = layer.weight
        if weight.ndim != 2 or weight.shape[1] * weight.numel() > max_products:
            continue
        identity = torch.eye(weight.shape[1], dtype=weight.dtype)
        if not torch.equal(layer.cpu_linear(identity, weight, None), weight.t()):
            stale.append(name)
    for name, layer, kernel in _experts(model):
        packed = kernel._slipstream_packed
        kernel.process_weights_after_loading(layer)
        if not all(map(torch.equal, packed, kernel._slipstream_packed)):
            kernel._slipstream_packed = packed
            stale.append(name)
    return stale
