"""Packed attention: all sequences of a micro-batch are in one row `[1, T]`, and each attends only to itself.

A continuation attends to its whole prefix, held by the row once for all of them, and causally to itself.
Guarantees: no `[T, T]` mask, no padding in any linear layer, and on a CPU the same bits for the same input and
thread count. Padding exists only inside this function (see `row_layout`), on the right: a causal kernel
ignores it there without a mask. A mask is needed only by continuations, by segments longer than a sliding window,
and by images with mutual attention of their tokens.

The layout reaches the function as a keyword argument, passed on by transformers models to their
attention interface. A model that loses it on the way, or asks for something unknown to this function
(soft-capping, sinks, biases), gets a ConfigError; nothing is silently left out.

On a GPU, in half precision, it is one custom operation (`slipstream::ragged_attention`), opaque to torch.compile, so
a compiled layer is one graph for rows of any layout without such images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from slipstream.errors import ConfigError
from slipstream.shared_kernels import flash3
from slipstream.shared_kernels.operation import Operation
from slipstream.trainer.attention import flash4
from slipstream.trainer.attention.exchanged_heads import gather_heads, scatter_heads
from slipstream.trainer.attention.row_layout import (
    Ragged,
    SegmentLayout,
    gather_slots,
    layout_of,
    scatter_slots,
    sum_slots,
    take_slots,
)

ATTENTION_NAME = "slipstream_packed"
_flash_forward: Any = torch.ops.aten._flash_attention_forward
_flash_backward: Any = torch.ops.aten._flash_attention_backward


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: SegmentLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query `[1, H, T, D]`, key and value `[1, K, T, D]`, gives `[1,
    T, H, D]`; of this rank's shard if several ranks hold the row."""
    name = type(module).__name__
    if segments is None:
        raise ConfigError(f"{name} does not pass keyword arguments on to its attention: set training.packing = false")
    refused = [key for key in ("softcap", "s_aux", "position_bias", "cache") if kwargs.get(key) is not None]
    if refused or attention_mask is not None or dropout or not getattr(module, "is_causal", True):
        what = ", ".join(refused) or "a mask, dropout or bidirectional attention"
        raise ConfigError(f"{name} needs {what}, which packed attention does not do: set training.packing = false")
    if not torch.compiler.is_compiling():
        segments.windows_seen.add(sliding_window or 0)
    context, window = segments.context, sliding_window or 0
    if context is not None:
        query, key, value = gather_heads(context, segments.layout_id, query, key, value)
    # In this function, since the compiler stops at `_padded` and compiles each function around it separately.
    if not _has_kernel(query) or segments.has_blocks:
        output = _padded(query, key, value, segments, scaling, window)  # pyright: ignore[reportCallIssue]
    else:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        query_THD, key_TKD, value_TKD = (_as_row(states) for states in (query, key, value))
        output_THD, _ = ragged_attention(query_THD, key_TKD, value_TKD, segments.layout_id, scale, window)
        output = output_THD.unsqueeze(0)
    if context is not None:
        output = scatter_heads(context, segments.layout_id, output)
    return output, None


def _as_row(states: Tensor) -> Tensor:
    """`[1, H, T, D]` as `[T, H, D]`. `squeeze`, because the backward of indexing allocates zeros and copies."""
    return states.squeeze(0).transpose(0, 1)


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


