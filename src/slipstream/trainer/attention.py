"""Packed attention: all sequences of a micro-batch lie in one row `[1, T]`, each attends only to itself.

Guarantees: block-diagonal causal attention at a cost of at most 16/9 of sum(length**2) (plus what segments
shorter than 64 share), no `[T, T]` mask, no padding in any linear layer, and on a CPU the same bits for the
same input and thread count. Padding exists only inside this function: segments of similar length are laid
side by side, right-padded, and a causal kernel needs no mask to ignore padding on the right.

The layout reaches the function as a keyword argument that transformers models pass through to their
attention interface. A model that loses it on the way, or asks for something this function does not do
(soft-capping, sinks, biases), gets a ConfigError; nothing is silently left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from slipstream.errors import ConfigError

ATTENTION_NAME = "slipstream_packed"
_BUCKET_RATIO = 0.75
_BUCKET_FLOOR = 64


@dataclass(frozen=True)
class SegmentLayout:
    """Where the segments of a row lie, as the attention function needs it. Made once for each micro-batch."""

    lengths: tuple[int, ...]
    buckets: tuple[tuple[int, int], ...]
    """Segments of similar length laid side by side: their number and the length they are padded to."""
    gather: Tensor | None
    """Row position of each padded slot, bucket after bucket; padding repeats a real token. None: there is
    none."""
    scatter_T: Tensor | None
    """Slot of each row position."""
    boundaries: Tensor
    """Cumulated lengths `[num_segments + 1]`, int32, for variable-length kernels."""
    windows_seen: set[int] = field(default_factory=set[int])
    """Sliding windows that layers asked for (0: none), so that a caller can see that the layout was used."""


def segment_layout(lengths: Sequence[int], device: torch.device | str = "cpu") -> SegmentLayout:
    """The layout of segments of these lengths, one after the other in a row."""
    lengths_S = torch.tensor(lengths)
    ends_S = lengths_S.cumsum(0)
    boundaries = torch.cat([torch.zeros(1, dtype=torch.long), ends_S]).to(device, torch.int32)
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if longest and (longest <= _BUCKET_FLOOR or lengths[index] >= _BUCKET_RATIO * longest):
            groups[-1].append(index)
        else:
            groups.append([index])
    buckets = tuple((len(group), lengths[group[0]]) for group in groups)
    if len(set(lengths)) == 1:
        return SegmentLayout(tuple(lengths), buckets, None, None, boundaries)
    starts_S = ends_S - lengths_S
    gathered: list[Tensor] = []
    scatter_T = torch.empty(int(ends_S[-1]), dtype=torch.long)
    offset = 0
    for group, (_, longest) in zip(groups, buckets, strict=True):
        slots_L = torch.arange(longest)[None]
        lengths_B1 = lengths_S[group][:, None]
        gather_BL = starts_S[group][:, None] + torch.minimum(slots_L, lengths_B1 - 1)
        real_BL = slots_L < lengths_B1
        scatter_T[gather_BL[real_BL]] = offset + torch.arange(gather_BL.numel()).view_as(gather_BL)[real_BL]
        gathered.append(gather_BL.flatten())
        offset += gather_BL.numel()
    return SegmentLayout(tuple(lengths), buckets, torch.cat(gathered).to(device), scatter_T.to(device), boundaries)


class _Pad(torch.autograd.Function):
    """Row to padded slots. Each token has one real slot, and the padding's gradient is zero under a causal
    mask, so the gradient is a plain copy too: index_select's own would add atomically, slower and in any
    order.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, gather: Tensor, scatter_T: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(scatter_T)
        return row.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        (scatter_T,) = ctx.saved_tensors
        return grad.index_select(0, scatter_T), None, None


class _Unpad(torch.autograd.Function):
    """Padded slots back to the row; the padding's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, scatter_T: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(scatter_T)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, scatter_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        (scatter_T,) = ctx.saved_tensors
        return grad.new_zeros((ctx.num_slots, *grad.shape[1:])).index_copy_(0, scatter_T, grad), None


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
    """Buckets of right-padded segments through the causal kernel; any device and dtype."""
    states = (query, key, value)
    if segments.gather is not None:
        states = tuple(_Pad.apply(state, segments.gather, segments.scatter_T) for state in states)
    sizes = [num_segments * length for num_segments, length in segments.buckets]
    outputs: list[Tensor] = []
    for bucket, *parts in zip(segments.buckets, *(state.split(sizes) for state in states), strict=True):
        query_BHLD, key_BKLD, value_BKLD = (part.unflatten(0, bucket).transpose(1, 2) for part in parts)
        windowed = bool(window) and bucket[1] > window
        output_BHLD = scaled_dot_product_attention(
            query_BHLD,
            key_BKLD,
            value_BKLD,
            attn_mask=_window_mask(bucket[1], window, query.device) if window and windowed else None,
            is_causal=not windowed,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output_BHLD.transpose(1, 2).flatten(0, 1))
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return slots if segments.scatter_T is None else _Unpad.apply(slots, segments.scatter_T)  # pyright: ignore[reportReturnType]


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Causal and at most `window` tokens back, the token itself included: bool `[length, length]`."""
    back_LL = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (back_LL >= 0) & (back_LL < window)


def _variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentLayout,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Torch's variable-length FlashAttention: no padding at all; CUDA and half precision only."""
    longest = max(segments.lengths)
    output: Any = varlen_attn(
        query,
        key,
        value,
        segments.boundaries,
        segments.boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if not window else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def register() -> str:
    """Make the function known to transformers and return its name there; harmless when repeated.

    No mask function is registered with it: transformers then builds no mask at all.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    return ATTENTION_NAME
