"""The operations of a decoder layer beside products and attention, the same in trainer and engine, with gradients.

On a GPU they are the kernels of `kernels.py`; elsewhere the same formulas by torch, for tests.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.shared_kernels.operation import Operation

_TWICE, _CUBE = 2 * (2 / math.pi) ** 0.5, 0.044715


def norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """RMS norm (arXiv 1910.07467) over the last dimension of `x + residual`, times `weight + offset` (Gemma's is 1), in
    the weight's dtype, and that sum in float32 if there is a residual. Without gradients."""
    if x.is_cuda:
        from slipstream.shared_kernels import kernels

        return kernels.norm(x, weight, epsilon, residual, offset)
    total = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (total * scale * (weight.float() + offset)).to(weight.dtype), None if residual is None else total


def gate(gate: Tensor, up: Tensor, gelu: bool = False) -> Tensor:
    """`silu(gate) * up` (SwiGLU, arXiv 2002.05202), or GELU (its approximation by tanh, arXiv 1606.08415) for SiLU.
    Without gradients."""
    if gate.is_cuda:
        from slipstream.shared_kernels import kernels

        return kernels.gate(gate, up, gelu)
    wide = gate.float()
    return (wide * torch.sigmoid(_sharpened(wide)[0] if gelu else wide) * up.float()).to(gate.dtype)


def _sharpened(x: Tensor) -> tuple[Tensor, Tensor]:
    """`u(x)` of `gelu(x) = x sigmoid(u(x))`, as `(1 + tanh(z)) / 2 = sigmoid(2 z)`, and its derivative."""
    return _TWICE * (x + _CUBE * x**3), _TWICE * (1 + 3 * _CUBE * x * x)


def rotate(x_THD: Tensor, cosine_TE: Tensor, sine_TE: Tensor, backward: bool = False) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of heads whose two halves belong together; of the angles the first
    D / 2 columns are read. `backward`: by the opposite angle. Without gradients."""
    if x_THD.is_cuda:
        from slipstream.shared_kernels import kernels

        return kernels.rotate(x_THD, cosine_TE, sine_TE, backward=backward)
    first, second = x_THD.float().chunk(2, -1)
    half = first.shape[-1]
    cosine, sine = (each[:, None, :half].float() for each in (cosine_TE, sine_TE))
    sine = -sine if backward else sine
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x_THD.dtype)


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the weight, in their dtypes."""
    if x.is_cuda:
        from slipstream.shared_kernels import kernels

        of_x, of_weight = kernels.norm_backward(grad, x, weight, epsilon, offset)
        return of_x, of_weight.to(weight.dtype)
    wide, pulled = x.float(), grad.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    normed, inner = wide * scale, pulled * (weight.float() + offset)
    of_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (pulled * normed).flatten(0, -2).sum(0).to(weight.dtype)


def _gate_backward(grad: Tensor, left: Tensor, up: Tensor, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """The gradients of both."""
    if left.is_cuda:
        from slipstream.shared_kernels import kernels

        return kernels.gate_backward(grad, left, up, gelu)
    wide, pulled = left.float(), grad.float()
    inner, rate = _sharpened(wide) if gelu else (wide, 1.0)
    share = torch.sigmoid(inner)
    of_gate = pulled * up.float() * share * (1.0 + wide * rate * (1.0 - share))
    return of_gate.to(left.dtype), (pulled * wide * share).to(up.dtype)


def _norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    return norm(x, weight, epsilon, offset=offset)[0]


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.numbers = inputs
    ctx.save_for_backward(x, weight)


def _keep_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, up, *ctx.gelu = inputs
    ctx.save_for_backward(left, up)


def _keep_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cosine, sine, *backward = inputs
    ctx.is_backward = any(backward)
    ctx.save_for_backward(cosine, sine)


norm_backward = Operation(
    "norm_backward",
    "(Tensor grad, Tensor x, Tensor weight, float epsilon, float offset=0.0) -> (Tensor, Tensor)",
    _norm_backward,
    lambda grad, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
gate_backward = Operation(
    "gate_backward",
    "(Tensor grad, Tensor left, Tensor up, bool gelu=False) -> (Tensor, Tensor)",
    _gate_backward,
    lambda grad, left, up, *_: (left.new_empty(left.shape), up.new_empty(up.shape)),
)
differentiable_norm = Operation(
    "norm",
    "(Tensor x, Tensor weight, float epsilon, float offset=0.0) -> Tensor",
    _norm,
    lambda x, weight, *_: x.new_empty(x.shape, dtype=weight.dtype),
    keep=_keep_norm,
    backward=lambda ctx, grad: (*norm_backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None),
)
"""`norm` without residual, with gradients."""
differentiable_gate = Operation(
    "gate",
    "(Tensor left, Tensor up, bool gelu=False) -> Tensor",
    gate,
    lambda left, *_: left.new_empty(left.shape),
    keep=_keep_gate,
    backward=lambda ctx, grad: (*gate_backward(grad, *ctx.saved_tensors, *ctx.gelu), None),
)
"""`gate` with gradients."""
differentiable_rotate = Operation(
    "rotate",
    "(Tensor x, Tensor cosine, Tensor sine, bool backward=False) -> Tensor",
    rotate,
    lambda x, *_: x.new_empty(x.shape),
    keep=_keep_rotate,
    backward=lambda ctx, grad: (
        differentiable_rotate(grad, *ctx.saved_tensors, not ctx.is_backward),
        *(None, None, None),
    ),
)
"""`rotate` with gradients; the inverse of a rotation is its transpose."""