# Not compiled: layouts differ from row to row.
@torch.compiler.disable
def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentLayout,
    scaling: float | None,
    window: int,
) -> Tensor:
    """Attention over buckets of right-padded segments, for any device and dtype."""
    query, key, value = (_as_row(states) for states in (query, key, value))
    layout = segments.padded
    query_sizes = [bucket.queries_BQ.numel() for bucket in layout.buckets]
    key_sizes = [bucket.keys_BJ.numel() for bucket in layout.buckets]
    queries = take_slots(query, layout.queries).split(query_sizes)
    keys, values = (take_slots(state, layout.keys).split(key_sizes) for state in (key, value))
    masks = segments.masks(window, query.dtype)
    outputs: list[Tensor] = []
    for bucket, mask, *parts in zip(layout.buckets, masks, queries, keys, values, strict=True):
        num_blocks = bucket.queries_BQ.shape[0]
        query_BHQD, key_BKJD, value_BKJD = (part.unflatten(0, (num_blocks, -1)).transpose(1, 2) for part in parts)
        num_groups = query_BHQD.shape[1] // key_BKJD.shape[1]
        if mask is not None and query.is_cuda and num_groups > 1:
            # The kernel with masks wants as many heads of keys as of queries; without it, all scores are kept.
            key_BKJD, value_BKJD = (each.repeat_interleave(num_groups, 1) for each in (key_BKJD, value_BKJD))
            num_groups = 1
        output_BHQD = scaled_dot_product_attention(
            query_BHQD,
            key_BKJD,
            value_BKJD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=num_groups > 1,
        )
        outputs.append(output_BHQD.transpose(1, 2).flatten(0, 1))
    return scatter_slots(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layout.queries).unsqueeze(0)


def _ragged_attention(
    query: Tensor, key: Tensor, value: Tensor, layout_id: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Variable-length FlashAttention, torch's or a newer one (`flash4`), without padding; CUDA and half precision only.
    Returns the output `[T, H, D]` and the log-sum-exp of the scores `[H, T]`. `window` 0: all tokens.

    FlashAttention (2.1 and later) aligns the causal mask with a segment's last query and key, as a continuation
    needs it. The gathered keys and values are recomputed in the backward pass,
    not saved.
    """
    layout = layout_of(layout_id).ragged
    keys, values = (gather_slots(each, layout.keys) for each in (key, value))
    if flash3.enabled():
        ends = layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key
        return flash3.forward(query, keys, values, *ends, scale, window)
    if newer := _newer(query, key, window, layout):
        return flash4.forward(newer, query, keys, values, layout, scale)
    given, options = _of_flash(layout, scale, window)
    output, lse, *_ = _flash_forward(query, keys, values, *given, return_debug_mask=False, **options)
    return output.contiguous(), lse


def _newer(query: Tensor, key: Tensor, window: int, layout: Ragged) -> Any:
    """FlashAttention 4, if it is there; it was not tried with empty segments."""
    return None if layout.has_room else flash4.find(query, key, window)


def _of_flash(layout: Ragged, scale: float, window: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments common to torch's two kernels; no dropout."""
    ends = layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key
    left = window - 1 if window else -1
    return (*ends, 0.0, window == 0), {"scale": scale, "window_size_left": left, "window_size_right": 0}


def _ragged_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    layout_id: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    layout = layout_of(layout_id).ragged
    keys, values = (gather_slots(each, layout.keys) for each in (key, value))
    if newer := _newer(query, key, window, layout):
        of_query, of_keys, of_values = flash4.backward(newer, grad, query, keys, values, output, lse, layout, scale)
    else:
        # The state of an absent dropout.
        state, unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)
        given, options = _of_flash(layout, scale, window)
        states = (query, keys, values, output, lse)
        of_query, of_keys, of_values = _flash_backward(grad, *states, *given, state, unused, **options)
    of_key, of_value = (sum_slots(of_slots, layout.keys).contiguous() for of_slots in (of_keys, of_values))
    return of_query.contiguous(), of_key, of_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, layout_id, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, layout_id)
    ctx.set_materialize_grads(False)


ragged_attention_backward = Operation(
    "ragged_attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, Tensor layout_id, float scale, "
    "int window) -> (Tensor, Tensor, Tensor)",
    _ragged_attention_backward,
    lambda grad, *states: tuple(each.new_empty(each.shape) for each in states[:3]),
)
ragged_attention = Operation(
    "ragged_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor layout_id, float scale, int window) -> (Tensor, Tensor)",
    _ragged_attention,
    lambda query, *_: (
        query.new_empty(query.shape),
        query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32),
    ),
    keep=_keep,
    backward=lambda ctx, grad, _: (
        *ragged_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window),
        *(None, None, None),
    ),
)


def register() -> str:
    """Register the function with transformers and return its name there; idempotent.

    No mask function is registered with it: transformers then builds no mask at all.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    return ATTENTION_NAME
