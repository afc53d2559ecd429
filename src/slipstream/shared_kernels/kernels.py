"""Triton kernels of `operations.py`. Each program treats one row alone: its result does not depend on the others.
Values are float32 in registers and rounded once, when they are stored."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Nothing of Triton is typed, and on a machine without a GPU a type checker does not find it.
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_COLUMNS = 1024
_PLAIN = {"enable_fp_fusion": False}
"""Which products and sums a compiler fuses depends on what else a variant of a kernel computes."""
_PARTS = 512
"""Programs of the norm's backward pass at most; each adds up its rows' part of the weight's gradient."""


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    output,
    total,
    width,
    epsilon,
    offset,
    adds: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * width
    place = tl.arange(0, block)
    present = place < width
    value = tl.load(x + row + place, mask=present, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(residual + row + place, mask=present, other=0.0).to(tl.float32)
        tl.store(total + row + place, value, mask=present)
    scale = tl.math.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    gain = tl.load(weight + place, mask=present, other=0.0).to(tl.float32) + offset
    tl.store(output + row + place, (value * scale * gain).to(output.dtype.element_ty), mask=present)


@triton.jit
def _norm_backward_kernel(
    gradient,
    x,
    weight,
    of_x,
    of_weight,
    num_rows,
    rows_each,
    width,
    epsilon,
    offset,
    block: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    present = place < width
    gain = tl.load(weight + place, mask=present, other=0.0).to(tl.float32) + offset
    sums = tl.zeros((block,), dtype=tl.float32)
    for row in range(program * rows_each, tl.minimum((program + 1) * rows_each, num_rows)):
        value = tl.load(x + row * width + place, mask=present, other=0.0).to(tl.float32)
        pulled = tl.load(gradient + row * width + place, mask=present, other=0.0).to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(value * value, 0) / width + epsilon)
        normed = value * scale
        sums += pulled * normed
        inner = pulled * gain
        result = scale * (inner - normed * (tl.sum(inner * normed, 0) / width))
        tl.store(of_x + row * width + place, result.to(of_x.dtype.element_ty), mask=present)
    tl.store(of_weight + program * width + place, sums, mask=present)


@triton.jit
def _gate_kernel(
    gate,
    up,
    output,
    width,
    jump,
    gelu: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    present = place < width
    value = tl.load(gate + row * jump + place, mask=present, other=0.0).to(tl.float32)
    factor = tl.load(up + row * jump + place, mask=present, other=0.0).to(tl.float32)
    inner = value
    if gelu:
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    result = value * tl.sigmoid(inner) * factor
    tl.store(output + row * width + place, result.to(output.dtype.element_ty), mask=present)


@triton.jit
def _gate_backward_kernel(
    gradient,
    gate,
    up,
    of_gate,
    of_up,
    width,
    gelu: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * width
    place = tl.program_id(1) * block + tl.arange(0, block)
    present = place < width
    pulled = tl.load(gradient + row + place, mask=present, other=0.0).to(tl.float32)
    value = tl.load(gate + row + place, mask=present, other=0.0).to(tl.float32)
    factor = tl.load(up + row + place, mask=present, other=0.0).to(tl.float32)
    inner, rate = value, 1.0
    if gelu:
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        rate = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * value * value)
    share = tl.sigmoid(inner)
    # d(x s(u(x)))/dx = s (1 + x u'(x) (1 - s))
    slope = share * (1.0 + value * rate * (1.0 - share))
    tl.store(of_gate + row + place, (pulled * factor * slope).to(of_gate.dtype.element_ty), mask=present)
    tl.store(of_up + row + place, (pulled * value * share).to(of_up.dtype.element_ty), mask=present)


@triton.jit
def _rotate_kernel(
    x,
    cosines,
    sines,
    output,
    num_heads,
    jump,
    jump_angles,
    half: tl.constexpr,
    backward: tl.constexpr,
    heads: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, heads)[:, None], tl.arange(0, block)[None, :]
    present = (head < num_heads) & (place < half)
    cosine = tl.load(cosines + row * jump_angles + place, mask=place < half, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * jump_angles + place, mask=place < half, other=0.0).to(tl.float32)
    if backward:
        sine = -sine
    line = x + row * jump + head * 2 * half + place
    first = tl.load(line, mask=present, other=0.0).to(tl.float32)
    second = tl.load(line + half, mask=present, other=0.0).to(tl.float32)
    result = output + (row * num_heads + head) * 2 * half + place
    kind = output.dtype.element_ty
    tl.store(result, (first * cosine - second * sine).to(kind), mask=present)
    tl.store(result + half, (second * cosine + first * sine).to(kind), mask=present)


def norm(
    x_TD: Tensor, weight_D: Tensor, epsilon: float, residual_TD: Tensor | None, offset: float
) -> tuple[Tensor, Tensor | None]:
    """The RMS norm of `x + residual` times `weight + offset`, in the weight's dtype, and that sum in float32 if there
    is a residual."""
    x_TD, width = x_TD.contiguous(), x_TD.shape[-1]
    output_TD = torch.empty(x_TD.shape, dtype=weight_D.dtype, device=x_TD.device)
    total_TD = None
    if residual_TD is not None:
        residual_TD = residual_TD.contiguous()
        total_TD = torch.empty(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    if num_rows := x_TD.numel() // width:
        absent = x_TD  # not read
        _norm_kernel[(num_rows,)](
            *(x_TD, absent if residual_TD is None else residual_TD, weight_D, output_TD),
            *(absent if total_TD is None else total_TD, width, epsilon, offset),
            adds=residual_TD is not None,
            block=triton.next_power_of_2(width),
            num_warps=4,
            **_PLAIN,
        )
    return output_TD, total_TD


def norm_backward(
    gradient_TD: Tensor, x_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the weight, the latter in float32."""
    gradient_TD, x_TD, width = gradient_TD.contiguous(), x_TD.contiguous(), x_TD.shape[-1]
    of_x_TD = torch.empty_like(x_TD)
    num_rows = x_TD.numel() // width
    rows_each = max(1, -(-num_rows // _PARTS))
    parts = -(-num_rows // rows_each)
    of_weight_PD = torch.empty((parts, width), dtype=torch.float32, device=x_TD.device)
    if num_rows:
        _norm_backward_kernel[(parts,)](
            *(gradient_TD, x_TD, weight_D, of_x_TD, of_weight_PD, num_rows, rows_each, width, epsilon, offset),
            block=triton.next_power_of_2(width),
            num_warps=4,
        )
    return of_x_TD, of_weight_PD.sum(0)


def gate(gate_TF: Tensor, up_TF: Tensor, gelu: bool) -> Tensor:
    """`silu(gate) * up`, or with GELU's approximation by tanh; both may be halves of one matrix."""
    width = gate_TF.shape[-1]
    num_rows = gate_TF.numel() // width
    jump = gate_TF.stride(-2) if gate_TF.dim() > 1 else width
    if gate_TF.stride() != up_TF.stride() or gate_TF.stride(-1) != 1 or not _in_rows(gate_TF):
        gate_TF, up_TF, jump = gate_TF.contiguous(), up_TF.contiguous(), width
    output_TF = torch.empty(gate_TF.shape, dtype=gate_TF.dtype, device=gate_TF.device)
    if num_rows:
        grid = num_rows, -(-width // _COLUMNS)
        _gate_kernel[grid](gate_TF, up_TF, output_TF, width, jump, gelu=gelu, block=_COLUMNS, **_PLAIN)
    return output_TF


def _in_rows(x: Tensor) -> bool:
    """Whether its rows lie one after another at one distance."""
    return x.dim() <= 2 or all(size == 1 for size in x.shape[:-2])


def gate_backward(gradient_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """The gradients of both."""
    gradient_TF, gate_TF, up_TF = gradient_TF.contiguous(), gate_TF.contiguous(), up_TF.contiguous()
    of_gate_TF, of_up_TF = torch.empty_like(gate_TF), torch.empty_like(up_TF)
    width = gate_TF.shape[-1]
    if num_rows := gate_TF.numel() // width:
        grid = num_rows, -(-width // _COLUMNS)
        of_both = of_gate_TF, of_up_TF
        _gate_backward_kernel[grid](gradient_TF, gate_TF, up_TF, *of_both, width, gelu=gelu, block=_COLUMNS)
    return of_gate_TF, of_up_TF


def rotate(x_THD: Tensor, cosine_TE: Tensor, sine_TE: Tensor, *, backward: bool = False) -> Tensor:
    """The rotary embedding of heads of D numbers, whose first half is the cosine's part; of the angles the first D / 2
    columns are read. `backward`: by the opposite angle."""
    if x_THD.stride(2) != 1 or x_THD.stride(1) != x_THD.shape[2]:
        x_THD = x_THD.contiguous()
    num_rows, num_heads, width = x_THD.shape
    assert cosine_TE.stride() == sine_TE.stride()
    assert cosine_TE.stride(1) == 1
    output_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if num_rows:
        _rotate_kernel[(num_rows,)](
            *(x_THD, cosine_TE, sine_TE, output_THD, num_heads, x_THD.stride(0), cosine_TE.stride(0)),
            half=width // 2,
            backward=backward,
            heads=triton.next_power_of_2(num_heads),
            block=triton.next_power_of_2(width // 2),
            num_warps=4,
            **_PLAIN,
        )
    return output_THD
