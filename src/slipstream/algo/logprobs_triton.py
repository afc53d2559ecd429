"""Triton kernels of log-probabilities, entropies and most likely tokens: the forward pass reads the logits once, the
backward pass reads them once and writes the gradient once; float32 values exist in registers only.

The same formulas as `logprobs.py` without top-k, top-p and min-p. Imported only if there is a CUDA device; Triton
comes with torch there.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Nothing of Triton is typed, and on a machine without a GPU a type checker does not find it.
# ruff: noqa: ANN001
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _forward_kernel(
    logits,
    token_ids,
    logprobs,
    entropies,
    sums,
    greedy,
    kept,
    jump,
    num_tokens,
    temperature,
    block: tl.constexpr,
    keeps: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * jump
    # Per lane: the largest logit so far, its first index, and relative to it the sums of exp(x) and x exp(x).
    largest = tl.full((block,), -1e30, dtype=tl.float32)
    where = tl.zeros((block,), dtype=tl.int32)
    total = tl.zeros((block,), dtype=tl.float32)
    weighted = tl.zeros((block,), dtype=tl.float32)
    total_kept = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, num_tokens, block):
        place = start + tl.arange(0, block)
        raw = tl.load(line + place, mask=place < num_tokens, other=float("-inf")).to(tl.float32)
        x = raw / temperature
        where = tl.where(x > largest, place, where)
        raised = tl.maximum(largest, x)
        shrink = tl.exp(largest - raised)
        share = tl.exp(x - raised)
        total = total * shrink + share
        weighted = weighted * shrink + tl.where(share > 0.0, share * x, 0.0)
        if keeps:
            rounded = raw.to(kept.dtype.element_ty)
            tl.store(kept + row * num_tokens + place, rounded, mask=place < num_tokens)
            total_kept = total_kept * shrink + tl.exp(rounded.to(tl.float32) / temperature - raised)
        largest = raised
    top = tl.max(largest, 0)
    scale = tl.exp(largest - top)
    whole = tl.sum(total * scale, 0)
    lse = top + tl.log(whole)
    own = tl.load(line + tl.load(token_ids + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, own - lse)
    tl.store(entropies + row, lse - tl.sum(weighted * scale, 0) / whole)
    if keeps:
        lse = top + tl.log(tl.sum(total_kept * scale, 0))
    tl.store(sums + row, lse)
    tl.store(greedy + row, tl.min(tl.where(largest == top, where, num_tokens), 0).to(tl.int64))


@triton.jit
def _backward_kernel(
    logits,
    token_ids,
    sums,
    entropies,
    of_logprobs,
    of_entropies,
    result,
    jump,
    num_tokens,
    temperature,
    block: tl.constexpr,
    has_entropy: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * block
    place = start + tl.arange(0, block)
    present = place < num_tokens
    x = tl.load(logits + row * jump + place, mask=present, other=float("-inf")).to(tl.float32) / temperature
    lse = tl.load(sums + row)
    share = tl.exp(x - lse)
    of_logprob = tl.load(of_logprobs + row)
    is_own = place == tl.load(token_ids + row)
    # dlogp/dx = onehot - p
    gradient = tl.where(is_own, of_logprob, 0.0) - share * of_logprob
    if has_entropy:
        # dH/dx = -p (ln p + H)
        inner = tl.where(share > 0.0, x - lse + tl.load(entropies + row), 0.0)
        gradient -= tl.load(of_entropies + row) * share * inner
    gradient = gradient / temperature
    tl.store(result + row * num_tokens + place, gradient.to(result.dtype.element_ty), mask=present)


def forward(
    logits_NV: Tensor, token_ids_N: Tensor, temperature: float, kept_NV: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(logprobs_N, entropy_N, lse_N)` of `softmax(logits / temperature)`, float32, and the most likely tokens `[N]`,
    on ties the first. `kept_NV`, if given, gets the logits in its dtype, and `lse_N` is then of these values."""
    logits_NV = _in_lines(logits_NV)
    # Not parts of one tensor: a kernel is compiled for each alignment of its arguments.
    make = partial(torch.empty, len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    logprobs_N, entropy_N, lse_N = make(), make(), make()
    greedy_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)

    def run(results: tuple[Tensor, ...], kept: Tensor, *, keeps: bool) -> None:
        _forward_kernel[(len(logits_NV),)](
            *(logits_NV, token_ids_N, *results, kept),
            *(logits_NV.stride(0), logits_NV.shape[1], temperature, _BLOCK, keeps),
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )

    run((logprobs_N, entropy_N, lse_N, greedy_N), logits_NV, keeps=False)
    if kept_NV is not None:
        # In a pass of its own: a kernel with a store adds up in another order, and log-probabilities are to have
        # the same bits with a backward pass and without.
        others = torch.empty_like(logprobs_N), torch.empty_like(entropy_N)
        run((*others, lse_N, torch.empty_like(greedy_N)), kept_NV, keeps=True)
    return logprobs_N, entropy_N, lse_N, greedy_N


def backward(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    lse_N: Tensor,
    entropy_N: Tensor,
    grad_logprobs_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient of the logits, in their dtype, from the results of `forward` and their gradients."""
    logits_NV = _in_lines(logits_NV)
    result_NV = torch.empty(logits_NV.shape, dtype=logits_NV.dtype, device=logits_NV.device)
    of_logprobs_N = torch.zeros_like(lse_N) if grad_logprobs_N is None else grad_logprobs_N.contiguous()
    of_entropy_N = of_logprobs_N if grad_entropy_N is None else grad_entropy_N.contiguous()
    num_rows, num_tokens = logits_NV.shape
    _backward_kernel[(num_rows, -(-num_tokens // _BLOCK))](
        *(logits_NV, token_ids_N, lse_N, entropy_N, of_logprobs_N, of_entropy_N, result_NV),
        *(logits_NV.stride(0), num_tokens, temperature, _BLOCK, grad_entropy_N is not None),
        num_warps=_WARPS,
    )
    return result_NV


def _in_lines(logits_NV: Tensor) -> Tensor:
    return logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
