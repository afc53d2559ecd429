"""The layout of a packed row, and its conversion to the layouts of attention kernels.

A row is a series of segments: whole sequences, and shared prefixes each followed by its continuations. Guarantees: the
padded attention cost of whole segments is at most 16/9 of sum(length**2), plus that of the common bucket of segments of
at most 64 tokens. A token in several slots has its gradient summed in a fixed order.

Index arrays are NumPy's until they are complete: torch divides such small work among all cores, and waiting for them
took 48 ms a row (3,552 tokens, H200's host). NumPy takes 1 ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import TrainingError
from slipstream.trainer.distributed.context import ContextGroup

Integers = NDArray[np.int64]
_BUCKET_RATIO = 0.75
_BUCKET_FLOOR = 64


@dataclass(frozen=True)
class Gather:
    """A gather index from row positions to slots. Padding repeats a real token; a prefix has several slots."""

    index: Tensor
    """Row position of each slot."""
    order: Tensor
    """The inverse: the real (not padding) slots, by row position."""
    starts: Tensor
    """The place in `order` of each row position, and of the end: `[T + 1]`."""

    @cached_property
    def slot_T(self) -> Tensor:
        """One real slot of each row position."""
        return self.order.index_select(0, self.starts[:-1])

    @cached_property
    def repeated(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each R > 1: the row positions `[n]` with R real slots, and these slots `[n, R]`."""
        counts_T, pairs = self.starts.diff(), list[tuple[Tensor, Tensor]]()
        for count in counts_T.unique().tolist():
            if count > 1:
                positions = (counts_T == count).nonzero()[:, 0]
                places = self.starts[positions][:, None] + torch.arange(count, device=positions.device)
                pairs.append((positions, self.order[places]))
        return tuple(pairs)


@dataclass(frozen=True)
class Bucket:
    """A batch of B right-padded blocks of similar size: Q queries `[B, Q]` attend to J keys `[B, J]`."""

    queries_BQ: Tensor
    """Row position of each query."""
    keys_BJ: Tensor
    real_BQ: Tensor
    """False for padding."""
    real_BJ: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether each block is one whole segment: a causal kernel then needs no mask."""
        return self.queries_BQ is self.keys_BJ


@dataclass(frozen=True)
class Padded:
    """The layout for kernels of fixed-size batches: the slots of all buckets, one bucket after the other."""

    buckets: tuple[Bucket, ...]
    queries: Gather | None
    """None: identical to the row."""
    keys: Gather | None


class Slots(NamedTuple):
    """A `Gather` in the making, of K slots."""

    index_K: Integers
    order: Integers
    starts: Integers


class HostRagged(NamedTuple):
    """A `Ragged` in the making, of S segments."""

    keys: Slots | None
    query_ends: Integers
    key_ends: Integers
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Ragged:
    """The layout for variable-length kernels: segment after segment; a continuation's keys include its prefix's."""

    keys: Gather | None
    """None: identical to the row."""
    query_ends: Tensor
    """Cumulative lengths `[num_segments + 1]`, int32 (`cu_seqlens`)."""
    key_ends: Tensor
    longest_query: int
    longest_key: int
    has_room: bool = False
    """Whether some segments are empty, and some slots unused."""


class _Block(NamedTuple):
    """A range of queries: one segment, or adjacent continuations of one prefix."""

    start: int
    length: int
    origin: int
    """Start of the prefix."""
    shared: int
    """The prefix's length; 0 without one."""


_layouts: WeakValueDictionary[int, SegmentLayout] = WeakValueDictionary()
_numbers = itertools.count()


