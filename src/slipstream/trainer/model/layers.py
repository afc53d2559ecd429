"""What decoder layers keep for the backward pass, where it lies meanwhile, and whether they are compiled.

Guarantees: every way gives the same gradients; layers that are computed again, or whose inputs wait in the CPU's
memory, give the same bits. Compiled ones round otherwise, because fused operations skip roundings in between. Names and
structure of the network stay as they are: only `forward` of each layer is replaced.
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
"""What is computed again in the backward pass: everything but a layer's input, everything but the results of matrix
multiplications and attention, or nothing."""
COMPILER = "inductor"
_SMALLEST_MOVED = 1 << 20
"""Bytes: what is smaller costs more to move than it frees."""


def decoder_layers(network: nn.Module) -> Sequence[nn.Module]:
    """The layers that a forward pass goes through one after the other. Raises ConfigError when none are known."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(network).__name__} has no layers that can be computed again or compiled: set "
            "training.gradient_checkpointing = false, and training.compile = false"
        )
    return layers


def text_layers(network: nn.Module) -> list[nn.Module]:
    """Those of `decoder_layers` that text goes through: not an image tower's."""
    reached = {module for part in text_parts(network) for module in part.modules()}
    return [layer for layer in decoder_layers(network) if layer in reached]


@dataclass(frozen=True)
class LayerOptions:
    """How the layers of a network compute."""

    checkpointing: Checkpointing = False
    offload: bool = False
    """Inputs of layers that are computed again wait in the CPU's memory. Has no effect on a CPU."""
    compiled: bool = False
    """Each layer's operations between its matrix multiplications and its attention are fused by torch.compile, for rows
    of any length. It keeps what is dear to compute and computes the rest again by itself, so that `selective` is then
    the same as no checkpointing."""


def dress_layers(network: nn.Module, options: LayerOptions) -> None:
    """Have every decoder layer compute as `options` say, whatever they said before.

    Transformers' own switch acts in training mode only, which would bring dropout back; nothing here is random.
    """
    if options == LayerOptions() and not any("forward" in module.__dict__ for module in network.modules()):
        return
    offloader = Offloader() if options.offload else None
    for layer in decoder_layers(network):
        forward: Callable[..., Any] = type(layer).forward.__get__(layer)
        if options.compiled:
            forward = torch.compile(forward, dynamic=True, backend=COMPILER)
        if options.checkpointing is True or (options.checkpointing and not options.compiled):
            forward = _computed_again(forward, selective=options.checkpointing == "selective")
        layer.forward = forward if offloader is None else _offloaded(forward, offloader)


def _computed_again(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _is_kept)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return call


def _is_kept(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """What no gradient goes through is computed again: DoRA's lengths are products of whole weights."""
    kept = torch.is_grad_enabled() and operation in dear_operations()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def dear_operations() -> tuple[Any, ...]:
    """Whose results `selective` keeps: matrix multiplications and attention, on any device."""
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
        with offloader.moving() if torch.is_grad_enabled() else nullcontext():
            return forward(*args, **kwargs)

    return call


class _Away:
    """A tensor that waits in the CPU's memory for its backward pass."""

    def __init__(self, tensor: Tensor, before: _Away | None) -> None:
        self.before = before
        """What went away before it, and so will be wanted after it."""
        self.device = tensor.device
        self.waiting: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.back: Tensor | None = None
        self.waiting.copy_(tensor, non_blocking=True)

    def fetch(self) -> Tensor:
        """Begin to bring it back, unless that has begun."""
        if self.back is None:
            self.back = self.waiting.to(self.device, non_blocking=True, copy=True)
        return self.back


class Offloader:
    """Moves what autograd keeps to pinned memory of the CPU and back, beside the computation: on a stream of its own,
    where each tensor is brought back while the layer after it is in its backward pass.

    Backward must ask in the opposite order of forward, as layers do; another order costs time only. `moves` says what
    is worth moving; as it comes, large tensors on a GPU.
    """

    def __init__(self, moves: Callable[[Tensor], bool] | None = None) -> None:
        self._moves = moves or (lambda tensor: tensor.is_cuda and tensor.nbytes >= _SMALLEST_MOVED)
        self._last: _Away | None = None
        self._stream: Any = None

    @contextmanager
    def moving(self) -> Generator[None]:
        """Inside, what autograd saves is moved."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | _Away:
        if not self._moves(tensor):
            return tensor
        with self._aside(tensor.device) as stream:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
                # Its memory must not be used again before it is copied.
                tensor.record_stream(stream)
            self._last = _Away(tensor, self._last)
        return self._last

    def _unpack(self, kept: Tensor | _Away) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with self._aside(kept.device) as stream:
            tensor = kept.fetch()
        # The graph may hold on to what it was given until all of it is done.
        kept.back = None
        if stream is not None:
            torch.cuda.current_stream(kept.device).wait_stream(stream)
            tensor.record_stream(torch.cuda.current_stream(kept.device))
        if kept.before is not None:
            with self._aside(kept.device):
                kept.before.fetch()
        self._last, kept.before = kept.before, None
        return tensor

    @contextmanager
    def _aside(self, device: torch.device) -> Generator[Any]:
        """Work on the stream for copies; None where there are no streams."""
        if device.type != "cuda":
            yield None
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            yield self._stream
