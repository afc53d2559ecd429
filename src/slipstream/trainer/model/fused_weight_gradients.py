"""Gradients of linear layers' weights, added to the step's fp32 sum by the matrix product that makes them.

As it comes, such a gradient is a bfloat16 matrix that is written, read again and added to the sum. Here the product has
the sum for its output. Guarantees: the sum is the one that the optimizer looks at (`Optimizer`'s holders), and it is
rounded to fp32 only; the forward product is torch's own; inside compiled layers, which share one code, the weight is
found by a number.

Only where layers are compiled, in one process: plain `nn.Linear`, in these layers or the head, in bfloat16 on a GPU,
with a weight of its own that is trained. What is not such a layer (embeddings, a tied head, biases, norms, an adapter)
goes the ordinary way, and so does all where torch has no such product or a trial finds it wrong. `torch.autograd.grad`
and double backward do not see these gradients.
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
"""Of the norm of the sum; a product that is rounded to bfloat16 is 2e-3 off, one in fp32 7e-6."""
_log = logging.getLogger(__name__)
_operations: Any = torch.ops.slipstream
_aten: Any = torch.ops.aten
_numbers, _calls = itertools.count(), itertools.count()
_linears: WeakValueDictionary[int, AccumulatingLinear] = WeakValueDictionary()
_holders: Any = WeakTensorKeyDictionary()
"""Of each parameter what holds its sum, as `grad`."""


class AccumulatingLinear(nn.Linear):
    """A linear layer whose backward pass adds the weight's gradient to the sum; autograd is given none.

    Where no optimizer waits for it, the gradient becomes the weight's `grad`, as ever. A copy of such a layer is an
    ordinary one.
    """

    ticket: Tensor
    """Names the layer to operations that take nothing but tensors; on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """`input W' + bias`."""
        # Without a gradient for its input the operation could be left out of a compiled backward pass.
        if not (torch.is_grad_enabled() and input.requires_grad and self.weight.requires_grad):
            return linear(input, self.weight, self.bias)
        product: Any = _Product.apply(input, self.weight, self.bias, self.ticket, _number_of_call())
        return product

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        del self.ticket
        self.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


@torch.compiler.assume_constant_result
def _number_of_call() -> int:
    """Differs from call to call of one compiled code: its compiler would make one operation of two that look alike, and
    the sum would miss the second."""
    return next(_calls)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor, call: int
    ) -> Tensor:
        ctx.save_for_backward(input, weight, ticket)
        ctx.call = call
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        input, weight, ticket = ctx.saved_tensors
        grad_TO = grad.flatten(0, -2)
        of_input_TI = _operations.linear_backward(grad_TO, input.flatten(0, -2), weight, ticket, ctx.call)
        of_bias = grad_TO.sum(0) if ctx.needs_input_grad[2] else None
        return of_input_TI.view(input.shape), None, of_bias, None, None


@torch.library.custom_op(
    "slipstream::linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor input, Tensor weight, Tensor ticket, int call) -> Tensor",
)
def linear_backward(grad: Tensor, input: Tensor, weight: Tensor, ticket: Tensor, call: int) -> Tensor:
    """The gradient `[T, I]` of the input, from the output's `[T, O]`. The weight's is added to what no graph sees: the
    sum of the layer that has this ticket."""
    layer = _linears.get(int(ticket))
    if layer is None:
        raise TrainingError("a linear layer is gone before its backward pass: keep the network until then")
    own, holder = layer.weight, _holders.get(layer.weight)
    if holder is not None:
        holder.grad = with_product(holder.grad, grad, input)
    else:
        product = grad.t() @ input
        own.grad = product if own.grad is None else own.grad + product
    return grad @ weight


@linear_backward.register_fake
def _(grad: Tensor, input: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[1]))


def with_product(total_OI: Tensor | None, grad_TO: Tensor, input_TI: Tensor) -> Tensor:
    """The sum, in fp32, of `total_OI`, which is written, and `grad_TO' input_TI`; without a sum so far the product."""
    left_OT = grad_TO.t()
    if not grad_TO.is_cuda:  # where torch has no such product; for tests
        product = left_OT.float() @ input_TI.float()
        return product if total_OI is None else total_OI.add_(product)
    if total_OI is None:
        return _aten.mm.dtype(left_OT, input_TI, torch.float32)
    return _aten.addmm.dtype_out(total_OI, left_OT, input_TI, torch.float32, out=total_OI)


def hold(parameter: nn.Parameter, holder: Tensor) -> None:
    """From now on the sum of `parameter`'s gradients is `holder.grad`; nothing changes for one that goes the ordinary
    way."""
    _holders[parameter] = holder


def accumulate_in_products(network: nn.Module, *, anywhere: bool = False) -> int:
    """Have the products of `network`'s linear layers add up their weights' gradients; of how many. `anywhere`: on other
    devices and in other types too, where it is slow. Harmless when repeated."""
    found = [layer for layer in _eligible(network) if anywhere or _is_made_for(layer.weight)]
    if found and not anywhere and (wrong := _wrong(found[0].weight.device)):
        _log.warning("gradients are added up apart from the products that make them (%s)", wrong)
        return 0
    for layer in found:
        layer.__class__ = AccumulatingLinear
        assert isinstance(layer, AccumulatingLinear)
        number = next(_numbers)
        layer.ticket = torch.tensor(number, device="cpu")
        _linears[number] = layer
    return len(found)


def accumulate_apart(network: nn.Module) -> None:
    """Have all gradients of `network` go the ordinary way again."""
    for layer in accumulating_layers(network):
        del layer.ticket
        layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


def accumulating_layers(network: nn.Module) -> list[AccumulatingLinear]:
    """Whose products add up gradients."""
    return [module for module in network.modules() if isinstance(module, AccumulatingLinear)]


def _eligible(network: nn.Module) -> Iterator[nn.Linear]:
    """Plain linear layers with a weight that is trained and no other layer's."""
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    for module in network.modules():
        is_plain = type(module) in (nn.Linear, AccumulatingLinear) and "forward" not in module.__dict__
        if is_plain and isinstance(module, nn.Linear) and module.weight.requires_grad and uses[id(module.weight)] == 1:
            yield module


def _is_made_for(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype == torch.bfloat16


@torch.no_grad()
def _wrong(device: torch.device) -> str:
    """What is wrong in a trial of the products; nothing if nothing is."""
    tokens, outputs, inputs = _SHAPE
    generator = torch.Generator(device).manual_seed(0)

    def draw(number: int) -> Tensor:
        return torch.randn(tokens, number, generator=generator, device=device).bfloat16()

    pairs = [(draw(outputs), draw(inputs)) for _ in range(2)]
    total: Tensor | None = None
    try:
        for grad_TO, input_TI in pairs:
            total = with_product(total, grad_TO, input_TI)
    except Exception as error:  # noqa: BLE001 - an older torch, a card without such kernels
        return one_line(error)
    assert total is not None
    expected = sum(grad_TO.double().t() @ input_TI.double() for grad_TO, input_TI in pairs)
    off = float((total - expected).norm() / torch.as_tensor(expected).norm())
    return "" if total.dtype == torch.float32 and off <= _TOLERANCE else f"their sum is {off:.2g} of its norm off"
