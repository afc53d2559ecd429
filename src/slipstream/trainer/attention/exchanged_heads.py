"""Attention over a row on several ranks (Ulysses, arXiv 2309.14509).

Before attention an all-to-all turns the ranks' shards of all heads into the whole row of a share of the heads, and
another one turns the output back. Guarantee: attention sees whole rows; packing, sliding windows and kernels stay the
same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.shared_kernels.operation import Operation
from slipstream.trainer.attention.row_layout import layout_of
from slipstream.trainer.distributed.context import ContextGroup


def gather_heads(
    context: ContextGroup, layout_id: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """From all heads of a shard, `[1, heads, T / size, D]` each, to this rank's heads of the whole row `[1, heads /
    size, T, D]`. Fewer heads of keys and values than ranks are repeated."""
    parts: list[Tensor] = []
    for states in (query, key, value):
        states_THD = states.squeeze(0).transpose(0, 1)
        if (num_heads := states_THD.shape[1]) < context.size:
            states_THD = states_THD.repeat_interleave(context.size // num_heads, 1)
        parts.append(states_THD.unflatten(1, (context.size, -1)).flatten(2))
    # One exchange for all three.
    row_TF = _to_row(torch.cat(parts, -1), layout_id)
    whole = row_TF.split([part.shape[-1] for part in parts], -1)
    dims = (states.shape[-1] for states in (query, key, value))
    return tuple(
        each.unflatten(-1, (-1, dim)).transpose(0, 1).unsqueeze(0) for each, dim in zip(whole, dims, strict=True)
    )


def scatter_heads(context: ContextGroup, layout_id: Tensor, output: Tensor) -> Tensor:
    """From attention's output of this rank's heads `[1, T, heads / size, D]` to all heads of its shard `[1, T / size,
    heads, D]`."""
    shard_TCF = _to_shard(output.squeeze(0).flatten(1), context.size, layout_id)
    return shard_TCF.unflatten(-1, (-1, output.shape[-1])).flatten(1, 2).unsqueeze(0)


def _exchange_to_row(states_TCF: Tensor, layout_id: Tensor) -> Tensor:
    return _context(layout_id).exchange(states_TCF.transpose(0, 1).contiguous()).flatten(0, 1)


def _exchange_to_shard(states_TF: Tensor, size: int, layout_id: Tensor) -> Tensor:
    chunks_CTF = _context(layout_id).exchange(states_TF.contiguous()).unflatten(0, (size, -1))
    return chunks_CTF.transpose(0, 1).contiguous()


def _context(layout_id: Tensor) -> ContextGroup:
    context = layout_of(layout_id).context
    assert context is not None
    return context


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    states, *_, layout_id = inputs
    ctx.size = states.shape[1]
    ctx.save_for_backward(layout_id)


# Each is the other's transpose. They look the group up by the row's layout, as attention does: a compiled layer is the
# same for a trial and for training.
_to_row = Operation(
    "context_to_row",
    "(Tensor states, Tensor layout_id) -> Tensor",
    _exchange_to_row,
    lambda states_TCF, _: states_TCF.new_empty((states_TCF.shape[0] * states_TCF.shape[1], states_TCF.shape[2])),
    keep=_keep_size,
    backward=lambda ctx, grad: (_to_shard(grad, ctx.size, *ctx.saved_tensors), None),
)
_to_shard = Operation(
    "context_to_shard",
    "(Tensor states, int size, Tensor layout_id) -> Tensor",
    _exchange_to_shard,
    lambda states_TF, size, _: states_TF.new_empty((states_TF.shape[0] // size, size, states_TF.shape[1])),
    keep=_keep_size,
    backward=lambda ctx, grad: (_to_row(grad, *ctx.saved_tensors), None, None),
)
