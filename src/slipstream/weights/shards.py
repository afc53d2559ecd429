"""Tensors of which every process has some rows or columns: gathered one after another, and proved where they lie.

Both are dealt as `torch.chunk` and FSDP2 deal them: the first processes have equally many, the last ones the rest, or
none. Guarantees: of two tensors that are asked for in turn, the second is on its way while the first is used, and no
more than these two are whole at a time, of columns the first twice; a fingerprint is added up from shares, so that
nothing is gathered for it.
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
    shards: Iterable[Shard], rank: int, size: int, group: ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors, one after another, in the process of rank 0; nothing in the others, which take part. A
    collective: whoever stops early makes the others wait, so the rest is gathered and dropped then."""
    pending: _Gathering | None = None
    steps = iter(shards)
    try:
        for shard in steps:
            begun, pending = pending, _begin(shard, rank, size, group)
            if begun is not None:
                whole = begun.finish()
                if rank == 0:
                    yield begun.shard.name, whole
        if pending is not None:
            whole = pending.finish()
            if rank == 0:
                yield pending.shard.name, whole
        pending = None
    finally:
        if pending is not None:
            pending.finish()
        for shard in steps:
            _begin(shard, rank, size, group).finish()


@dataclass(frozen=True)
class _Gathering:
    """A tensor on its way to rank 0."""

    shard: Shard
    work: Any
    whole: Tensor
    """With the dimension that is dealt out in front."""
    sent: Tensor

    def finish(self) -> Tensor:
        """Wait for it; elsewhere than in rank 0 there is nothing in it."""
        if self.work is None:
            return self.whole
        self.work.wait()
        dim = self.shard.dim or 0
        return self.whole[: self.shard.shape[dim]].movedim(0, dim).contiguous() if len(self.whole) else self.whole


def _begin(shard: Shard, rank: int, size: int, group: ProcessGroup | None) -> _Gathering:
    """Start to gather one tensor."""
    part = shard.part.detach()
    if shard.dim is None:
        return _Gathering(shard, None, part, part)
    distributed: Any = torch.distributed
    sent = _even(shard, size)
    whole = part.new_empty(len(sent) * size if rank == 0 else 0, *sent.shape[1:])
    parts = list(whole.split(len(sent))) if rank == 0 else None
    work = distributed.gather(sent, parts, dst=0, group=group, async_op=True)
    return _Gathering(shard, work, whole, sent)


def _even(shard: Shard, size: int) -> Tensor:
    """The part as it is sent: the dimension that is dealt out in front, and as long in every process."""
    dim = shard.dim or 0
    each = len(dealt(shard.shape[dim], 0, size))
    part = shard.part.detach().movedim(dim, 0).contiguous()
    return part if len(part) == each else torch.cat([part, part.new_zeros(each - len(part), *part.shape[1:])])


@torch.no_grad()
def gathered_everywhere(
    shards: Iterable[Shard], size: int, group: ProcessGroup | None = None, *, bunch_bytes: int = 64 << 20
) -> Iterator[tuple[str, Tensor]]:
    """The whole of every tensor that is dealt out, one after another, in every process. A collective, to be gone
    through to its end; small tensors share one, in which `bunch_bytes` come together at most."""
    distributed: Any = torch.distributed
    for bunch in _bunches(shards, size, bunch_bytes):
        sent = torch.cat([part.reshape(-1) for _, part in bunch])
        came = sent.new_empty(size, len(sent))
        distributed.all_gather(list(came), sent, group=group)
        columns = came.split([part.numel() for _, part in bunch], dim=1)
        for (shard, part), column in zip(bunch, columns, strict=True):
            dim = shard.dim or 0
            yield shard.name, column.reshape(-1, *part.shape[1:])[: shard.shape[dim]].movedim(0, dim)


def _bunches(shards: Iterable[Shard], size: int, most: int) -> Iterator[list[tuple[Shard, Tensor]]]:
    """What goes together: as much as `most` bytes of one dtype, and more only where one tensor has more."""
    bunch: list[tuple[Shard, Tensor]] = []
    num_bytes = 0
    most //= size  # each process takes what all of them send
    for shard in shards:
        part = _even(shard, size)
        if bunch and (num_bytes + part.nbytes > most or part.dtype != bunch[0][1].dtype):
            yield bunch
            bunch, num_bytes = [], 0
        bunch.append((shard, part))
        num_bytes += part.nbytes
    if bunch:
        yield bunch


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
