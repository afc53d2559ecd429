"""Fingerprints on a GPU: `fingerprint_torch._mix` as one Triton kernel over all slices.

Imported only if there is a CUDA device; torch then comes with Triton.
"""

from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.weights.fingerprint_torch import GOLDEN, HIGH, LOW, MIX_1, MIX_2, Slice, contiguous_strides, fingerprint

# Nothing of Triton is typed, and on a machine without a GPU a type checker does not find it.
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_BLOCK = 32_768
"""Elements of a slice for each program."""
_STEP = 1_024
_MAX_TABLES = 8
"""Cached layouts: the model's, two adapters', and a user's call's."""
_INTEGERS: dict[int, Any] = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
# In a form readable by the kernel.
_GOLDEN, _LOW, _HIGH, _MIX_1, _MIX_2 = (tl.constexpr(number) for number in (GOLDEN, LOW, HIGH, MIX_1, MIX_2))


@triton.jit
def _terms(mixed, bits, is_wide: tl.constexpr):  # noqa: ANN202 # pyright: ignore
    """`fingerprint_torch._mix` of each element, given its mixed index: unsigned 32 bits, in 64."""
    x = bits.to(tl.int32) * _LOW
    if is_wide:
        x = x ^ (x.to(tl.uint32) >> 15).to(tl.int32)
        x += (bits >> 32).to(tl.int32) * _HIGH
    x = x ^ (mixed >> 32).to(tl.int32)
    x = (x ^ (x.to(tl.uint32) >> 16).to(tl.int32)) * _MIX_1
    x = (x ^ (x.to(tl.uint32) >> 15).to(tl.int32)) * _MIX_2
    x = x ^ (x.to(tl.uint32) >> 16).to(tl.int32)
    return x.to(tl.uint32).to(tl.int64)


