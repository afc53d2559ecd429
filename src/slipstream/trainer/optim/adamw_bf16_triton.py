"""AdamW with stochastic rounding on a GPU: one kernel that reads weights, gradient and moments once and writes new
ones, 24 bytes a parameter.

The noise is Philox's (as in `triton.language.randint4x`), of the seed and an element's place. Imported only where there
is a CUDA device; Triton comes with torch there.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Nothing here is typed, and on a machine without a GPU a type checker does not find it.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_BLOCK = 512
"""Elements of a quarter of what one program updates: a draw of Philox is for four."""
_WARPS = 4


@triton.jit
def _part(
    live,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    gradient,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    mean,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    square,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    result,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    place,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    count,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    noise,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    kept,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    beta1,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    one_less_beta1,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    beta2,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    one_less_beta2,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    step_size,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    scale,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    eps,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
) -> None:
    present = place < count
    g = tl.load(gradient + place, mask=present, other=0.0)
    m = tl.load(mean + place, mask=present, other=0.0) * beta1 + g * one_less_beta1
    v = tl.load(square + place, mask=present, other=0.0) * beta2 + g * g * one_less_beta2
    tl.store(mean + place, m, mask=present)
    tl.store(square + place, v, mask=present)
    w = tl.load(live + place, mask=present, other=0.0).to(tl.float32) * kept
    w -= step_size * (m / (tl.sqrt(v) * scale + eps))
    # bfloat16 is the upper half of float32: what is in the lower half is the chance to be carried over.
    bits = (w.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)) & -65536
    bits = tl.where(w == w, bits, 0x7FC00000)  # what is no number stays none
    tl.store(result + place, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=present)


@triton.jit(do_not_specialize=["seed"])
def _kernel(
    live,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    gradient,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    mean,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    square,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    result,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    count,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    seed,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    kept,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    beta1,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    one_less_beta1,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    beta2,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    one_less_beta2,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    step_size,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    scale,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    eps,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    block: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
) -> None:
    lanes = tl.arange(0, block)
    first, second, third, fourth = tl.randint4x(seed, tl.program_id(0) * block + lanes)
    place = tl.program_id(0).to(tl.int64) * (4 * block) + lanes
    # fmt: off
    _part(live, gradient, mean, square, result, place, count, first,
          kept, beta1, one_less_beta1, beta2, one_less_beta2, step_size, scale, eps)
    _part(live, gradient, mean, square, result, place + block, count, second,
          kept, beta1, one_less_beta1, beta2, one_less_beta2, step_size, scale, eps)
    _part(live, gradient, mean, square, result, place + 2 * block, count, third,
          kept, beta1, one_less_beta1, beta2, one_less_beta2, step_size, scale, eps)
    _part(live, gradient, mean, square, result, place + 3 * block, count, fourth,
          kept, beta1, one_less_beta1, beta2, one_less_beta2, step_size, scale, eps)
    # fmt: on


def update(
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
    place. All contiguous and of one shape. `seed` has 31 bits."""
    result = torch.empty_like(live)
    count, (beta1, beta2) = live.numel(), betas
    _kernel[(-(-count // (4 * _BLOCK)),)](
        *(live, gradient, mean, square, result, count, seed),
        *(1.0 - rate * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2),
        *(rate / (1.0 - beta1**updates), (1.0 - beta2**updates) ** -0.5, eps, _BLOCK),
        num_warps=_WARPS,
    )
    return result
