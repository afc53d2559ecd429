"""Tensors of which every process has some rows: gathered one after another, and proved where they lie.

Rows are dealt as `torch.chunk` and FSDP2 deal them: the first processes have equally many, the last ones the rest, or
none. Guarantees: of two tensors that are asked for in turn, the second is on its way while the first is used, and no
more than these two are whole at a time; a fingerprint is added up from shares, so that nothing is gathered for it.
"""

from __future__ import annotations

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
    """One process's rows of a tensor."""

    name: str
    rows: Tensor
    shape: tuple[int, ...]
    """Of the whole."""
    is_whole: bool = False
    """Every process has all of it."""

    def spec(self, fingerprint: str) -> ParameterSpec:
        """What the whole is."""
        return ParameterSpec(self.name, self.shape, str(self.rows.dtype).removeprefix("torch."), fingerprint)


def rows_of(num_rows: int, rank: int, size: int) -> range:
    """Which rows the process `rank` of `size` has."""
    each = -(-num_rows // size)
    return range(min(num_rows, rank * each), min(num_rows, (rank + 1) * each))


def first_element(shard: Shard, rank: int, size: int) -> int:
    """Where the rows of `rank` begin in the flattened whole."""
    if shard.is_whole:
        return 0
    row = 1
    for length in shard.shape[1:]:
        row *= length
    return rows_of(shard.shape[0], rank, size).start * row


@torch.no_grad()
def gathered(
    shards: Iterable[Shard], rank: int, size: int, group: ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors, one after another, in the process of rank 0; nothing in the others, which take part. A
    collective: whoever stops early makes the others wait, so the rest is gathered and dropped then."""
    pending: tuple[str, Any, Tensor, int, Tensor] | None = None
    steps = iter(shards)

    def finish(begun: tuple[str, Any, Tensor, int, Tensor]) -> Iterator[tuple[str, Tensor]]:
        name, work, whole, num_rows, _ = begun
        if work is not None:
            work.wait()
        if rank == 0:
            yield name, whole[:num_rows] if work is not None else whole

    try:
        for shard in steps:
            begun, pending = pending, _begin(shard, rank, size, group)
            if begun is not None:
                yield from finish(begun)
        if pending is not None:
            yield from finish(pending)
        pending = None
    finally:
        if pending is not None and pending[1] is not None:
            pending[1].wait()
        for shard in steps:
            _, work, *_ = _begin(shard, rank, size, group)
            if work is not None:
                work.wait()


def _begin(shard: Shard, rank: int, size: int, group: ProcessGroup | None) -> tuple[str, Any, Tensor, int, Tensor]:
    """Start to gather one tensor: its name, who works on it, where it comes, its rows, and what is sent."""
    rows = shard.rows.detach()
    if shard.is_whole:
        return shard.name, None, rows, 0, rows
    distributed: Any = torch.distributed
    each = len(rows_of(shard.shape[0], 0, size))
    sent = rows.contiguous()
    if len(sent) < each:
        sent = torch.cat([sent, sent.new_zeros(each - len(sent), *shard.shape[1:])])
    whole = rows.new_empty(each * size if rank == 0 else 0, *shard.shape[1:])
    parts = list(whole.split(each)) if rank == 0 else None
    work = distributed.gather(sent, parts, dst=0, group=group, async_op=True)
    return shard.name, work, whole, shard.shape[0], sent


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
