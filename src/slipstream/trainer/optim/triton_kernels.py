"""Triton kernels of the optimizers: gradient accumulation, and AdamW with stochastic rounding.

Both are bound by memory bandwidth. `accumulate_` adds a bfloat16 gradient to an fp32 one; torch's addition of two
dtypes is not vectorized. `adamw_bf16_update` reads weights, gradient and moments once and writes new ones, 24 bytes per
parameter; its noise is Philox's (`triton.language.randint4x`), from the seed and the element's index. Imported only
where there is a CUDA device; Triton comes with torch there.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Untyped, and absent on machines without a GPU, where a type checker does not find it.
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

MIN_ACCUMULATED = 1 << 20
"""Elements; for fewer the launch of the kernel takes longer than torch's addition."""
_ACCUMULATE_BLOCK, _ACCUMULATE_WARPS = 4096, 8
_ADAMW_BLOCK, _ADAMW_WARPS = 512, 4
"""The block is a quarter of what one program updates: one Philox draw gives four random numbers."""


@triton.jit
def _accumulate_kernel(
    total,
    gradient,
    count,
    block: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    present = index < count
    before = tl.load(total + index, mask=present, other=0.0)
    tl.store(total + index, before + tl.load(gradient + index, mask=present, other=0.0).to(tl.float32), mask=present)


def accumulate_(total: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `total`, fp32, in place; both contiguous and of one shape."""
    count = total.numel()
    _accumulate_kernel[(-(-count // _ACCUMULATE_BLOCK),)](
        total, gradient, count, _ACCUMULATE_BLOCK, num_warps=_ACCUMULATE_WARPS
    )


@triton.jit
def _adamw_quarter(
    live,
    gradient,
    mean,
    square,
    result,
    index,
    count,
    noise,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    scale,
    eps,
) -> None:
    present = index < count
    g = tl.load(gradient + index, mask=present, other=0.0)
    m = tl.load(mean + index, mask=present, other=0.0) * beta1 + g * one_minus_beta1
    v = tl.load(square + index, mask=present, other=0.0) * beta2 + g * g * one_minus_beta2
    tl.store(mean + index, m, mask=present)
    tl.store(square + index, v, mask=present)
    w = tl.load(live + index, mask=present, other=0.0).to(tl.float32) * decay
    w -= step_size * (m / (tl.sqrt(v) * scale + eps))
    # bfloat16 is the upper half of float32: the lower 16 bits are the probability of rounding up.
    bits = (w.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)) & -65536
    bits = tl.where(w == w, bits, 0x7FC00000)  # NaN stays NaN
    tl.store(result + index, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    live,
    gradient,
    mean,
    square,
    result,
    count,
    seed,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    scale,
    eps,
    block: tl.constexpr,
) -> None:
    lanes = tl.arange(0, block)
    first, second, third, fourth = tl.randint4x(seed, tl.program_id(0) * block + lanes)
    index = tl.program_id(0).to(tl.int64) * (4 * block) + lanes
    # fmt: off
    _adamw_quarter(live, gradient, mean, square, result, index, count, first,
          decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, scale, eps)
    _adamw_quarter(live, gradient, mean, square, result, index + block, count, second,
          decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, scale, eps)
    _adamw_quarter(live, gradient, mean, square, result, index + 2 * block, count, third,
          decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, scale, eps)
    _adamw_quarter(live, gradient, mean, square, result, index + 3 * block, count, fourth,
          decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, scale, eps)
    # fmt: on


def adamw_bf16_update(
    live: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    updates: int,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
) -> Tensor:
    """The new values of `live`, in bfloat16, by update number `updates`, from 1; the moments, in fp32, are changed in
    index. All contiguous and of one shape. `seed` has 31 bits."""
    result = torch.empty_like(live)
    count, (beta1, beta2) = live.numel(), betas
    _adamw_kernel[(-(-count // (4 * _ADAMW_BLOCK)),)](
        *(live, gradient, mean, square, result, count, seed),
        *(1.0 - rate * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2),
        *(rate / (1.0 - beta1**updates), (1.0 - beta2**updates) ** -0.5, eps, _ADAMW_BLOCK),
        num_warps=_ADAMW_WARPS,
    )
    return result
