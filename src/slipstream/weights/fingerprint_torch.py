"""Fingerprints on any device, by numpy or in torch's own operations; the definition is in `fingerprint`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.weights import fingerprint_numpy

MASK = (1 << 64) - 1
_CHUNK = 1 << 17
"""Elements computed at once: the temporaries fit into a CPU's cache."""


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
LOW, HIGH = _signed(0xC2B2AE3D, 32), _signed(0x27D4EB2F, 32)
"""Odd multipliers of an element's lower and upper 32 bits."""
MIX_1, MIX_2 = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The flattened elements as integers of the same bits; a view where `tensor` is contiguous."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()]).reshape(-1)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's shift of int32 copies the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _mix(index: Tensor, bits: Tensor) -> int:
    """The sum of the elements' terms."""
    x = bits.to(torch.int32) * LOW
    if bits.dtype == torch.int64:
        x ^= _shift_right(x, 15)
        x += (bits >> 32).to(torch.int32) * HIGH
    x ^= (((index + 1) * GOLDEN) >> 32).to(torch.int32)
    x ^= _shift_right(x, 16)
    x *= MIX_1
    x ^= _shift_right(x, 15)
    x *= MIX_2
    x ^= _shift_right(x, 16)
    # Sum as unsigned 32-bit numbers.
    return int(x.sum(dtype=torch.int64)) + (int((x < 0).sum()) << 32)


class Slice(NamedTuple):
    """Some elements of a parameter, in memory."""

    tensor: Tensor
    offset: int = 0
    strides: tuple[int, ...] | None = None
    """Where the elements of `tensor`, seen with shape `sizes`, belong in the flattened parameter: at `offset` and by
    `strides`, in elements. Left out, `tensor` is the whole parameter."""
    sizes: tuple[int, ...] | None = None


def fingerprint(
    tensor: Tensor, offset: int = 0, strides: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None
) -> int:
    """Share of `tensor` in the fingerprint of the whole tensor it belongs to, an integer in [0, 2^64).

    `offset` and `strides` place the elements of `tensor` (seen with shape `sizes`) in the flattened whole;
    left out, `tensor` is the whole. Works on any device.
    """
    if tensor.numel() == 0:
        return 0
    bits = bits_of(tensor)
    sizes = tuple(tensor.shape) if sizes is None else sizes
    places: Tensor | None = None
    if strides is not None and not _is_contiguous(sizes, strides):
        places = torch.full((1,), offset, dtype=torch.int64, device=bits.device)
        for size, stride in zip(sizes, strides, strict=True):
            places = (places[:, None] + torch.arange(size, device=bits.device) * stride).reshape(-1)
    if bits.device.type == "cpu" and places is None and bits.dtype != torch.int64:
        return fingerprint_numpy.fingerprint(bits.numpy(), offset, torch.get_num_threads())
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        end = start + part.numel()
        index = torch.arange(offset + start, offset + end, device=bits.device) if places is None else places[start:end]
        total += _mix(index, part)
    return total & MASK


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of these sizes."""
    return torch.empty(sizes, device="meta").stride()


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    every = zip(sizes, strides, contiguous_strides(sizes), strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in every)
