"""Fingerprints on a GPU: `fingerprint.mix` as one kernel over all slices, at the speed of the card's memory.

Imported only where there is a CUDA device; Triton comes with torch there.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from slipstream.weights.fingerprint import GOLDEN, MIX_1, MIX_2, Slice, fingerprint

# Nothing here is typed, and on a machine without a GPU a type checker does not find it.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_BLOCK = 16_384
"""Elements of a slice that one program sums."""
_STEP = 2_048
_INTEGERS: dict[int, Any] = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _kernel(
    table,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    owners,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    firsts,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    out,  # noqa: ANN001 # pyright: ignore[reportMissingParameterType]
    integer: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    block_size: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    step: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    fields: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    golden: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    mix_1: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    mix_2: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
) -> None:
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    row = table + owner * fields
    memory = tl.load(row).to(tl.pointer_type(integer))
    count = tl.load(row + 1)
    offset = tl.load(row + 2)
    inner = tl.load(row + 3)
    memory_jump = tl.load(row + 4)
    index_jump = tl.load(row + 5)
    index_step = tl.load(row + 6)
    first = tl.load(firsts + block)
    total = tl.zeros((step,), dtype=tl.int64)
    for start in range(0, block_size, step):
        place = first + start + tl.arange(0, step).to(tl.int64)
        present = place < count
        line = tl.zeros((step,), dtype=tl.int64)
        if inner < count:
            line = place // inner
        within = place - line * inner
        bits = tl.load(memory + line * memory_jump + within, mask=present, other=0).to(tl.int64)
        index = offset + line * index_jump + within * index_step
        x = ((index + 1) * golden) ^ (bits * mix_2)
        x = (x ^ (x.to(tl.uint64) >> 30).to(tl.int64)) * mix_1
        x = (x ^ (x.to(tl.uint64) >> 27).to(tl.int64)) * mix_2
        x = x ^ (x.to(tl.uint64) >> 31).to(tl.int64)
        total += tl.where(present, x, 0)
    tl.atomic_add(out + owner, tl.sum(total, 0), sem="relaxed")


def fingerprints(slices: Sequence[Slice]) -> list[int]:
    """As `fingerprint.fingerprints`, for tensors that all lie on one GPU; signed."""
    device = slices[0].tensor.device
    results = [0] * len(slices)
    sums: list[tuple[list[int], Tensor]] = []
    kept: list[Tensor] = []
    with torch.cuda.device_of(slices[0].tensor):
        for size in sorted({part.tensor.element_size() for part in slices}):
            rows: list[list[int]] = []
            numbers: list[int] = []
            for number, part in enumerate(slices):
                if part.tensor.element_size() != size or not part.tensor.numel():
                    continue
                found = _row(part)
                if found is None:
                    results[number] = fingerprint(*part)
                    continue
                rows.append(found[0])
                numbers.append(number)
                kept.append(found[1])
            if rows:
                sums.append((numbers, _launch(rows, size, device)))
        for numbers, values in sums:
            for number, value in zip(numbers, values.tolist(), strict=True):
                results[number] = value
    return results


def _launch(rows: list[list[int]], size: int, device: torch.device) -> Tensor:
    """Start the kernel over all rows; one sum for each."""
    blocks = torch.tensor([-(-row[1] // _BLOCK) for row in rows])
    owners = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    before = torch.cumsum(blocks, 0) - blocks
    firsts = (torch.arange(len(owners)) - before[owners]) * _BLOCK
    table = torch.tensor(rows, device=device)
    sums = torch.zeros(len(rows), dtype=torch.int64, device=device)
    _kernel[(len(owners),)](
        *(table, owners.to(device), firsts.to(device), sums),
        *(_INTEGERS[size], _BLOCK, _STEP, table.shape[1], GOLDEN, MIX_1, MIX_2),
    )
    return sums


def _row(part: Slice) -> tuple[list[int], Tensor] | None:
    """A row of the kernel's table, and the tensor that it is about, which must live until the kernel has run; None when
    the elements do not lie in equal lines.

    A row: address, elements, index of the first; elements of a line; from line to line in memory and in the index; from
    element to element in the index.
    """
    tensor = part.tensor
    sizes = tuple(tensor.shape) if part.sizes is None else part.sizes
    strides = _contiguous(sizes) if part.strides is None else part.strides
    view = _lines(sizes, tensor.stride(), strides) if sizes == tuple(tensor.shape) else None
    if view is None:
        tensor = tensor.contiguous()
        view = _lines(sizes, _contiguous(sizes), strides)
    return None if view is None else ([tensor.data_ptr(), tensor.numel(), part.offset, *view], tensor)


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _lines(sizes: Sequence[int], memory: Sequence[int], index: Sequence[int]) -> tuple[int, int, int, int] | None:
    """(elements of a line, memory from line to line, index from line to line, index from element to element); None
    when the elements do not lie in equal lines."""
    dims = [dim for dim in zip(sizes, memory, index, strict=True) if dim[0] > 1] or [(1, 1, 1)]
    joined = [dims[-1]]
    for size, jump, place in reversed(dims[:-1]):
        length, memory_step, index_step = joined[-1]
        if jump == length * memory_step and place == length * index_step:
            joined[-1] = (length * size, memory_step, index_step)
        else:
            joined.append((size, jump, place))
    if joined[0][1] != 1 or len(joined) > 2:
        return None
    inner = joined[0][0]
    jumps = joined[1][1:] if len(joined) == 2 else (0, 0)
    return inner, jumps[0], jumps[1], joined[0][2]
