"""Muon for matrices and AdamW for all other parameters, on fp32 master weights.

A matrix's update is its momentum, orthogonalized by five Newton-Schulz iterations in bfloat16 (Jordan 2024), times
0.2 sqrt(max(rows, columns)): AdamW's learning rates carry over (Liu et al. 2025, arXiv 2502.16982). AdamW
updates embeddings, the LM head, vectors, and all else without exactly two dimensions of at least 2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.optim import Muon

from slipstream.trainer.optim.base import MasterOptimizer, NamedParameters, RateOf, fused_adamw, one_rate


class MasterMuon(MasterOptimizer):
    """Muon with Nesterov momentum on fp32 master weights; `network` identifies embeddings and LM head."""

    def __init__(
        self,
        named_parameters: NamedParameters,
        network: nn.Module,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        rate_of: RateOf = one_rate,
    ) -> None:
        super().__init__(named_parameters, max_grad_norm, rate_of)
        vocabulary = _vocabulary_parameters(network)
        matrices = [
            name
            for name, live in self._parameters.items()
            if live.ndim == 2 and min(live.shape) > 1 and id(live) not in vocabulary
        ]
        muon = partial(Muon, momentum=momentum, nesterov=True, adjust_lr_fn="match_rms_adamw")
        self._add_rule(muon, "momentum_buffer", matrices, weight_decay)
        others = [name for name in self._parameters if name not in set(matrices)]
        self._add_rule(partial(fused_adamw, betas=betas), "exp_avg", others, weight_decay)


def _vocabulary_parameters(network: nn.Module) -> set[int]:
    """The ids of the parameters of embeddings and LM head."""
    known: Any = network
    head = known.get_output_embeddings() if hasattr(network, "get_output_embeddings") else None
    owners = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    owners += [head] if isinstance(head, nn.Module) else []
    return {id(parameter) for module in owners for parameter in module.parameters()}