# Not frozen: torch.compile guards on every field of a frozen dataclass, and would recompile for each row.
@dataclass(eq=False)
class SegmentLayout:
    """The segments of a row. One per micro-batch; the kernels' layouts are computed on first use."""

    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...]
    """Per segment the index of its prefix segment, or None. Continuations follow their prefix immediately."""
    device: torch.device | str = "cpu"
    blocks: tuple[tuple[int, int], ...] = ()
    """Row positions, first and past the last, of tokens with mutual attention: images of some models."""
    context: ContextGroup | None = None
    """The ranks of the row, each with a shard of its tokens. None: one rank."""
    has_blocks: bool = field(init=False)
    """Whether there are any. Compiled layers read this: by the blocks they would be compiled for each number."""
    windows_seen: set[int] = field(default_factory=set[int])
    """The sliding windows requested by layers (0: none). They show a check the use of the layout."""
    _masks: dict[tuple[int, torch.dtype], list[Tensor | None]] = field(
        default_factory=dict[tuple[int, torch.dtype], list[Tensor | None]]
    )
    layout_id: Tensor = field(default_factory=lambda: torch.tensor(next(_numbers)))
    """An id `[]` on the CPU. Arguments of custom operations are tensors; they look the layout up by it."""

    def __post_init__(self) -> None:
        self.has_blocks = bool(self.blocks)
        _layouts.setdefault(int(self.layout_id), self)  # a copy keeps the id

    @cached_property
    def padded(self) -> Padded:
        """Buckets of whole segments, then buckets of blocks of continuations."""
        buckets: list[Bucket] = []
        segments = self._segments
        whole = [segments[index] for index, prefix in enumerate(self.prefixes) if prefix is None]
        for group in _bucketed(whole, [block.length for block in whole]):
            index_BL, real_BL = _padded_index(group)
            buckets.append(Bucket(index_BL, index_BL, real_BL, real_BL))
        blocks = self._blocks()
        for similar in _bucketed(blocks, [block.length for block in blocks]):
            for group in _bucketed(similar, [block.shared + block.length for block in similar]):
                keys_BJ, real_BJ = _padded_index(group)
                queries_BQ, real_BQ = _padded_index([block._replace(shared=0) for block in group])
                buckets.append(Bucket(queries_BQ, keys_BJ, real_BQ, real_BJ))
        queries = [(bucket.queries_BQ, bucket.real_BQ) for bucket in buckets]
        keys = [(bucket.keys_BJ, bucket.real_BJ) for bucket in buckets]
        return Padded(tuple(buckets), self._gather(queries), self._gather(keys))

    @cached_property
    def host_ragged(self) -> HostRagged:
        """Segment boundaries, and the slots of the keys if there are continuations."""
        blocks, places_T = self._segments, np.arange(sum(self.lengths))
        parts = [(places_T[each.origin :][: each.shared], places_T[each.start :][: each.length]) for each in blocks]
        index_K = np.concatenate([part for pair in parts for part in pair])
        num_keys = [block.shared + block.length for block in blocks]
        slots = self._slots(index_K, None)
        return HostRagged(slots, _ends(self.lengths), _ends(num_keys), max(self.lengths), max(num_keys))

    @cached_property
    def ragged(self) -> Ragged:
        """The `host_ragged` on the device."""
        keys, *ends, longest_query, longest_key = self.host_ragged
        query_ends, key_ends = (to_device(torch.from_numpy(each.astype(np.int32)), self.device) for each in ends)
        return Ragged(self._on_device(keys), query_ends, key_ends, longest_query, longest_key)

    def masks(self, window: int, dtype: torch.dtype) -> list[Tensor | None]:
        """Additive attention masks of the buckets of `padded`, broadcastable to `[B, heads, Q, J]`. None: the bucket is
        purely causal. `window`: number of tokens seen by a query, itself included; 0: all."""
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = [self._mask(bucket, window, dtype) for bucket in self.padded.buckets]
        return self._masks[window, dtype]

    def _mask(self, bucket: Bucket, window: int, dtype: torch.dtype) -> Tensor | None:
        if bucket.is_whole and not self.has_blocks:
            num_keys = bucket.keys_BJ.shape[1]
            if not 0 < window < num_keys:
                return None
            places_L = torch.arange(num_keys)
            back = (places_L[:, None] - places_L)[None]
            visible = back >= 0
        else:
            place_T, segment_T, prefix_T = self._tokens
            segment_BJ = segment_T[bucket.keys_BJ][:, None]
            queries_BQ1 = bucket.queries_BQ[:, :, None]
            back = place_T[queries_BQ1] - place_T[bucket.keys_BJ][:, None]
            visible = (segment_BJ == segment_T[queries_BQ1]) | (segment_BJ == prefix_T[queries_BQ1])
            visible &= back >= 0
            if self.has_blocks:
                block_BJ = self._block_T[bucket.keys_BJ][:, None]
                visible |= (block_BJ == self._block_T[queries_BQ1]) & (block_BJ >= 0)
            visible &= bucket.real_BJ[:, None]
        if window:
            visible &= back < window
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
        return to_device(mask[:, None], self.device)

    @cached_property
    def _block_T(self) -> Tensor:
        """The number of each row position's block, or -1."""
        block_T = torch.full((sum(self.lengths),), -1)
        for number, (start, end) in enumerate(self.blocks):
            block_T[start:end] = number
        return block_T

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per row position `[T]`: position in its sequence, segment, and the segment's prefix or -1."""
        lengths_S = torch.tensor(self.lengths)
        shared_S = torch.tensor([block.shared for block in self._segments])
        starts_S = torch.tensor([block.start for block in self._segments])
        prefix_S = torch.tensor([-1 if prefix is None else prefix for prefix in self.prefixes])
        segment_T = torch.arange(len(self.lengths)).repeat_interleave(lengths_S)
        place_T = torch.arange(len(segment_T)) + (shared_S - starts_S)[segment_T]
        return place_T, segment_T, prefix_S[segment_T]

    @cached_property
    def _segments(self) -> list[_Block]:
        """One block per segment."""
        starts = _ends(self.lengths).tolist()
        return [
            _Block(start, length, *((0, 0) if prefix is None else (starts[prefix], self.lengths[prefix])))
            for start, length, prefix in zip(starts, self.lengths, self.prefixes, strict=False)
        ]

    def _blocks(self) -> list[_Block]:
        """Merge adjacent continuations of one prefix while together they are at most as long as the prefix, or 64
        tokens: masked attention between them then costs less than another copy of the prefix."""
        blocks: list[_Block] = []
        for segment in self._segments:
            last = blocks[-1] if blocks else segment
            length = last.length + segment.length
            if not segment.shared:
                continue
            if blocks and last.origin == segment.origin and length <= max(segment.shared, _BUCKET_FLOOR):
                blocks[-1] = last._replace(length=length)
            else:
                blocks.append(segment)
        return blocks

    def _gather(self, slots: list[tuple[Tensor, Tensor]]) -> Gather | None:
        """Build the gather of `slots`: pairs of row positions and their mask of real ones."""
        index_K, real_K = (
            np.concatenate([part.numpy().ravel() for part in parts]) for parts in zip(*slots, strict=True)
        )
        return self._on_device(self._slots(index_K, real_K))

    def _slots(self, index_K: Integers, real_K: NDArray[np.bool_] | None) -> Slots | None:
        """The slots of these row positions, with the inverse. None if they are the row unchanged."""
        num_tokens = sum(self.lengths)
        if np.array_equal(index_K, np.arange(num_tokens)):
            return None
        order = np.argsort(index_K, kind="stable")
        if real_K is not None:
            order = order[real_K[order]]
        return Slots(index_K, order, np.searchsorted(index_K[order], np.arange(num_tokens + 1)))

    def _on_device(self, slots: Slots | None) -> Gather | None:
        return None if slots is None else Gather(*(to_device(torch.from_numpy(each), self.device) for each in slots))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to `device`; to a GPU through pinned memory, without synchronizing."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def layout_of(layout_id: Tensor) -> SegmentLayout:
    """Look up a layout by id. It must still be referenced, in the backward pass too."""
    layout = _layouts.get(int(layout_id))
    if layout is None:
        raise TrainingError("the layout of a row is gone before its backward pass: keep the micro-batch until then")
    return layout


