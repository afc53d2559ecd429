"""Activation checkpointing, activation offloading and compilation of decoder layers.

Guarantees: all options give the same gradients up to rounding; checkpointing and offloading give the same bits.
Compiled layers round differently, because fused operations skip intermediate roundings. Names and structure of the
network are unchanged: only each layer's `forward` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slipstream.errors import ConfigError
from slipstream.trainer.attention import packed  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers an operation
from slipstream.trainer.model.vision_towers import text_parts

Checkpointing = bool | Literal["selective"]
"""Recomputation in the backward pass. True: everything but a layer's input. "selective": everything but matmul and
attention outputs (selective activation checkpointing). False: nothing."""
COMPILER = "inductor"
_MIN_OFFLOAD_BYTES = 1 << 20
"""Smaller tensors cost more to move than they free."""


def decoder_layers(network: nn.Module) -> Sequence[nn.Module]:
    """The network's decoder layers, in order. Raises ConfigError if none are found."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(network).__name__} has no layers that can be computed again or compiled: set "
            "training.gradient_checkpointing = false, and training.compile = false"
        )
    return layers


def text_layers(network: nn.Module) -> list[nn.Module]:
    """The `decoder_layers` of the language model, without a vision tower's."""
    reached = {module for part in text_parts(network) for module in part.modules()}
    return [layer for layer in decoder_layers(network) if layer in reached]


@dataclass(frozen=True)
class LayerOptions:
    """How the decoder layers of a network compute."""

    checkpointing: Checkpointing = False
    offload: bool = False
    """Saved activations wait for the backward pass in host memory. No effect on a CPU."""
    compiled: bool = False
    """torch.compile each layer, for rows of any length; the operations between matmuls and attention are fused. The
    compiler saves expensive results and recomputes the rest by itself: "selective" then changes nothing."""


def configure_layers(network: nn.Module, options: LayerOptions) -> None:
    """Replace every decoder layer's `forward` according to `options`; an earlier replacement is undone.

    Transformers' own checkpointing acts in training mode only: this would enable dropout.
    """
    if options == LayerOptions() and not any("forward" in module.__dict__ for module in network.modules()):
        return
    offloader = Offloader() if options.offload else None
    texts = set(text_layers(network))
    for layer in decoder_layers(network):
        forward: Callable[..., Any] = type(layer).forward.__get__(layer)
        if options.compiled and layer in texts:  # a tower's layers loop over images
            forward = torch.compile(forward, dynamic=True, backend=COMPILER)
        if options.checkpointing is True or (options.checkpointing and not options.compiled):
            forward = _checkpointed(forward, selective=options.checkpointing == "selective")
        layer.forward = forward if offloader is None else _offloaded(forward, offloader)


def _checkpointed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _checkpoint_policy)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return call


def _checkpoint_policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save the outputs of `saved_operations`, except without gradients: DoRA's norms multiply full weight matrices. Our
    own operations always run without."""
    has_gradients = torch.is_grad_enabled() or operation.namespace == "slipstream"
    is_saved = has_gradients and operation in saved_operations()
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def saved_operations() -> tuple[Any, ...]:
    """The operations with outputs saved by selective checkpointing: matmuls and attention, on any device."""
    aten = torch.ops.aten
    return (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.slipstream.ragged_attention.default,
    )


def _offloaded(forward: Callable[..., Any], offloader: Offloader) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with offloader.offloading() if torch.is_grad_enabled() else nullcontext():
            return forward(*args, **kwargs)

    return call


class _OffloadedTensor:
    """A saved tensor in host memory."""

    def __init__(self, tensor: Tensor, before: _OffloadedTensor | None) -> None:
        self.before = before
        """The tensor offloaded before this one; the backward pass needs it after this one."""
        self.device = tensor.device
        self.waiting: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.back: Tensor | None = None
        self.waiting.copy_(tensor, non_blocking=True)

    def fetch(self) -> Tensor:
        """Start copying it back, unless already started."""
        if self.back is None:
            self.back = self.waiting.to(self.device, non_blocking=True, copy=True)
        return self.back


class Offloader:
    """Moves autograd's saved tensors to pinned host memory and back on a CUDA stream of its own, overlapped with
    compute: each tensor is prefetched during the backward pass of the following layer.

    The backward pass should need the tensors in reverse order, as layers do; another order costs time only. `moves`
    selects the tensors; by default large ones on a GPU."""

    def __init__(self, moves: Callable[[Tensor], bool] | None = None) -> None:
        self._moves = moves or (lambda tensor: tensor.is_cuda and tensor.nbytes >= _MIN_OFFLOAD_BYTES)
        self._last: _OffloadedTensor | None = None
        self._stream: Any = None

    @contextmanager
    def offloading(self) -> Generator[None]:
        """Context with autograd's saved tensors offloaded."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        if not self._moves(tensor):
            return tensor
        with self._on_copy_stream(tensor.device) as stream:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
                # Its memory must not be reused before the copy is done.
                tensor.record_stream(stream)
            self._last = _OffloadedTensor(tensor, self._last)
        return self._last

    def _unpack(self, kept: Tensor | _OffloadedTensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with self._on_copy_stream(kept.device) as stream:
            tensor = kept.fetch()
        # The graph may keep this object until the whole backward pass is done.
        kept.back = None
        if stream is not None:
            torch.cuda.current_stream(kept.device).wait_stream(stream)
            tensor.record_stream(torch.cuda.current_stream(kept.device))
        if kept.before is not None:
            with self._on_copy_stream(kept.device):
                kept.before.fetch()
        self._last, kept.before = kept.before, None
        return tensor

    @contextmanager
    def _on_copy_stream(self, device: torch.device) -> Generator[Any]:
        """Context of the copy stream; yields None on devices without streams."""
        if device.type != "cuda":
            yield None
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            yield self._stream
