"""Adding up gradients on a GPU: a bfloat16 gradient onto an fp32 one at the speed of the card's memory.

Torch's own addition of two types reads them number by number. Imported only where there is a CUDA device; Triton comes
with torch there.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

# Nothing here is typed, and on a machine without a GPU a type checker does not find it.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

SMALLEST = 1 << 20
"""Numbers: below, the launch of a kernel takes longer than torch's addition."""
_BLOCK = 4096
_WARPS = 8


@triton.jit
def _add_kernel(
    total,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    part,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    count,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    block: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
) -> None:
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    present = place < count
    before = tl.load(total + place, mask=present, other=0.0)
    tl.store(total + place, before + tl.load(part + place, mask=present, other=0.0).to(tl.float32), mask=present)


def add_(total: Tensor, part: Tensor) -> None:
    """`total`, in float32, plus `part`; both contiguous and of one shape."""
    count = total.numel()
    _add_kernel[(-(-count // _BLOCK),)](total, part, count, _BLOCK, num_warps=_WARPS)
