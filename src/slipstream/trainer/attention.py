"""Packed attention: all sequences of a micro-batch lie in one row `[1, T]`, each attends only to itself.

A continuation attends to its whole prefix, which the row holds once for all of them, and causally to itself.
Guarantees: no `[T, T]` mask, no padding in any linear layer, and on a CPU the same bits for the same input and
thread count. Padding exists only inside this function (see `layout`), on the right, where a causal kernel
ignores it without a mask; only continuations, and segments longer than a sliding window, have a mask.

The layout reaches the function as a keyword argument that transformers models pass through to their
attention interface. A model that loses it on the way, or asks for something this function does not do
(soft-capping, sinks, biases), gets a ConfigError; nothing is silently left out.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from slipstream.errors import ConfigError
from slipstream.trainer.layout import SegmentLayout, put_back, take

ATTENTION_NAME = "slipstream_packed"
_TELLS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Torch 2.11 takes grouped heads as they come; later versions want to be told."""


# Not for the compiler: layouts differ from row to row, and the kernels are compiled already.
@torch.compiler.disable
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
    T, H, D]`."""
    name = type(module).__name__
    if segments is None:
        raise ConfigError(f"{name} does not pass keyword arguments on to its attention: set training.packing = false")
    refused = [key for key in ("softcap", "s_aux", "position_bias", "cache") if kwargs.get(key) is not None]
    if refused or attention_mask is not None or dropout or not getattr(module, "is_causal", True):
        what = ", ".join(refused) or "a mask, dropout or bidirectional attention"
        raise ConfigError(f"{name} needs {what}, which packed attention does not do: set training.packing = false")
    segments.windows_seen.add(sliding_window or 0)
    query_THD, key_TKD, value_TKD = (states[0].transpose(0, 1) for states in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        output_THD = _variable_length(query_THD, key_TKD, value_TKD, segments, scaling, sliding_window)
    else:
        output_THD = _padded(query_THD, key_TKD, value_TKD, segments, scaling, sliding_window)
    return output_THD[None], None


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentLayout,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Buckets of right-padded segments; any device and dtype."""
    layout = segments.padded
    query_sizes = [bucket.queries_BQ.numel() for bucket in layout.buckets]
    key_sizes = [bucket.keys_BJ.numel() for bucket in layout.buckets]
    queries = take(query, layout.queries).split(query_sizes)
    keys, values = (take(state, layout.keys).split(key_sizes) for state in (key, value))
    masks = segments.masks(window or 0, query.dtype)
    outputs: list[Tensor] = []
    for bucket, mask, *parts in zip(layout.buckets, masks, queries, keys, values, strict=True):
        num_blocks = bucket.queries_BQ.shape[0]
        query_BHQD, key_BKJD, value_BKJD = (part.unflatten(0, (num_blocks, -1)).transpose(1, 2) for part in parts)
        output_BHQD = scaled_dot_product_attention(
            query_BHQD,
            key_BKJD,
            value_BKJD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output_BHQD.transpose(1, 2).flatten(0, 1))
    return put_back(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layout.queries)


def _variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentLayout,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Torch's variable-length FlashAttention: no padding at all; CUDA and half precision only.

    Where a segment has more keys than queries, FlashAttention (2.1 and later) aligns the causal mask with the
    last of both: what a continuation needs.
    """
    layout = segments.ragged
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _TELLS_GROUPS else {}
    output: Any = varlen_attn(
        query,
        take(key, layout.keys),
        take(value, layout.keys),
        layout.query_ends,
        layout.key_ends,
        layout.longest_query,
        layout.longest_key,
        scale=scaling,
        window_size=(-1 if not window else window - 1, 0),
        **grouped,
    )
    return output


def register() -> str:
    """Make the function known to transformers and return its name there; harmless when repeated.

    No mask function is registered with it: transformers then builds no mask at all.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    return ATTENTION_NAME
