"""The Triton kernel of `row_layout.sum_slots`, in one launch: torch's operations take four for each distinct number of
slots of a row position."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Untyped, and absent on machines without a GPU: a type checker does not find it there.
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_COLUMNS = 1024


@triton.jit
def _sum_kernel(
    slots,
    order,
    starts,
    row,
    width,
    wide: tl.constexpr,
    block: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    present = place < width
    total = tl.zeros((block,), dtype=wide)
    for number in range(tl.load(starts + position), tl.load(starts + position + 1)):
        slot = tl.load(order + number)
        total += tl.load(slots + slot * width + place, mask=present, other=0.0).to(wide)
    tl.store(row + position * width + place, total.to(row.dtype.element_ty), mask=present)


def sum_slots(slots: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Sums `[T, ...]` of slots `[K, ...]`, in float32 at least: for row position t of the slots
    `order[starts[t]:starts[t + 1]]`, in this order."""
    slots, num_tokens = slots.contiguous(), len(starts) - 1
    row = slots.new_empty((num_tokens, *slots.shape[1:]))
    width = row[0].numel()
    block = min(_COLUMNS, triton.next_power_of_2(width))
    wide = tl.float64 if slots.dtype == torch.float64 else tl.float32
    _sum_kernel[num_tokens, -(-width // block)](slots, order, starts, row, width, wide=wide, block=block)
    return row
