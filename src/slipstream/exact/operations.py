"""The operations of a decoder layer beside products and attention, the same in trainer and engine, with gradients.

On a GPU they are the kernels of `kernels.py`; elsewhere the same formulas by torch, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """RMS norm (arXiv 1910.07467) over the last dimension of `x + residual`, in the weight's dtype, and that sum in
    float32 if there is a residual. Without gradients."""
    if x.is_cuda:
        from slipstream.exact import kernels

        return kernels.norm(x, weight, epsilon, residual)
    total = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (total * scale * weight.float()).to(weight.dtype), None if residual is None else total


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` (SwiGLU, arXiv 2002.05202). Without gradients."""
    if gate.is_cuda:
        from slipstream.exact import kernels

        return kernels.gate(gate, up)
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(gate.dtype)


def rotate(x_THD: Tensor, cosine_TE: Tensor, sine_TE: Tensor, *, backward: bool = False) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of heads whose two halves belong together; of the angles the first
    D / 2 columns are read. `backward`: by the opposite angle. Without gradients."""
    if x_THD.is_cuda:
        from slipstream.exact import kernels

        return kernels.rotate(x_THD, cosine_TE, sine_TE, backward=backward)
    first, second = x_THD.float().chunk(2, -1)
    half = first.shape[-1]
    cosine, sine = (each[:, None, :half].float() for each in (cosine_TE, sine_TE))
    sine = -sine if backward else sine
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x_THD.dtype)


class Norm(torch.autograd.Function):
    """`norm` without residual: `apply(x, weight, epsilon)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `norm`."""
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return norm(x, weight, epsilon)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of `x` in its dtype, of the weight in the weight's."""
        x, weight = ctx.saved_tensors
        if x.is_cuda:
            from slipstream.exact import kernels

            of_x, of_weight = kernels.norm_backward(grad, x, weight, ctx.epsilon)
            return of_x, of_weight.to(weight.dtype), None
        wide, pulled = x.float(), grad.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.epsilon)
        normed, inner = wide * scale, pulled * weight.float()
        of_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return of_x.to(x.dtype), (pulled * normed).flatten(0, -2).sum(0).to(weight.dtype), None


class Gate(torch.autograd.Function):
    """`gate`: `apply(gate, up)`."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, up: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `gate`."""
        ctx.save_for_backward(left, up)
        return gate(left, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of both."""
        left, up = ctx.saved_tensors
        if left.is_cuda:
            from slipstream.exact import kernels

            return kernels.gate_backward(grad, left, up)
        wide, pulled = left.float(), grad.float()
        share = torch.sigmoid(wide)
        of_gate = pulled * up.float() * share * (1.0 + wide * (1.0 - share))
        return of_gate.to(left.dtype), (pulled * wide * share).to(up.dtype)


class Rotate(torch.autograd.Function):
    """`rotate`: `apply(x_THD, cosine_TE, sine_TE)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `rotate`."""
        ctx.save_for_backward(cosine, sine)
        return rotate(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The inverse of a rotation is its transpose."""
        return rotate(grad, *ctx.saved_tensors, backward=True), None, None
