"""Tensors of which every process has some rows or columns: gathered one after another, and proved where they lie.

Both are dealt as `torch.chunk` and FSDP2 deal them: the first processes have equally many, the last ones the rest, or
none. Small tensors come together, in bunches: a message, and what is done for it, costs as much as megabytes do.
Guarantees: the next bunch is on its way while one is used, and of no more than these two there are whole tensors, of
the first twice; a fingerprint is added up from shares, so that nothing is gathered for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.records import ParameterSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Shard:
    """One process's part of a tensor."""

    name: str
    part: Tensor
    shape: tuple[int, ...]
    """Of the whole."""
    dim: int | None = 0
    """Along which it is dealt out: 0 for rows, 1 for columns. None: every process has all of it."""

    def spec(self, fingerprint: str) -> ParameterSpec:
        """What the whole is."""
        return ParameterSpec(self.name, self.shape, str(self.part.dtype).removeprefix("torch."), fingerprint)


def dealt(num: int, rank: int, size: int) -> range:
    """Which of `num` rows or columns the process `rank` of `size` has."""
    each = -(-num // size)
    return range(min(num, rank * each), min(num, (rank + 1) * each))


def part_of(whole: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    """What the process `rank` has of it, as a view."""
    if dim is None:
        return whole
    own = dealt(whole.shape[dim], rank, size)
    return whole.narrow(dim, own.start, len(own))


def place_of(shard: Shard, rank: int, size: int) -> tuple[int, tuple[int, ...]]:
    """Where the part of `rank` begins in the flattened whole, and by which strides its elements lie there."""
    strides = tuple(math.prod(shard.shape[place + 1 :]) for place in range(len(shard.shape)))
    if shard.dim is None:
        return 0, strides
    return dealt(shard.shape[shard.dim], rank, size).start * strides[shard.dim], strides


@torch.no_grad()
def gathered(
    shards: Iterable[Shard], rank: int, size: int, group: ProcessGroup | None = None, *, bunch_bytes: int = 128 << 20
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors, one after another, in the process of rank 0; nothing in the others, which take part. A
    collective: whoever stops early makes the others wait, so the rest is gathered and dropped then. Those below
    `bunch_bytes` share a message."""
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
    """The whole tensors, one after another, in every process; all of them must be dealt out. A collective, to be gone
    through to its end; those below `bunch_bytes` share a message."""
    distributed: Any = torch.distributed
    for bunch in _bunches(shards, size, bunch_bytes):
        sent = bunch.flat()
        came = sent.new_empty(size, len(sent))
        distributed.all_gather(list(came), sent, group=group)
        yield from bunch.wholes(came)


@dataclass(frozen=True)
class _Bunch:
    """Tensors of one type that come together, in their order."""

    shards: list[Shard]
    parts: list[Tensor]
    """Of those that are dealt out, as `_even` makes them."""

    def flat(self) -> Tensor:
        """What this process sends, in one piece."""
        return self.parts[0].reshape(-1) if len(self.parts) == 1 else torch.cat([p.reshape(-1) for p in self.parts])

    def wholes(self, came: Tensor) -> Iterator[tuple[str, Tensor]]:
        """All of them, from what each process sent as a row of `came`."""
        coming = zip(self.parts, self._apart(came), strict=True)
        for shard in self.shards:
            if (dim := shard.dim) is None:
                yield shard.name, shard.part.detach()
                continue
            part, piece = next(coming)
            whole = piece.view(-1, *part.shape[1:])[: shard.shape[dim]]
            yield shard.name, whole.movedim(0, dim) if dim else whole

    def _apart(self, came: Tensor) -> Sequence[Tensor]:
        """Each tensor's elements in one piece; with few kernels for all of them."""
        if len(self.parts) < 2:
            return [came.view(-1)]
        size, lengths = len(came), [part.numel() for part in self.parts]
        together = torch.empty_like(came).view(-1)
        rows = zip(*(row.split(lengths) for row in came), strict=True)
        places = together.split([length for length in lengths for _ in range(size)])
        torch._foreach_copy_(places, [piece for pieces in rows for piece in pieces])
        return together.split([size * length for length in lengths])


def _bunches(shards: Iterable[Shard], size: int, most: int) -> Iterator[_Bunch]:
    """What comes together: as much as `most` bytes of one type, and more only where one tensor has more."""
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
    """The part as it is sent: the dimension that is dealt out in front, and as long in every process."""
    dim = shard.dim or 0
    each = len(dealt(shard.shape[dim], 0, size))
    part = shard.part.detach()
    part = (part.movedim(dim, 0) if dim else part).contiguous()
    return part if len(part) == each else torch.cat([part, part.new_zeros(each - len(part), *part.shape[1:])])


@dataclass(frozen=True)
class _Gathering:
    """Tensors on their way to rank 0."""

    bunch: _Bunch
    work: Any
    sent: Tensor | None
    came: Tensor | None
    """In rank 0."""

    @classmethod
    def of(cls, bunch: _Bunch, rank: int, size: int, group: ProcessGroup | None) -> _Gathering:
        """Begin."""
        if not bunch.parts:
            return cls(bunch, None, None, torch.empty(0) if rank == 0 else None)
        distributed: Any = torch.distributed
        sent = bunch.flat()
        came = sent.new_empty(size, len(sent)) if rank == 0 else None
        work = distributed.gather(sent, None if came is None else list(came), dst=0, group=group, async_op=True)
        return cls(bunch, work, sent, came)

    def drop(self) -> None:
        """Wait until the tensors have come; on a GPU what is queued from then on waits."""
        if self.work is not None:
            self.work.wait()

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """`drop`, and in rank 0 the whole tensors, each in one piece."""
        self.drop()
        if self.came is not None:
            for name, whole in self.bunch.wholes(self.came):
                yield name, whole.contiguous()


class ShardedWeights:
    """A version's weights, of which every process has a share; whoever goes through them gathers them."""

    def __init__(
        self, gather: Callable[[], Iterator[tuple[str, Tensor]]], describe: Callable[[], tuple[ParameterSpec, ...]]
    ) -> None:
        self._gather = gather
        self._describe = describe

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._gather()

    def describe(self) -> tuple[ParameterSpec, ...]:
        """Names, shapes and fingerprints in the order of the tensors; nothing is gathered for it."""
        return self._describe()


def held(weights: Iterable[tuple[str, Tensor]]) -> ShardedWeights | Sequence[tuple[str, Tensor]]:
    """What can be gone through several times: the weights as a list, or as they are where each way gathers them."""
    return weights if isinstance(weights, ShardedWeights) else list(weights)
