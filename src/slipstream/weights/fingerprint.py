"""Fingerprints: a digest of every parameter that adds up over shards and fused slices.

The fingerprint of a tensor is the sum over its elements of `mix(index in the whole tensor, bits)` modulo
2^64. A sum does not care where its terms are computed, so a rank that holds rows 100 to 200, or an engine
that keeps q, k and v in one fused matrix, computes its share where the data lies and the shares add up.
`mix` is the finaliser of SplitMix64 (Steele et al., 2014) over the index's golden-ratio multiple, xored
with the bits first: moving a value, or changing one bit of it, changes the term as a random draw would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.records import ParameterSpec
from slipstream.weights.shards import ShardedWeights

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20
"""Elements handled at once: the 64-bit temporaries stay in a CPU's cache."""


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The elements in a row, as integers of the same bits: a view where `tensor` is contiguous."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()]).reshape(-1)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(index: Tensor, bits: Tensor) -> Tensor:
    x = (index + 1) * GOLDEN
    x = x ^ bits * MIX_2
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


class Slice(NamedTuple):
    """Some elements of a parameter, where they lie."""

    tensor: Tensor
    offset: int = 0
    strides: tuple[int, ...] | None = None
    """Where the elements of `tensor`, seen with shape `sizes`, belong in the flattened parameter: at `offset` and by
    `strides`, in elements. Left out, `tensor` is the whole parameter."""
    sizes: tuple[int, ...] | None = None


def fingerprints(slices: Sequence[Slice]) -> list[int]:
    """Share of each slice in the fingerprint of its parameter, an integer in [0, 2^64).

    On a GPU one kernel reads all of them and the CPU waits once.
    """
    results = [0] * len(slices)
    on_gpu: list[int] = []
    for number, part in enumerate(slices):
        if part.tensor.device.type == "cuda":
            on_gpu.append(number)
        else:
            results[number] = fingerprint(*part)
    if on_gpu:
        from slipstream.weights import fingerprint_gpu

        values = fingerprint_gpu.fingerprints([slices[number] for number in on_gpu])
        for number, value in zip(on_gpu, values, strict=True):
            results[number] = value & _MASK
    return results


def fingerprint(
    tensor: Tensor, offset: int = 0, strides: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None
) -> int:
    """Share of `tensor` in the fingerprint of the whole tensor it belongs to, an integer in [0, 2^64).

    `offset` and `strides` place the elements of `tensor` (seen with shape `sizes`) in the flattened whole;
    left out, `tensor` is the whole. Works on any device, in torch's own operations.
    """
    if tensor.numel() == 0:
        return 0
    bits = bits_of(tensor)
    sizes = tuple(tensor.shape) if sizes is None else sizes
    total = 0
    if strides is None or _is_contiguous(sizes, strides):
        for start in range(0, bits.numel(), _CHUNK):
            part = bits[start : start + _CHUNK].to(torch.int64)
            index = torch.arange(offset + start, offset + start + part.numel(), device=bits.device)
            total += int(_mix(index, part).sum())
        return total & _MASK
    index = torch.full((1,), offset, dtype=torch.int64, device=bits.device)
    for size, stride in zip(sizes, strides, strict=True):
        index = (index[:, None] + torch.arange(size, device=bits.device) * stride).reshape(-1)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        total += int(_mix(index[start : start + part.numel()], part).sum())
    return total & _MASK


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def as_hex(value: int) -> str:
    """Sixteen hexadecimal digits."""
    return f"{value & _MASK:016x}"


def describe(named_weights: Iterable[tuple[str, Tensor]]) -> tuple[ParameterSpec, ...]:
    """Name, shape, dtype and fingerprint of every tensor, in the order given."""
    if isinstance(named_weights, ShardedWeights):
        return named_weights.describe()
    weights = list(named_weights)
    values = fingerprints([Slice(weight.detach()) for _, weight in weights])
    return tuple(
        ParameterSpec(name, tuple(w.shape), str(w.dtype).removeprefix("torch."), as_hex(value))
        for (name, w), value in zip(weights, values, strict=True)
    )


def digest(parameters: Iterable[ParameterSpec]) -> str:
    """One digest for a whole version: sixteen hexadecimal digits of SHA-256 over all sorted parameters."""
    lines = sorted(f"{p.name} {p.dtype} {list(p.shape)} {p.fingerprint}" for p in parameters)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
