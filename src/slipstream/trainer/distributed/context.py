"""Context parallelism: neighbouring ranks hold one row together, split by position.

`attention.exchanged_heads` brings the row together for attention. Guarantees: the loss sees all targets, with the same
bits on these ranks; its gradient reaches each target on one rank, so gradients summed over all ranks are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class ContextGroup:
    """The ranks of a row, as seen by number `rank` of `size`. Without a process `group` a rank exchanges with itself:
    shapes are right and values are not, for the trials of a compiler."""

    # A plain class: torch.compile would guard on every field of a frozen dataclass.
    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    def alone(self) -> ContextGroup:
        """The same place in a group without a connection."""
        return ContextGroup(self.rank, self.size)

    def exchange(self, chunks: Tensor) -> Tensor:
        """All-to-all of equal chunks of the first dimension, in the order of the ranks."""
        if self._group is None:
            return chunks.clone()
        received = torch.empty_like(chunks)
        torch.distributed.all_to_all_single(received, chunks, group=self._group)
        return received

    def sum_(self, values: Tensor) -> Tensor:
        """All-reduce in place."""
        if self._group is not None:
            torch.distributed.all_reduce(values, group=self._group)
        return values


@dataclass(frozen=True)
class RowShard:
    """One rank's part of a row: a range of its tokens, and the M of its N targets predicted by them."""

    context: ContextGroup
    tokens: slice
    index_M: Tensor
    """Place of each of these targets among the row's."""
    predict_index_M: Tensor
    """Position in the shard of the predicting token."""

    def join(self, values_M: Tensor, num_targets: int) -> Tensor:
        """The values `[N, ...]` of all targets, on every rank; differentiable."""
        return _Join.apply(values_M, self.index_M, num_targets, self.context)  # pyright: ignore[reportReturnType]


def shard_tokens(num_tokens: int, rank: int, size: int) -> range:
    """The positions held by `rank`, in a row of `num_tokens`, a multiple of `size`."""
    length = num_tokens // size
    return range(rank * length, (rank + 1) * length)


def shard_targets(predict_index_N: Tensor, tokens: range) -> Tensor:
    """The targets `[M]` predicted by the `tokens` of a shard."""
    return ((predict_index_N >= tokens.start) & (predict_index_N < tokens.stop)).nonzero()[:, 0]


class _Join(torch.autograd.Function):
    """Each value comes from one rank, and all ranks compute the same loss: a rank takes the gradient of its values."""

    @staticmethod
    def forward(ctx: Any, values_M: Tensor, index_M: Tensor, num_targets: int, context: ContextGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(index_M)
        whole_N = values_M.new_zeros((num_targets, *values_M.shape[1:]))
        return context.sum_(whole_N.index_copy_(0, index_M, values_M))

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        (index_M,) = ctx.saved_tensors
        return grad.index_select(0, index_M), None, None, None
