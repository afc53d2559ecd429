"""Losses of preferences: pairs (DPO), single judgements (KTO), and rewards of pairs (Bradley-Terry).

Pure, and differentiable. A completion enters by one number: the sum of its tokens' log-ratios `log policy - log
reference`, or its reward. Chosen and rejected completions of pair p have index p. Nothing is averaged: the objective
divides by the pairs or completions of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected))` of each pair (DPO, arXiv 2305.18290, equation 7)."""
    return -logsigmoid(beta * (chosen_P - rejected_P))


def ipo_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> Tensor:
    """`(chosen - rejected - 1 / (2 beta))**2` (IPO, arXiv 2310.12036, equation 17). Log-ratios are means over the
    completion's tokens, as the authors compute them."""
    return (chosen_P - rejected_P - 1.0 / (2.0 * beta)).square()


def hinge_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> Tensor:
    """`max(0, 1 - beta (chosen - rejected))` (RSO, arXiv 2309.06657; the margin of SLiC-HF)."""
    return torch.relu(1.0 - beta * (chosen_P - rejected_P))


PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "sigmoid": dpo_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
}


def kto_baseline(log_ratios_S: Tensor) -> Tensor:
    """The reference point z0, a scalar without a gradient: `max(0, mean)` of the log-ratios of other prompts'
    completions, an estimate of KL(policy || reference) (KTO, arXiv 2402.01306, section 4.1)."""
    return log_ratios_S.detach().mean().clamp(min=0.0)


def kto_loss(
    log_ratios_S: Tensor,
    is_desirable_S: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """`weight (1 - sigmoid(+-beta (log_ratio - z0)))` of each completion, plus for desirable ones (KTO, equation 8).
    `is_desirable_S`: bool."""
    signs_S = torch.where(is_desirable_S, 1.0, -1.0).to(log_ratios_S.dtype)
    weights_S = torch.where(is_desirable_S, desirable_weight, undesirable_weight).to(log_ratios_S.dtype)
    return weights_S * (1.0 - torch.sigmoid(beta * signs_S * (log_ratios_S - baseline)))


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor | None = None, centering: float = 0.0
) -> Tensor:
    """`-log sigmoid(chosen - rejected - margin)` of each pair's rewards (InstructGPT, arXiv 2203.02155, equation 1;
    margins: Llama 2, arXiv 2307.09288, equation 2), plus `centering (chosen + rejected)**2`, to hold rewards near 0
    (arXiv 2312.09244)."""
    margins_P = torch.zeros_like(chosen_P) if margins_P is None else margins_P
    return -logsigmoid(chosen_P - rejected_P - margins_P) + centering * (chosen_P + rejected_P).square()


def derivatives(loss: Tensor, values: Tensor) -> Tensor:
    """The derivative of a scalar `loss` in `values`, its inputs.

    A completion's log-ratio is a sum over its tokens, so that all of them share one derivative. The sum of `derivative
    * logprob` over all tokens has the gradient of the loss, however the tokens are packed.
    """
    return torch.autograd.grad(loss, values)[0].detach()
