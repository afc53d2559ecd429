"""Log-probabilities of tokens under the engine's sampling distribution.

Guarantees: the same rules in the same order as vLLM's sampler (temperature; min-p; then top-k and top-p over
logits sorted in ascending order), computed in float32 at least, differentiable, entropy included. Besides the
logits and their gradient nothing of size `[N, V]` is allocated: float32 copies exist in chunks of rows only, or without
filtering on a GPU, in registers only. Stateful logits processors (penalties, grammars) are not supported; the engine
refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    """As float32; float64 stays (the tests' references)."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def kept_tokens(scaled_NV: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Mask of the tokens open to sampling, bool `[N, V]`, from logits already divided by the temperature.

    min-p keeps probabilities of at least `min_p` times the largest; top-k keeps all ties with the k-th
    largest; top-p drops the smallest tokens while their cumulated probability is at most `1 - top_p`.
    """
    scaled_NV = scaled_NV.detach()
    kept_NV = torch.ones_like(scaled_NV, dtype=torch.bool)
    if min_p > 0.0:
        probs_NV = scaled_NV.softmax(-1)
        kept_NV = probs_NV >= probs_NV.amax(-1, keepdim=True) * min_p
        scaled_NV = scaled_NV.masked_fill(~kept_NV, -torch.inf)
    kth_N1: Tensor | None = None
    if 0 < top_k < scaled_NV.shape[-1]:
        kth_N1 = scaled_NV.topk(top_k, -1).values[:, -1:]
        kept_NV = kept_NV & (scaled_NV >= kth_N1)
    if top_p < 1.0:
        # Sorted before top-k is applied, as the engine does: the order decides among equal logits.
        sorted_NV, order_NV = scaled_NV.sort(-1)
        if kth_N1 is not None:
            sorted_NV = sorted_NV.masked_fill(sorted_NV < kth_N1, -torch.inf)
        # The engine holds top_p in float32: 1 - 0.9 there is not 0.1.
        bound = 1.0 - torch.tensor(top_p, dtype=torch.float32, device=scaled_NV.device)
        dropped_NV = sorted_NV.softmax(-1).cumsum(-1) <= bound
        dropped_NV[:, -1] = False
        kept_NV = kept_NV & ~torch.zeros_like(kept_NV).scatter(-1, order_NV, dropped_NV)
    return kept_NV


def processed_logits(
    logits_NV: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Logits over the temperature, -inf outside the kept set, `[N, V]`. `top_k` 0 is no limit."""
    return _restrict(logits_NV, None, temperature, top_k, top_p, min_p)


def token_statistics(logits_NV: Logits, token_ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`processed_logprobs` of the logits as they are, and the most likely tokens `[N]`; on a GPU in one pass."""
    logprobs_N, entropy_N, greedy_N = _statistics_of(logits_NV, token_ids_N, (1.0, 0, 1.0, 0.0))
    return logprobs_N, entropy_N, greedy_tokens(logits_NV) if greedy_N is None else greedy_N


def processed_logprobs(
    logits_NV: Logits,
    token_ids_N: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` under the sampling parameters, in nats, float32 at least; both differentiable.

    The token itself counts as kept, even if rounding put it just outside the kept set: its logprob is finite. Logits
    may be -inf; a token's own logit of -inf gives a logprob of -inf.
    """
    return _statistics_of(logits_NV, token_ids_N, (temperature, top_k, top_p, min_p))[:2]


def _statistics_of(logits_NV: Logits, token_ids_N: Tensor, rules: _Rules) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probability, entropy and most likely token of each row; None for the last if no kernel has found it."""
    if isinstance(logits_NV, PartLogits):
        *own, greedy_M = _statistics_of(logits_NV.logits_MV, token_ids_N[logits_NV.index_M], rules)
        logprobs_N, entropy_N = map(logits_NV.join, own)
        return logprobs_N, entropy_N, None if greedy_M is None else logits_NV.join(greedy_M)
    inputs, weight_VD = _inputs(logits_NV)
    if isinstance(logits_NV, HeadLogits) and logits_NV.has_kernel(rules):
        found = _RoundedHeadLogprobs.apply(inputs, weight_VD, token_ids_N, rules[0], torch.is_grad_enabled())
    elif weight_VD is None and _has_kernel(inputs, rules):
        found = _KernelLogprobs.apply(inputs, token_ids_N, rules[0])
    else:
        found = (*_TokenLogprobs.apply(inputs, weight_VD, token_ids_N, rules), None)  # pyright: ignore[reportGeneralTypeIssues]
    logprobs_N, entropy_N, greedy_N = found  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs_N, entropy_N, greedy_N


def _restrict(
    logits_NV: Tensor, token_ids_N: Tensor | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    if temperature <= 0.0:
        raise ValueError(f"temperature {temperature} has no log-probabilities: use a value above 0")
    if temperature != 1.0:
        logits_NV = _wide(logits_NV) / temperature
    if _keeps_all((temperature, top_k, top_p, min_p)):
        return logits_NV
    logits_NV = _wide(logits_NV)
    kept_NV = kept_tokens(logits_NV, top_k, top_p, min_p)
    if token_ids_N is not None:
        kept_NV = kept_NV.scatter(-1, token_ids_N[:, None], True)
    return logits_NV.masked_fill(~kept_NV, -torch.inf)


_CHUNK_ELEMENTS = 2**24
"""64 MiB in float32."""
_Rules = tuple[float, int, float, float]


def _keeps_all(rules: _Rules) -> bool:
    _, top_k, top_p, min_p = rules
    return top_k <= 0 and top_p >= 1.0 and min_p <= 0.0


def _has_kernel(logits_NV: Tensor, rules: _Rules) -> bool:
    """Whether the Triton kernel applies: on a GPU, without top-k, top-p and min-p."""
    return logits_NV.is_cuda and _keeps_all(rules) and logits_NV.dtype != torch.float64 and logits_NV.numel() > 0


def _chunks(num_rows: int, num_tokens: int) -> Iterator[slice]:
    """Slices of rows to compute together."""
    size = max(1, _CHUNK_ELEMENTS // max(1, num_tokens))
    for start in range(0, num_rows, size):
        yield slice(start, start + size)


@dataclass(frozen=True)
class HeadLogits:
    """Lazy logits: the LM head's inputs `[N, D]` and weight `[V, D]`. They are computed in chunks of rows, in float32
    at least: products of bfloat16 numbers are exact there."""

    hidden_ND: Tensor
    weight_VD: Tensor

    def has_kernel(self, rules: _Rules) -> bool:
        """Whether the Triton kernel applies, to products of 16-bit numbers with float32 outputs."""
        narrow = self.hidden_ND.dtype == self.weight_VD.dtype and self.hidden_ND.dtype in (
            torch.bfloat16,
            torch.float16,
        )
        return self.hidden_ND.is_cuda and narrow and _keeps_all(rules) and len(self.hidden_ND) > 0

    def rows(self, rows: slice, wide_weight_VD: Tensor) -> Tensor:
        """Compute the logits of `rows`; `wide_weight_VD` is `wide_weight()`."""
        hidden_ND = self.hidden_ND[rows]
        if wide_weight_VD.dtype == hidden_ND.dtype == torch.bfloat16:
            return torch.mm(hidden_ND, wide_weight_VD.t(), out_dtype=torch.float32)
        return _wide(hidden_ND) @ wide_weight_VD.t()

    def chunks(self) -> Iterator[slice]:
        """Slices of rows to compute together; larger on a GPU: each chunk there also reads and writes the weight's
        gradient."""
        num_tokens = len(self.weight_VD)
        return _chunks(len(self.hidden_ND), num_tokens // 8 if self.weight_VD.is_cuda else num_tokens)

    def wide_weight(self) -> Tensor:
        """The weight for `rows`: on a GPU as it is, because bfloat16 GEMMs can have float32 outputs there, as in
        vLLM; else in float32."""
        return self.weight_VD if self.weight_VD.is_cuda else _wide(self.weight_VD)


@dataclass(frozen=True)
class PartLogits:
    """The logits `[M, V]` of targets `index_M`; other processes have the rest."""

    logits_MV: Tensor | HeadLogits
    index_M: Tensor
    join: Callable[[Tensor], Tensor]
    """From the values `[M]` of these targets to all, `[N]`; differentiable."""


Logits = Tensor | HeadLogits | PartLogits
"""Logits of N targets: plain, lazy, or a part of them."""


def greedy_tokens(logits_NV: Logits) -> Tensor:
    """The most likely token of each row."""
    if isinstance(logits_NV, PartLogits):
        return logits_NV.join(greedy_tokens(logits_NV.logits_MV))
    if not isinstance(logits_NV, HeadLogits):
        return logits_NV.argmax(-1)
    with torch.no_grad():
        weight_VD = logits_NV.wide_weight()
        parts = [logits_NV.rows(rows, weight_VD).argmax(-1) for rows in logits_NV.chunks()]
    return torch.cat(parts) if parts else logits_NV.hidden_ND.new_zeros(0, dtype=torch.long)


def _statistics(logits_NV: Tensor, ids_N: Tensor, rules: _Rules) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log-sum-exp of each row."""
    wide_NV = _wide(_restrict(logits_NV, ids_N, *rules))
    lse_N = wide_NV.logsumexp(-1)
    logprobs_N = wide_NV.gather(-1, ids_N[:, None])[:, 0] - lse_N
    # entr(p) = -p ln p is 0 at p = 0; p times a logit of -inf would not be a number.
    return logprobs_N, torch.special.entr((wide_NV - lse_N[:, None]).exp_()).sum(-1), lse_N


def _part(values_N: Tensor | None, rows: slice) -> Tensor | None:
    return None if values_N is None else values_N[rows]


def _gradient(
    logits_NV: Tensor,
    ids_N: Tensor,
    lse_N: Tensor,
    entropy_N: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
    rules: _Rules,
) -> Tensor:
    """The gradient of these rows' logits, from the gradients of log-probabilities and entropies."""
    grad_logprobs_N, grad_entropy_N = grads
    probs_NV = (_wide(_restrict(logits_NV, ids_N, *rules)) - lse_N[:, None]).exp_()
    grad_NV: Tensor | None = None
    if grad_entropy_N is not None:
        # dH/dx = -p (ln p + H)
        pulled_NV = torch.special.entr(probs_NV).addcmul_(probs_NV, entropy_N[:, None], value=-1.0)
        grad_NV = pulled_NV.mul_(grad_entropy_N[:, None])
    if grad_logprobs_N is not None:
        # dlogp/dx = onehot - p
        pulled_NV = probs_NV.mul_(-grad_logprobs_N[:, None])
        pulled_NV.scatter_add_(-1, ids_N[:, None], grad_logprobs_N[:, None])
        grad_NV = pulled_NV if grad_NV is None else grad_NV.add_(pulled_NV)
    assert grad_NV is not None
    # Outside the kept set p is 0, and with it the gradient.
    return grad_NV.div_(rules[0]) if rules[0] != 1.0 else grad_NV


class _TokenLogprobs(torch.autograd.Function):
    """For the backward pass of plain logits, saves only these and two vectors, and recomputes the kept set. Plain
    autograd would save the log-softmax, the softmax and their product, each `[N, V]` in float32. Lazy logits, with
    a `weight_VD`, never exist in full: each chunk is computed in the forward and backward passes."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, inputs: Tensor, weight_VD: Tensor | None, token_ids_N: Tensor, rules: _Rules
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = inputs.new_empty(len(inputs), dtype=_wide_dtype(inputs))
        entropy_N, lse_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        chunks, logits_of = _chunked(inputs, weight_VD)
        for rows in chunks:
            logprobs_N[rows], entropy_N[rows], lse_N[rows] = _statistics(logits_of(rows), token_ids_N[rows], rules)
        ctx.save_for_backward(inputs, weight_VD, token_ids_N, lse_N, entropy_N)
        ctx.rules = rules
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        inputs, weight_VD, token_ids_N, lse_N, entropy_N = ctx.saved_tensors
        if grad_logprobs_N is None and grad_entropy_N is None:
            return None, None, None, None

        def gradient(logits_NV: Tensor, rows: slice) -> Tensor:
            grads = (_part(grad_logprobs_N, rows), _part(grad_entropy_N, rows))
            return _gradient(logits_NV, token_ids_N[rows], lse_N[rows], entropy_N[rows], grads, ctx.rules)

        return *_pulled_back(inputs, weight_VD, gradient, ctx.needs_input_grad), None, None


class _KernelLogprobs(torch.autograd.Function):
    """The same for plain logits on a GPU, by a Triton kernel; it also finds the most likely tokens."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logits_NV: Tensor, token_ids_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from slipstream.algo import logprobs_triton

        logprobs_N, entropy_N, lse_N, greedy_N = logprobs_triton.forward(logits_NV, token_ids_N, temperature)
        ctx.save_for_backward(logits_NV, token_ids_N, lse_N, entropy_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(greedy_N)
        return logprobs_N, entropy_N, greedy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None, _: None):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        from slipstream.algo import logprobs_triton

        if grad_logprobs_N is None and grad_entropy_N is None:
            return None, None, None
        logits_NV, token_ids_N, lse_N, entropy_N = ctx.saved_tensors
        saved = (logits_NV, token_ids_N, lse_N, entropy_N)
        return logprobs_triton.backward(*saved, grad_logprobs_N, grad_entropy_N, ctx.temperature), None, None


class _RoundedHeadLogprobs(torch.autograd.Function):
    """For lazy logits on a GPU. Log-probabilities are of float32 logits; these exist in chunks of rows only. For a
    backward pass the chunks are kept in 16 bits, like logits without a float32 head. Their log-sum-exp is of the kept
    values: probabilities add up to 1. Nothing is computed twice."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, token_ids_N: Tensor, temperature: float, is_trained: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        from slipstream.algo import logprobs_triton

        num_rows, num_tokens = len(hidden_ND), len(weight_VD)
        kept_NV = hidden_ND.new_empty((num_rows, num_tokens)) if is_trained else None
        parts: list[tuple[Tensor, ...]] = []
        for rows in _chunks(num_rows, num_tokens // 4):
            # Without a name, a chunk's memory is free before the next one is computed.
            found = logprobs_triton.forward(
                torch.mm(hidden_ND[rows], weight_VD.t(), out_dtype=torch.float32),
                *(token_ids_N[rows], temperature, _part(kept_NV, rows)),
            )
            parts.append(found)
        logprobs_N, entropy_N, lse_N, greedy_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(greedy_N)
        ctx.save_for_backward(hidden_ND, weight_VD, token_ids_N, lse_N, entropy_N, kept_NV)
        return logprobs_N, entropy_N, greedy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None, _: None):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        from slipstream.algo import logprobs_triton

        hidden_ND, weight_VD, token_ids_N, lse_N, entropy_N, kept_NV = ctx.saved_tensors
        if grad_logprobs_N is None and grad_entropy_N is None:
            return None, None, None, None, None
        saved = (kept_NV, token_ids_N, lse_N, entropy_N)
        grad_NV = logprobs_triton.backward(*saved, grad_logprobs_N, grad_entropy_N, ctx.temperature)
        grad_hidden_ND = grad_NV @ weight_VD if ctx.needs_input_grad[0] else None
        grad_weight_VD = grad_NV.t() @ hidden_ND if ctx.needs_input_grad[1] else None
        return grad_hidden_ND, grad_weight_VD, None, None, None


def _inputs(logits_NV: Tensor | HeadLogits) -> tuple[Tensor, Tensor | None]:
    """Plain logits, or a head's inputs and its weight."""
    return (logits_NV, None) if isinstance(logits_NV, Tensor) else (logits_NV.hidden_ND, logits_NV.weight_VD)


def _wide_dtype(inputs: Tensor) -> torch.dtype:
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32


def _chunked(inputs: Tensor, weight_VD: Tensor | None) -> tuple[Iterator[slice], Callable[[slice], Tensor]]:
    """Slices of rows, and a function from a slice to its logits: without a name, a chunk's memory is free before the
    next one is computed."""
    if weight_VD is None:
        return _chunks(*inputs.shape), inputs.__getitem__
    head = HeadLogits(inputs, weight_VD)
    return head.chunks(), partial(head.rows, wide_weight_VD=head.wide_weight())


def _pulled_back(
    inputs: Tensor, weight_VD: Tensor | None, gradient: Callable[[Tensor, slice], Tensor], needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The `needed` gradients: of plain logits, or of a head's inputs and weight. `gradient`: of a chunk of logits."""
    grad_inputs = torch.empty_like(inputs) if needed[0] else None
    if weight_VD is None:
        assert grad_inputs is not None
        for rows in _chunks(*inputs.shape):
            grad_inputs[rows] = gradient(inputs[rows], rows)
        return grad_inputs, None
    head = HeadLogits(inputs, weight_VD)
    wide_VD, grad_weight_VD = head.wide_weight(), None
    for rows in head.chunks():
        grad_NV = gradient(head.rows(rows, wide_VD), rows).to(wide_VD.dtype)
        if grad_inputs is not None:
            grad_inputs[rows] = (grad_NV @ wide_VD).to(inputs.dtype)
        if needed[1]:
            part_VD = _wide(grad_NV.t() @ inputs[rows].to(wide_VD.dtype))
            grad_weight_VD = part_VD if grad_weight_VD is None else grad_weight_VD.add_(part_VD)
    return grad_inputs, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)


def logprobs_at(logits_NV: Logits, token_ids_NK: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of K tokens in the place of each row's one, `[N, K]`, float32 at least; differentiable. The
    distribution is over the whole vocabulary."""
    if isinstance(logits_NV, PartLogits):
        return logits_NV.join(logprobs_at(logits_NV.logits_MV, token_ids_NK[logits_NV.index_M], temperature))
    return _LogprobsAt.apply(*_inputs(logits_NV), token_ids_NK, temperature)  # pyright: ignore[reportReturnType]


class _LogprobsAt(torch.autograd.Function):
    """Plain logits, without a `weight_VD`, or lazy ones; the log-sum-exp is kept for the backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, inputs: Tensor, weight_VD: Tensor | None, token_ids_NK: Tensor, temperature: float
    ) -> Tensor:
        logprobs_NK = inputs.new_empty(token_ids_NK.shape, dtype=_wide_dtype(inputs))
        lse_N = torch.empty_like(logprobs_NK[:, 0])
        chunks, logits_of = _chunked(inputs, weight_VD)
        for rows in chunks:
            wide_NV = _wide(logits_of(rows)) / temperature
            lse_N[rows] = wide_NV.logsumexp(-1)
            logprobs_NK[rows] = wide_NV.gather(-1, token_ids_NK[rows]) - lse_N[rows, None]
        ctx.temperature = temperature
        ctx.save_for_backward(inputs, weight_VD, token_ids_NK, lse_N)
        return logprobs_NK

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        inputs, weight_VD, token_ids_NK, lse_N = ctx.saved_tensors

        def gradient(logits_NV: Tensor, rows: slice) -> Tensor:
            probs_NV = (_wide(logits_NV) / ctx.temperature - lse_N[rows, None]).exp_()
            pulled_NV = probs_NV.mul_(-grad_NK[rows].sum(-1, keepdim=True))
            return pulled_NV.scatter_add_(-1, token_ids_NK[rows], grad_NK[rows]).div_(ctx.temperature)

        return *_pulled_back(inputs, weight_VD, gradient, ctx.needs_input_grad), None, None
