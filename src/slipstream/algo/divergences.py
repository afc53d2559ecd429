"""Divergences between a student's and a teacher's distribution of the next token, over K outcomes.

Pure, and differentiable in the student's log-probabilities only. The K outcomes are the whole vocabulary, or the
teacher's k most likely tokens and the rest of the vocabulary as one more outcome (`with_tail`). With k = vocabulary the
rest has no mass, and the result is the divergence over the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divergence(student_logprobs_NK: Tensor, teacher_logprobs_NK: Tensor, beta: float = 0.0) -> Tensor:
    """The generalized Jensen-Shannon divergence of each token in nats, `[N]` (GKD, arXiv 2306.13649, equation 1).

    `beta` 0 is the forward KL divergence, KL(teacher || student), and 1 the reverse one. Between them it is
    `beta KL(teacher || m) + (1 - beta) KL(student || m)` with `m = beta teacher + (1 - beta) student`. Raises
    ValueError for a `beta` outside 0 to 1.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta {beta} is no divergence: use 0 (forward KL) to 1 (reverse KL)")
    student_NK, teacher_NK = _finite(student_logprobs_NK), _finite(teacher_logprobs_NK.detach())
    if beta == 0.0:
        return _kl(teacher_NK, student_NK)
    if beta == 1.0:
        return _kl(student_NK, teacher_NK)
    share = torch.tensor(beta, dtype=student_NK.dtype, device=student_NK.device)
    mixture_NK = torch.logaddexp(student_NK + torch.log1p(-share), teacher_NK + share.log())
    return beta * _kl(teacher_NK, mixture_NK) + (1.0 - beta) * _kl(student_NK, mixture_NK)


def _kl(first_NK: Tensor, second_NK: Tensor) -> Tensor:
    return (first_NK.exp() * (first_NK - second_NK)).sum(-1)


def _finite(logprobs_NK: Tensor) -> Tensor:
    """The smallest normal probability instead of 0, since 0 times infinity is not a number."""
    return logprobs_NK.clamp(min=_log_of_smallest(logprobs_NK.dtype))


def _log_of_smallest(dtype: torch.dtype) -> float:
    return torch.tensor(torch.finfo(dtype).tiny, dtype=torch.float64).log().item()


def tail_logprob(logprobs_NK: Tensor) -> Tensor:
    """The log-probability of all tokens but these K, `[N]`; their mass is at least a rounding error of 1."""
    # Rounding can lift a sum to 1 and above: no mass is left then, and no gradient.
    covered_N = logprobs_NK.logsumexp(-1).clamp(max=-torch.finfo(logprobs_NK.dtype).eps)
    return torch.log(-torch.expm1(covered_N))


def with_tail(logprobs_NK: Tensor) -> Tensor:
    """The K log-probabilities, and all other tokens as one more outcome, `[N, K + 1]`."""
    return torch.cat([logprobs_NK, tail_logprob(logprobs_NK)[:, None]], -1)


def top_divergence(student_logprobs_NK: Tensor, teacher_logprobs_NK: Tensor, beta: float = 0.0) -> Tensor:
    """`divergence` over K tokens and the rest of the vocabulary, `[N]`. Both have the same K tokens, with
    log-probabilities of the whole vocabulary's distribution."""
    return divergence(with_tail(student_logprobs_NK), with_tail(teacher_logprobs_NK.detach()), beta)
