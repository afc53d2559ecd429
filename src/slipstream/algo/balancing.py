"""Bin packing of sequences into micro-batches, and splitting of batches: pure and deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens, by first-fit-decreasing.

    Returns indices into `lengths`; each index exactly once, longest first within a micro-batch. A sequence
    longer than `max_tokens` is alone in its own. At most 11/9 of the fewest micro-batches possible, plus one.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: use 1 or more")
    bins: list[list[int]] = []
    room: list[int] = []
    # Bins before `first_open` cannot take even the shortest sequence: skipping them keeps the search short.
    first_open, shortest = 0, min(lengths, default=0)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        while first_open < len(bins) and room[first_open] < shortest:
            first_open += 1
        for place in range(first_open, len(bins)):
            if length <= room[place]:
                bins[place].append(index)
                room[place] -= length
                break
        else:
            bins.append([index])
            room.append(max_tokens - length)
    return bins


def runs(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Consecutive items of at most the size `most` together; a larger one is alone."""
    part: list[T] = []
    size = 0
    for item in items:
        if part and size + size_of(item) > most:
            yield part
            part, size = [], 0
        part.append(item)
        size += size_of(item)
    if part:
        yield part


def split(num_items: int, parts: int) -> list[range]:
    """`num_items` in `parts` contiguous ranges whose sizes differ by at most one, the larger ones first.

    Raises ValueError when a part would be empty.
    """
    if not 1 <= parts <= num_items:
        raise ValueError(f"{num_items} items cannot be split into {parts} parts that all hold one")
    size, larger = divmod(num_items, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


def pack_evenly(lengths: Sequence[int], max_tokens: int, parts: int) -> list[list[list[int]]]:
    """Micro-batches for `parts` ranks: a list of passes, each with one micro-batch of at most `max_tokens` tokens for
    every rank, balanced in tokens; some may be empty.

    Holds indices into `lengths`, each exactly once. A sequence longer than `max_tokens` is alone in its own. The
    longest goes first, always to the emptiest micro-batch, and micro-batches of like size are one pass.
    """
    if max_tokens < 1 or parts < 1:
        raise ValueError(f"max_tokens is {max_tokens} and parts is {parts}: use 1 or more")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    passes = max(1, -(-sum(min(length, max_tokens) for length in lengths) // (max_tokens * parts)))
    while (bins := _evenly(lengths, order, max_tokens, passes * parts)) is None:
        passes += 1
    bins.sort(key=lambda held: -sum(lengths[index] for index in held))
    rows = [bins[first : first + parts] for first in range(0, len(bins), parts)]
    # Alternating order: the rank with the most tokens in one pass has the least in the next.
    return [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]


def _evenly(lengths: Sequence[int], order: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]] | None:
    """Distribute `order` over `num_bins` micro-batches; None if they are too few."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, place) for place in range(num_bins)]
    for index in order:
        load, place = emptiest[0]
        if load and load + lengths[index] > max_tokens:
            return None
        bins[place].append(index)
        heapq.heapreplace(emptiest, (load + lengths[index], place))
    return bins
