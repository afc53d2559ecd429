"""Fingerprints: a 64-bit digest of every parameter, additive over shards and fused slices.

The fingerprint of a tensor is the sum over its elements of `mix(index in the whole tensor, bits)` modulo 2^64. As a sum
it can be computed beside the data, by a rank with rows 100 to 200 or an engine with q, k and v in one fused matrix, and
the shares are added. `mix` gives 32 bits: the upper half of the index's golden-ratio multiple (Fibonacci hashing;
Knuth, TAOCP 3, 6.4), xored with an odd multiple of the bits, through `lowbias32` (Wellons, "Prospecting for hash
functions", 2018). Each step is invertible: another value of up to 32 bits at one index always changes the term. Moving
a value by less than 2,971,215,073 places (a Fibonacci number) changes it as a random draw would. GPUs are fast at
32-bit arithmetic: with SplitMix64 the kernel took four times as long as reading the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import Tensor

from slipstream.records import ParameterSpec
from slipstream.weights.fingerprint_torch import MASK, Slice, fingerprint
from slipstream.weights.shards import ShardedWeights


def fingerprints(slices: Sequence[Slice]) -> list[int]:
    """Share of each slice in the fingerprint of its parameter, an integer in [0, 2^64).

    On a GPU one kernel reads all slices, with one synchronization.
    """
    results = [0] * len(slices)
    on_gpu: list[int] = []
    for number, part in enumerate(slices):
        if part.tensor.device.type == "cuda":
            on_gpu.append(number)
        else:
            results[number] = fingerprint(*part)
    if on_gpu:
        from slipstream.weights import fingerprint_triton

        values = fingerprint_triton.fingerprints([slices[number] for number in on_gpu])
        for number, value in zip(on_gpu, values, strict=True):
            results[number] = value & MASK
    return results


def as_hex(value: int) -> str:
    """Sixteen hexadecimal digits."""
    return f"{value & MASK:016x}"


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