def segment_layout(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    prefixes: Sequence[int | None] | None = None,
    blocks: Sequence[tuple[int, int]] = (),
    context: ContextGroup | None = None,
) -> SegmentLayout:
    """The layout of consecutive segments of these lengths; the rest as in SegmentLayout."""
    return SegmentLayout(tuple(lengths), tuple(prefixes or [None] * len(lengths)), device, tuple(blocks), context)


def _ends(lengths: Sequence[int]) -> Integers:
    return np.cumsum([0, *lengths])


def _bucketed(blocks: list[_Block], lengths: Sequence[int]) -> list[list[_Block]]:
    """Group blocks by length, longest first: none is below 3/4 of its group's longest, unless this is <= 64."""
    groups: list[list[int]] = []
    for place in sorted(range(len(blocks)), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if longest and (longest <= _BUCKET_FLOOR or lengths[place] >= _BUCKET_RATIO * longest):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [[blocks[place] for place in group] for group in groups]


def _padded_index(blocks: list[_Block]) -> tuple[Tensor, Tensor]:
    """Row positions `[B, L]` of each block's prefix and own tokens, padded with its last one, and the real mask."""
    start_B1, length_B1, origin_B1, shared_B1 = np.array(blocks).T[:, :, None]
    total_B1 = shared_B1 + length_B1
    slots_L = np.arange(total_B1.max())
    place_BL = np.minimum(slots_L, total_B1 - 1)
    index_BL = np.where(place_BL < shared_B1, origin_B1 + place_BL, start_B1 + place_BL - shared_B1)
    return torch.from_numpy(index_BL), torch.from_numpy(slots_L < total_B1)


def gather_slots(row: Tensor, gather: Gather | None) -> Tensor:
    """Gather the row `[T, ...]` into slots, outside of autograd."""
    return row if gather is None else row.index_select(0, gather.index)


def sum_slots(slots: Tensor, gather: Gather | None) -> Tensor:
    """The backward of `gather_slots`: gradients of the slots to gradients of the row `[T, ...]`.

    Padding has gradient zero under every mask used here: gradients of shared prefixes are sums, all others copies.
    index_select's own backward uses atomic additions: slower, and unordered.
    """
    if gather is None:
        return slots
    if slots.is_cuda:
        from slipstream.trainer.attention import slot_kernel

        return slot_kernel.sum_slots(slots, gather.order, gather.starts)
    row = slots.index_select(0, gather.slot_T)
    for positions, places in gather.repeated:
        shares = slots.index_select(0, places.flatten()).unflatten(0, places.shape)
        row.index_copy_(0, positions, shares.sum(1))
    return row


class _TakeSlots(torch.autograd.Function):
    """`gather_slots` with `sum_slots` as its backward."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, gather: Gather) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gather = gather
        return gather_slots(row, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        return sum_slots(grad, ctx.gather), None


class _ScatterSlots(torch.autograd.Function):
    """Slots to row; padding gets gradient zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, slot_T: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(slot_T)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        (slot_T,) = ctx.saved_tensors
        return grad.new_zeros((ctx.num_slots, *grad.shape[1:])).index_copy_(0, slot_T, grad), None


def take_slots(row: Tensor, gather: Gather | None) -> Tensor:
    """Gather the row `[T, ...]` into slots; differentiable."""
    return row if gather is None else _TakeSlots.apply(row, gather)  # pyright: ignore[reportReturnType]


def scatter_slots(slots: Tensor, gather: Gather | None) -> Tensor:
    """The row `[T, ...]` from slots; each token occurs once in them. Differentiable."""
    return slots if gather is None else _ScatterSlots.apply(slots, gather.slot_T)  # pyright: ignore[reportReturnType]