@triton.jit
def _kernel(
    table,
    owners,
    firsts,
    out,
    integer: tl.constexpr,
    is_wide: tl.constexpr,
    block_size: tl.constexpr,
    step: tl.constexpr,
    fields: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    row = table + owner * fields
    first = tl.load(firsts + block)
    memory = tl.load(row).to(tl.pointer_type(integer))
    count = tl.load(row + 1)
    offset = tl.load(row + 2)
    inner = tl.load(row + 3)
    memory_jump = tl.load(row + 4)
    index_jump = tl.load(row + 5)
    index_step = tl.load(row + 6)
    is_aligned = tl.load(row + 7)
    # Within a line the mixed index grows by the same number from element to element.
    growth = index_step * _GOLDEN
    lanes = tl.arange(0, step)
    mixed = (offset + 1) * _GOLDEN + (first + lanes) * growth
    total = tl.zeros((step,), dtype=tl.int64)
    left = count - first
    if (inner >= count) & (left >= block_size) & (is_aligned > 0):
        # Nearly all of a model: full blocks, read in 16-byte loads.
        whole = tl.multiple_of(memory + first, 16)
        for start in range(0, block_size, step):
            bits = tl.load(whole + start + lanes)
            total += _terms(mixed, bits, is_wide)
            mixed += step * growth
    else:
        turn = (index_jump - inner * index_step) * _GOLDEN
        for start in range(0, block_size, step):
            place = first + start + lanes
            line = place // inner
            present = place < count
            bits = tl.load(memory + place + line * (memory_jump - inner), mask=present, other=0)
            total += tl.where(present, _terms(mixed + line * turn, bits, is_wide), 0)
            mixed += step * growth
    tl.atomic_add(out + owner, tl.sum(total, 0), sem="relaxed")


class _Table(NamedTuple):
    """The kernel's arguments for slices of one element size, on their GPU."""

    numbers: tuple[int, ...]
    """Indices of these slices."""
    size: int
    rows: Tensor
    owners: Tensor
    """The row of each block."""
    firsts: Tensor
    """The block's first element."""

    def launch(self) -> Tensor:
        """Start the kernel over all rows; one sum for each."""
        sums = torch.zeros(len(self.numbers), dtype=torch.int64, device=self.rows.device)
        _kernel[(len(self.owners),)](
            *(self.rows, self.owners, self.firsts, sums),
            *(_INTEGERS[self.size], self.size == 8, _BLOCK, _STEP, self.rows.shape[1]),
        )
        return sums


_tables: OrderedDict[tuple[Any, ...], list[_Table]] = OrderedDict()
"""By layout, in the order of use. A table holds addresses and indices, not values, so it stays valid when these
change."""


def fingerprints(slices: Sequence[Slice]) -> list[int]:
    """As `fingerprint.fingerprints`, for tensors all on one GPU; signed."""
    results = [0] * len(slices)
    with torch.cuda.device_of(slices[0].tensor):
        layout = tuple(
            (t.data_ptr(), t.dtype, t.shape, t.stride(), offset, strides, sizes) for t, offset, strides, sizes in slices
        )
        tables, kept = _tables.get(layout), []
        if tables is None:
            tables, apart, kept = _describe(slices)
            for number in apart:
                results[number] = fingerprint(*slices[number])
            if not apart and not kept:
                _tables[layout] = tables
                if len(_tables) > _MAX_TABLES:
                    _tables.popitem(last=False)
        else:
            _tables.move_to_end(layout)
        sums = [table.launch() for table in tables]
        for table, values in zip(tables, sums, strict=True):
            for number, value in zip(table.numbers, values.tolist(), strict=True):
                results[number] = value
        del kept  # alive until the kernel has read them
    return results


def _describe(slices: Sequence[Slice]) -> tuple[list[_Table], list[int], list[Tensor]]:
    """The kernel's tables; slices unreadable by it; and copies made for it. The copies must live until it has run."""
    rows: dict[int, list[list[int]]] = {}
    numbers: dict[int, list[int]] = {}
    apart: list[int] = []
    kept: list[Tensor] = []
    for number, part in enumerate(slices):
        if not part.tensor.numel():
            continue
        found = _row(part)
        if found is None:
            apart.append(number)
            continue
        row, tensor = found
        size = tensor.element_size()
        rows.setdefault(size, []).append(row)
        numbers.setdefault(size, []).append(number)
        if tensor is not part.tensor:
            kept.append(tensor)
    device = slices[0].tensor.device
    return [_table(rows[size], numbers[size], size, device) for size in sorted(rows)], apart, kept


def _table(rows: list[list[int]], numbers: list[int], size: int, device: torch.device) -> _Table:
    blocks = torch.tensor([-(-row[1] // _BLOCK) for row in rows])
    owners = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    before = torch.cumsum(blocks, 0) - blocks
    firsts = (torch.arange(len(owners)) - before[owners]) * _BLOCK
    table = torch.tensor(rows, device=device)
    return _Table(tuple(numbers), size, table, owners.to(device), firsts.to(device))


def _row(part: Slice) -> tuple[list[int], Tensor] | None:
    """A row of the kernel's table, and its tensor: this must live until the kernel has run. None when the elements do
    not lie in equal lines.

    A row: address, elements, index of the first, elements of a line. Then the jumps from line to line in memory and in
    the index, the step from element to element in the index, and whether the address is a multiple of sixteen bytes.
    """
    tensor = part.tensor
    sizes = tuple(tensor.shape) if part.sizes is None else part.sizes
    strides = contiguous_strides(sizes) if part.strides is None else part.strides
    view = _lines(sizes, tensor.stride(), strides) if sizes == tuple(tensor.shape) else None
    if view is None:
        tensor = tensor.contiguous()
        view = _lines(sizes, contiguous_strides(sizes), strides)
    if view is None:
        return None
    address = tensor.data_ptr()
    return [address, tensor.numel(), part.offset, *view, int(address % 16 == 0)], tensor


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
