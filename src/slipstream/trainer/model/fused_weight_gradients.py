"""Fused gradient accumulation: the GEMM of a linear layer's weight gradient accumulates it in fp32.

Without it the weight gradient is a bfloat16 matrix: written, read again and added to the accumulated one. Here the
GEMM's output is the accumulated gradient (`Optimizer`'s holders), rounded to fp32 only. The forward GEMM is torch's.
Compiled layers share one code: the custom operation finds the weight by a layer id.

Only for compiled layers in a single process: plain `nn.Linear` in 16 bits on a GPU with an untied, trained weight.
Other parameters (embeddings, a tied LM head, biases, norms, adapters) accumulate as usual, and so do all if torch
has no such GEMM or a trial finds it wrong. `torch.autograd.grad` and double backward do not see these gradients.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakTensorKeyDictionary

from slipstream.errors import TrainingError, one_line

_SHAPE = (256, 384, 512)
"""Tokens, outputs and inputs of the trial."""
_TOLERANCE = 1e-4
"""Relative error of the trial; rounding to bfloat16 gives 2e-3, to fp32 7e-6."""
_log = logging.getLogger(__name__)
_operations: Any = torch.ops.slipstream
_aten: Any = torch.ops.aten
_numbers, _calls = itertools.count(), itertools.count()
_linears: WeakValueDictionary[int, AccumulatingLinear] = WeakValueDictionary()
_holders: Any = WeakTensorKeyDictionary()
"""By parameter, its holder: the holder's `grad` is the parameter's accumulated gradient."""


class AccumulatingLinear(nn.Linear):
    """A linear layer with its own accumulation of the weight's gradient in the backward pass; autograd gets none.

    Without a registered holder the gradient goes to the weight's `grad` as usual. A copy of the layer is a plain
    `nn.Linear`.
    """

    layer_id: Tensor
    """An id `[]` on the CPU. Arguments of custom operations are tensors; they look the layer up by it."""

    def forward(self, input: Tensor) -> Tensor:
        """`input W' + bias`."""
        # Without a gradient for its input the compiler could drop the operation from the backward pass.
        if not (torch.is_grad_enabled() and input.requires_grad and self.weight.requires_grad):
            return linear(input, self.weight, self.bias)
        product: Any = _Product.apply(input, self.weight, self.bias, self.layer_id, _next_call())
        return product

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        del self.layer_id
        self.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


@torch.compiler.assume_constant_result
def _next_call() -> int:
    """A different number for each call site in a compiled graph: the compiler would merge two identical operations,
    and the accumulated gradient would miss one."""
    return next(_calls)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer_id: Tensor, call: int
    ) -> Tensor:
        ctx.save_for_backward(input, weight, layer_id)
        ctx.call = call
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        input, weight, layer_id = ctx.saved_tensors
        grad_TO = grad.flatten(0, -2)
        of_input_TI = _operations.linear_backward(grad_TO, input.flatten(0, -2), weight, layer_id, ctx.call)
        of_bias = grad_TO.sum(0) if ctx.needs_input_grad[2] else None
        return of_input_TI.view(input.shape), None, of_bias, None, None


@torch.library.custom_op(
    "slipstream::linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor input, Tensor weight, Tensor layer_id, int call) -> Tensor",
)
def linear_backward(grad: Tensor, input: Tensor, weight: Tensor, layer_id: Tensor, call: int) -> Tensor:
    """The gradient `[T, I]` of the input, from the output's `[T, O]`. As a side effect, unseen by the graph,
    accumulates the weight's gradient of the layer `layer_id`."""
    layer = _linears.get(int(layer_id))
    if layer is None:
        raise TrainingError("a linear layer is gone before its backward pass: keep the network until then")
    own, holder = layer.weight, _holders.get(layer.weight)
    if holder is not None:
        holder.grad = accumulate_product(holder.grad, grad, input)
    else:
        product = grad.t() @ input
        own.grad = product if own.grad is None else own.grad + product
    return grad @ weight


@linear_backward.register_fake
def _(grad: Tensor, input: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[1]))


def accumulate_product(total_OI: Tensor | None, grad_TO: Tensor, input_TI: Tensor) -> Tensor:
    """`total_OI + grad_TO' input_TI` in fp32, in place; the product alone if `total_OI` is None."""
    left_OT = grad_TO.t()
    if not grad_TO.is_cuda:  # torch has no such GEMM there; for tests
        product = left_OT.float() @ input_TI.float()
        return product if total_OI is None else total_OI.add_(product)
    if total_OI is None:
        return _aten.mm.dtype(left_OT, input_TI, torch.float32)
    return _aten.addmm.dtype_out(total_OI, left_OT, input_TI, torch.float32, out=total_OI)


def register_holder(parameter: nn.Parameter, holder: Tensor) -> None:
    """Accumulate `parameter`'s gradients in `holder.grad`; no effect on parameters with the usual accumulation."""
    _holders[parameter] = holder


def holder_of(parameter: nn.Parameter) -> Tensor:
    """The holder of an optimizer's parameter."""
    return _holders[parameter]


def fuse_accumulation(network: nn.Module, *, anywhere: bool = False) -> int:
    """Enable fused accumulation for `network`'s eligible linear layers; returns their number. `anywhere`: also on
    other devices and dtypes; it is slow there. Idempotent."""
    found = [layer for layer in _eligible(network) if anywhere or _has_kernel(layer.weight)]
    if found and not anywhere and (wrong := _wrong(found[0].weight.device)):
        _log.warning("weight gradients are accumulated apart from the products that make them (%s)", wrong)
        return 0
    for layer in found:
        layer.__class__ = AccumulatingLinear
        assert isinstance(layer, AccumulatingLinear)
        number = next(_numbers)
        layer.layer_id = torch.tensor(number, device="cpu")
        _linears[number] = layer
    return len(found)


def unfuse_accumulation(network: nn.Module) -> None:
    """Disable fused accumulation."""
    for layer in fused_layers(network):
        del layer.layer_id
        layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


def fused_layers(network: nn.Module) -> list[AccumulatingLinear]:
    """The layers with fused accumulation."""
    return [module for module in network.modules() if isinstance(module, AccumulatingLinear)]


def _eligible(network: nn.Module) -> Iterator[nn.Linear]:
    """Plain linear layers with a trained, untied weight."""
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    for module in network.modules():
        is_plain = type(module) in (nn.Linear, AccumulatingLinear) and "forward" not in module.__dict__
        if is_plain and isinstance(module, nn.Linear) and module.weight.requires_grad and uses[id(module.weight)] == 1:
            yield module


def _has_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


@torch.no_grad()
def _wrong(device: torch.device) -> str:
    """Try the fused GEMM; returns the problem, or an empty string."""
    tokens, outputs, inputs = _SHAPE
    generator = torch.Generator(device).manual_seed(0)

    def draw(number: int) -> Tensor:
        return torch.randn(tokens, number, generator=generator, device=device).bfloat16()

    pairs = [(draw(outputs), draw(inputs)) for _ in range(2)]
    total: Tensor | None = None
    try:
        for grad_TO, input_TI in pairs:
            total = accumulate_product(total, grad_TO, input_TI)
    except Exception as error:  # noqa: BLE001 - an older torch, a card without such kernels
        return one_line(error)
    assert total is not None
    expected = sum(grad_TO.double().t() @ input_TI.double() for grad_TO, input_TI in pairs)
    off = float((total - expected).norm() / torch.as_tensor(expected).norm())
    return "" if total.dtype == torch.float32 and off <= _TOLERANCE else f"their sum is {off:.2g} of its norm off"
