"""FlashAttention 4 (the package `flash-attn-4`, in CuTe DSL) in place of torch's FlashAttention 2, if it is installed:
its kernels are written for Hopper and later GPUs.

Guarantees: it is used only after a trial on this GPU and for these heads matched a float32 reference in values and
gradients; a failure is logged once, and torch's kernels are used. Log-sum-exps have torch's format, so that either may
compute the backward pass of the other's forward pass.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import first_line, one_line
from slipstream.trainer.attention.row_layout import Ragged

_INTERFACE = "flash_attn.cute.interface"
_HEAD_DIMS = (64, 128)
_SMALLEST = 1024
"""Tokens of a row; below, launches dominate, and other kernel variants would be compiled."""
_QUERIES, _KEYS = (200, 1, 127), (200, 70, 300)
"""Query and key lengths of the trial's segments; the last two are continuations."""
_TOLERANCE = 0.02
"""Relative error; rounding to bfloat16 gives less than 0.005."""
_log = logging.getLogger(__name__)
_found: dict[tuple[Any, ...], Any] = {}


def find(query: Tensor, key: Tensor, window: int) -> Any:
    """The FlashAttention 4 module for queries `[T, H, D]` and keys `[T, K, D]`; None: use torch's kernels."""
    if window or len(query) < _SMALLEST or torch.are_deterministic_algorithms_enabled():
        return None
    kind = (query.device, query.dtype, *query.shape[1:], key.shape[1])
    if kind not in _found:
        _found[kind] = _tried(query, key)
    return _found[kind]


def forward(interface: Any, query: Tensor, key: Tensor, value: Tensor, layout: Ragged, scale: float) -> tuple[Any, Any]:
    """The output `[T, H, D]` and the log-sum-exp of the scores `[H, T]`."""
    ends = {"cu_seqlens_q": layout.query_ends, "cu_seqlens_k": layout.key_ends}
    output, lse, *_ = interface._flash_attn_fwd(
        query, key, value, **ends, softmax_scale=scale, causal=True, return_lse=True
    )
    return output, lse


def backward(
    interface: Any,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    layout: Ragged,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    ends = {"cu_seqlens_q": layout.query_ends, "cu_seqlens_k": layout.key_ends}
    places = dict(zip(("dq", "dk", "dv"), (each.new_empty(each.shape) for each in (query, key, value)), strict=True))
    return interface._flash_attn_bwd(
        query, key, value, output, grad.contiguous(), lse, **ends, **places, softmax_scale=scale, causal=True
    )


def _tried(query: Tensor, key: Tensor) -> Any:
    """The module, if it is installed, supports these shapes and passes the trial."""
    if not _made_for(query) or importlib.util.find_spec(_INTERFACE.partition(".")[0]) is None:
        return None
    interface: Any = None
    try:
        interface = importlib.import_module(_INTERFACE)
        wrong = _wrong(interface, query, key)
    except ModuleNotFoundError as error:
        if error.name is not None and _INTERFACE.startswith(error.name):
            return None  # an older FlashAttention's package has the name
        wrong = first_line(error)
    except Exception as error:  # noqa: BLE001 - whatever a compiler of kernels may raise
        wrong = one_line(error)
    heads = f"{query.shape[1]} heads on {key.shape[1]} of {query.shape[2]}"
    if wrong:
        _log.warning("FlashAttention 4 is not used for %s (%s): attention takes torch's kernels", heads, wrong)
        return None
    _log.info("FlashAttention 4 computes attention of %s", heads)
    return interface


def _made_for(query: Tensor) -> bool:
    return (
        query.is_cuda and torch.cuda.get_device_capability(query.device)[0] in (9, 10) and query.shape[2] in _HEAD_DIMS
    )


def _wrong(interface: Any, query: Tensor, key: Tensor) -> str:
    """Run the trial; returns what is wrong, or an empty string. Inputs have the strides of real layers (heads
    first)."""
    scale = query.shape[2] ** -0.5
    layout = Ragged(None, _ends(_QUERIES, query), _ends(_KEYS, query), max(_QUERIES), max(_KEYS))
    generator = torch.Generator(query.device).manual_seed(0)

    def draw(like: Tensor, number: int) -> Tensor:
        shape = (like.shape[1], number, like.shape[2])
        return torch.randn(shape, generator=generator, device=like.device).to(like.dtype).transpose(0, 1)

    queries, grad = draw(query, sum(_QUERIES)), draw(query, sum(_QUERIES)).contiguous()
    keys, values = draw(key, sum(_KEYS)), draw(key, sum(_KEYS))
    output, lse = forward(interface, queries, keys, values, layout, scale)
    gradients = backward(interface, grad, queries, keys, values, output, lse, layout, scale)
    exact = (grad.float(), queries.float(), keys.float(), values.float())
    expected = reference(*exact, _QUERIES, _KEYS, scale)
    names = ("output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values")
    for name, ours, theirs in zip(names, (output, lse, *gradients), expected, strict=True):
        off = float((ours.float() - theirs).norm() / theirs.norm())
        if ours.shape != theirs.shape or not off <= _TOLERANCE:
            return f"its {name} is {off:.2g} of its norm off"
    return ""


def reference(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, ...]:
    """Reference attention in the inputs' dtype: output, log-sum-exp and gradients of queries, keys and values.
    `queries` and `keys`: lengths of the segments."""
    group = query.shape[1] // key.shape[1]
    parts: list[tuple[Tensor, ...]] = []
    lengths = list(zip(queries, keys, strict=True))
    split = zip(lengths, grad.split(queries), query.split(queries), key.split(keys), value.split(keys), strict=True)
    for (num_queries, num_keys), grad_QHD, query_QHD, key_JKD, value_JKD in split:
        key_JHD, value_JHD = (each.repeat_interleave(group, 1) for each in (key_JKD, value_JKD))
        hidden_QJ = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        scores_HQJ = torch.einsum("qhd,jhd->hqj", query_QHD, key_JHD) * scale
        scores_HQJ = scores_HQJ.masked_fill(hidden_QJ.triu(num_keys - num_queries + 1), -torch.inf)
        lse_HQ = scores_HQJ.logsumexp(-1)
        shares_HQJ = (scores_HQJ - lse_HQ[..., None]).exp()
        output_QHD = torch.einsum("hqj,jhd->qhd", shares_HQJ, value_JHD)
        of_shares_HQJ = torch.einsum("qhd,jhd->hqj", grad_QHD, value_JHD)
        inner_HQ1 = (grad_QHD * output_QHD).sum(-1).T[..., None]
        of_scores_HQJ = shares_HQJ * (of_shares_HQJ - inner_HQ1) * scale
        of_query = torch.einsum("hqj,jhd->qhd", of_scores_HQJ, key_JHD)
        of_key = torch.einsum("hqj,qhd->jhd", of_scores_HQJ, query_QHD).unflatten(1, (-1, group)).sum(2)
        of_value = torch.einsum("hqj,qhd->jhd", shares_HQJ, grad_QHD).unflatten(1, (-1, group)).sum(2)
        parts.append((output_QHD, lse_HQ.T, of_query, of_key, of_value))
    output, lse, *gradients = (torch.cat(each) for each in zip(*parts, strict=True))
    return output, lse.T, *gradients


def _ends(lengths: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(like.device)
