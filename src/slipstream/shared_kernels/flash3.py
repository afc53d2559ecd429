"""Attention by the engine's FlashAttention 3, which vLLM brings as a library, in the trainer too.

The library is loaded without vLLM, and its arguments are given by name, as its schema has them. The backward pass is
torch's FlashAttention 2, which takes the outputs and log-sum-exps of this one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import one_line
from slipstream.shared_kernels import CAPABILITY, FLASH3, CannotShareKernels

LEAST_QUERIES = 128
"""What kernels are told at least as the longest segment's number of queries: for fewer than 64 rows others are taken,
whose blocks of keys are larger, and rounding depends on these (seen with heads of 64)."""
_LENGTHS = (1, 70, 129, 300)
_TOLERANCE = 0.02
_NEEDED = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "num_splits"}
"""Arguments that decide what is computed, and in which order; others are None where this module does not name them."""
_state: dict[str, Any] = {}


def enable(num_heads: int, num_key_heads: int, head_size: int) -> None:
    """Use it from now on, in this process. Raises CannotShareKernels where it is not there, or a trial with heads like
    these finds that the last query's output depends on the others, or that it is wrong."""
    try:
        _state["operation"] = _load()
        problem = _problem(num_heads, num_key_heads, head_size)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        problem = one_line(error)
    if problem:
        _state.clear()
        raise CannotShareKernels(f"the trainer needs vLLM's FlashAttention 3: {problem}")


def enabled() -> bool:
    """Whether `enable` was called."""
    return "operation" in _state


def forward(
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """The output `[T, H, D]` of causal attention, aligned at the last query and key of each segment, and the
    log-sum-exp of the scores `[H, T]`. Raises CannotShareKernels where `check_window` does."""
    check_window(window, longest_key)
    given = {
        "q": query_THD, "k": key_SKD, "v": value_SKD, "cu_seqlens_q": query_ends, "cu_seqlens_k": key_ends,
        "max_seqlen_q": max(LEAST_QUERIES, longest_query), "max_seqlen_k": longest_key, "softmax_scale": scale,
        "is_causal": True, "causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "is_rotary_interleaved": True, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    operation = _state["operation"]
    output_THD, lse_HT, *_ = operation(*(given.get(each.name) for each in operation._schema.arguments))
    return output_THD, lse_HT


def check_window(window: int, longest_key: int) -> None:
    """Raise CannotShareKernels where a sliding window (0: none) leaves keys out. One that leaves none out is not given
    to the kernels: with one, a query's output depended on the queries beside it, for 300 keys and windows of 50 to
    200 (H200, vLLM 0.26, heads of 64, 128 and 256)."""
    if 0 < window < longest_key:
        raise CannotShareKernels(f"{longest_key} tokens of context are more than a sliding window of {window}")


def _load() -> Any:
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        raise ImportError("vLLM is not installed")
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob(FLASH3)):
            torch.ops.load_library(str(file))
            library: Any = torch.ops._vllm_fa3_C
            if missing := _NEEDED - {each.name for each in library.fwd.default._schema.arguments}:
                raise ImportError(f"its kernel has no {', '.join(sorted(missing))}")
            return library.fwd.default
    raise ImportError(f"this vLLM has no {FLASH3}")


def _problem(num_heads: int, num_key_heads: int, head_size: int) -> str:
    if torch.cuda.get_device_capability()[0] != CAPABILITY:
        return f"it is made for GPUs of compute capability {CAPABILITY}, and this one is {torch.cuda.get_device_name()}"
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (_LENGTHS[-1], heads, head_size)
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    query, key, value = draw(num_heads), draw(num_key_heads), draw(num_key_heads)
    scale = head_size**-0.5
    whole, _ = _attend(query, key, value, scale)
    heads = (each.float().transpose(0, 1) for each in (query, key, value))
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    expected = attend(*heads, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1)
    off = float((whole.float() - expected).norm() / expected.norm())
    if not off <= _TOLERANCE:
        return f"its output is {off:.2g} of its norm off"
    for length in _LENGTHS:
        alone, _ = _attend(query[length - 1 : length], key[:length], value[:length], scale)
        if not torch.equal(alone[-1], whole[length - 1]):
            return f"the output for {length} keys depends on the number of queries"
    return ""


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    queries, keys = (torch.tensor([0, len(each)], dtype=torch.int32, device="cuda") for each in (query, key))
    return forward(query, key, value, queries, keys, len(query), len(key), scale, 0)
