"""Tensors sharded over processes: all-gathered or gathered tensor by tensor, with fingerprints computed from the
shards.

Rows or columns are dealt out as by `torch.chunk` and FSDP2: the first processes have equally many, the last ones the
rest, or none. Small tensors share one message (a bunch), as a message costs as much as megabytes do. Guarantees: the
next bunch travels while one is used, and only these two exist as whole tensors (the first twice); fingerprints need no
gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.records import ParameterSpec
from slipstream.weights.fingerprint_torch import contiguous_strides

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Shard:
    """One process's shard of a tensor."""

    name: str
    part: Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None = 0
    """The sharded dimension: 0 for rows, 1 for columns. None: replicated."""

    def spec(self, fingerprint: str) -> ParameterSpec:
        """The spec of the whole tensor."""
        return ParameterSpec(self.name, self.shape, str(self.part.dtype).removeprefix("torch."), fingerprint)


def dealt(num: int, rank: int, size: int) -> range:
    """The range of `num` rows or columns that process `rank` of `size` holds."""
    each = -(-num // size)
    return range(min(num, rank * each), min(num, (rank + 1) * each))


def part_of(whole: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    """The shard of process `rank`, as a view."""
    if dim is None:
        return whole
    own = dealt(whole.shape[dim], rank, size)
    return whole.narrow(dim, own.start, len(own))


def place_of(shard: Shard, rank: int, size: int) -> tuple[int, tuple[int, ...]]:
    """Offset of the shard of `rank` in the flattened whole, and the strides of its elements there."""
    strides = contiguous_strides(shard.shape)
    if shard.dim is None:
        return 0, strides
    return dealt(shard.shape[shard.dim], rank, size).start * strides[shard.dim], strides


@torch.no_grad()
def gathered(
    shards: Iterable[Shard], rank: int, size: int, group: ProcessGroup | None = None, *, bunch_bytes: int = 128 << 20
) -> Iterator[tuple[str, Tensor]]:
    """Gather the whole tensors to rank 0, one after another; other ranks take part and yield nothing. A collective: a
    consumer that stops early still gathers, and drops, the rest. Tensors below `bunch_bytes` share a message."""
    coming: _Gathering | None = None
    bunches = _bunches(shards, size, bunch_bytes)
    try:
        for bunch in bunches:
            here, coming = coming, _Gathering.of(bunch, rank, size, group)
            if here is not None:
                yield from here.finish()
            here = None  # its memory is free before more is taken
        here, coming = coming, None
        if here is not None:
            yield from here.finish()
    finally:
        if coming is not None:
            coming.drop()
        for bunch in bunches:
            _Gathering.of(bunch, rank, size, group).drop()


@torch.no_grad()
def gathered_everywhere(
    shards: Iterable[Shard], size: int, group: ProcessGroup | None = None, *, bunch_bytes: int = 64 << 20
) -> Iterator[tuple[str, Tensor]]:
    """All-gather the whole tensors, one after another, in every process; all must be sharded. A collective that must be
    consumed to its end. Tensors below `bunch_bytes` share a message."""
    distributed: Any = torch.distributed
    for bunch in _bunches(shards, size, bunch_bytes):
        sent = bunch.flat()
        came = sent.new_empty(size, len(sent))
        distributed.all_gather(list(came), sent, group=group)
        yield from bunch.wholes(came)


@dataclass(frozen=True)
class _Bunch:
    """Tensors of one dtype that share a message, in their order."""

    shards: list[Shard]
    parts: list[Tensor]
    """The padded shards of the sharded ones (`_even`)."""

    def flat(self) -> Tensor:
        """This process's message."""
        return self.parts[0].reshape(-1) if len(self.parts) == 1 else torch.cat([p.reshape(-1) for p in self.parts])

    def wholes(self, came: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors, from the messages of all processes, the rows of `came`."""
        coming = zip(self.parts, self._apart(came), strict=True)
        for shard in self.shards:
            if (dim := shard.dim) is None:
                yield shard.name, shard.part.detach()
                continue
            part, piece = next(coming)
            whole = piece.view(-1, *part.shape[1:])[: shard.shape[dim]]
            yield shard.name, whole.movedim(0, dim) if dim else whole

    def _apart(self, came: Tensor) -> Sequence[Tensor]:
        """Each tensor's elements in one piece, with few kernels for all of them."""
        if len(self.parts) < 2:
            return [came.view(-1)]
        size, lengths = len(came), [part.numel() for part in self.parts]
        together = torch.empty_like(came).view(-1)
        rows = zip(*(row.split(lengths) for row in came), strict=True)
        places = together.split([length for length in lengths for _ in range(size)])
        torch._foreach_copy_(places, [piece for pieces in rows for piece in pieces])
        return together.split([size * length for length in lengths])


def _bunches(shards: Iterable[Shard], size: int, most: int) -> Iterator[_Bunch]:
    """Tensors in bunches of one dtype and at most `most` bytes, or of one larger tensor."""
    bunch = _Bunch([], [])
    num_bytes = 0
    most //= size  # each process sends its share
    for shard in shards:
        part = None if shard.dim is None else _even(shard, size)
        more = 0 if part is None else part.nbytes
        is_alike = part is None or not bunch.parts or part.dtype == bunch.parts[0].dtype
        if bunch.parts and (num_bytes + more > most or not is_alike):
            yield bunch
            bunch, num_bytes = _Bunch([], []), 0
        bunch.shards.append(shard)
        if part is not None:
            bunch.parts.append(part)
        num_bytes += more
    if bunch.shards:
        yield bunch


def _even(shard: Shard, size: int) -> Tensor:
    """The shard as it is sent: the sharded dimension first, padded to the same length in every process."""
    dim = shard.dim or 0
    each = len(dealt(shard.shape[dim], 0, size))
    part = shard.part.detach()
    part = (part.movedim(dim, 0) if dim else part).contiguous()
    return part if len(part) == each else torch.cat([part, part.new_zeros(each - len(part), *part.shape[1:])])


@dataclass(frozen=True)
class _Gathering:
    """A running gather to rank 0."""

    bunch: _Bunch
    work: Any
    sent: Tensor | None
    came: Tensor | None
    """In rank 0."""

    @classmethod
    def of(cls, bunch: _Bunch, rank: int, size: int, group: ProcessGroup | None) -> _Gathering:
        """Start it."""
        if not bunch.parts:
            return cls(bunch, None, None, torch.empty(0) if rank == 0 else None)
        distributed: Any = torch.distributed
        sent = bunch.flat()
        came = sent.new_empty(size, len(sent)) if rank == 0 else None
        work = distributed.gather(sent, None if came is None else list(came), dst=0, group=group, async_op=True)
        return cls(bunch, work, sent, came)

    def drop(self) -> None:
        """Wait for the gather; on a GPU the current stream waits."""
        if self.work is not None:
            self.work.wait()

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Wait, and in rank 0 yield the whole tensors, contiguous."""
        self.drop()
        if self.came is not None:
            for name, whole in self.bunch.wholes(self.came):
                yield name, whole.contiguous()


class ShardedWeights:
    """Sharded weights of a version; every iteration gathers them."""

    def __init__(
        self, gather: Callable[[], Iterator[tuple[str, Tensor]]], describe: Callable[[], tuple[ParameterSpec, ...]]
    ) -> None:
        self._gather = gather
        self._describe = describe

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._gather()

    def describe(self) -> tuple[ParameterSpec, ...]:
        """Names, shapes and fingerprints in the order of the tensors, without a gather of them."""
        return self._describe()


def held(weights: Iterable[tuple[str, Tensor]]) -> ShardedWeights | Sequence[tuple[str, Tensor]]:
    """Weights that can be iterated several times: a list, or the sharded weights themselves."""
    return weights if isinstance(weights, ShardedWeights) else list(weights)
