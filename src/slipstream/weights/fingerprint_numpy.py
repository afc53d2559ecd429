"""Fingerprints on a CPU: the definition is in `fingerprint`.

Four times as fast as torch's operations on one thread. Threads share nothing, so that other programs on the same cores
do not stop them at barriers, as they do OpenMP's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LOW, _MIX_1, _MIX_2 = np.uint32(0xC2B2AE3D), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_UPPER = np.uint64(32)
_CHUNK = 1 << 16
"""Elements computed at once: the temporaries fit into a core's cache."""
_LEAST = 1 << 20
"""Elements of a thread."""


def fingerprint(bits: NDArray[np.int32 | np.int16 | np.uint8], offset: int, num_threads: int) -> int:
    """Share of elements of up to 32 bits, at `offset` in their parameter and following one another."""
    parts = max(1, min(num_threads, len(bits) // _LEAST))
    if parts == 1:
        return _share(bits, offset)
    size = -(-len(bits) // parts)
    starts = range(0, len(bits), size)
    shares = _pool(num_threads).map(lambda start: _share(bits[start : start + size], offset + start), starts)
    return sum(shares) & MASK


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "fingerprint")


@cache
def _multiples() -> NDArray[np.uint64]:
    return np.arange(1, _CHUNK + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def _share(bits: NDArray[np.int32 | np.int16 | np.uint8], offset: int) -> int:
    size, total = min(_CHUNK, len(bits)), 0
    indices, terms, shifted = np.empty(size, np.uint64), np.empty(size, np.uint32), np.empty(size, np.uint32)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        index, x, y = (buffer[: len(part)] for buffer in (indices, terms, shifted))
        x[...] = part  # with the sign, as torch converts
        x *= _LOW
        np.add(_multiples()[: len(part)], np.uint64((offset + start) * _GOLDEN & MASK), out=index)
        x ^= (index >> _UPPER).astype(np.uint32)
        for bits_right, factor in ((16, _MIX_1), (15, _MIX_2)):
            x ^= np.right_shift(x, bits_right, out=y)
            x *= factor
        x ^= np.right_shift(x, 16, out=y)
        total += int(x.sum(dtype=np.uint64))
    return total & MASK
