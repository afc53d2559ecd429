"""Router replay (R3, arXiv 2510.11370): routers send each token to the engine's experts.

The weights of these experts are the trainer's own: its router's softmax over all experts, taken at the given ones. So
the router gets its gradient. Without replay a token with close router logits goes to other experts in engine and
trainer, and rounding becomes a jump.

The choices pass through the decoder as a keyword argument, like the row's layout, down to each layer's attention. A
hook before it hands them to the layer's router. So a layer computed again in the backward pass gets the choices of its
own row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, TrainingError
from slipstream.trainer.experts.row_choices import RowExperts

KEYWORD = "engine_experts"
"""The decoder's keyword argument: `RowExperts.ids_TLK`."""
_ROUTERS = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Routers with a softmax over all experts before the choice of the best."""


class ExpertReplay:
    """The replaying routers of a network, and how often their own choices would have differed from the engine's."""

    def __init__(self, network: nn.Module) -> None:
        """Raises `ConfigError` for a network without routers of a known kind."""
        layers: list[Any] = list(_decoder(network).layers)
        self._num_layers = len(layers)
        self._routers: list[Any] = []
        for number, layer in enumerate(layers):
            router: Any = getattr(layer.mlp, "gate", None)
            if type(router).__name__ in _ROUTERS:
                self._routers.append(router)
                hand_over = _handing_over(router, number)
                layer.self_attn.register_forward_pre_hook(hand_over, with_kwargs=True)
                router.forward = self._replaying(router, router.forward)
        if not self._routers:
            raise ConfigError(
                f"{type(network).__name__} has no experts that can be replayed: set model.replay_experts = false"
            )
        self._counts: list[Tensor] = []

    def arguments(self, experts: RowExperts | None) -> dict[str, Tensor]:
        """The decoder's arguments for a row; sets its counts to 0. Raises `TrainingError` for choices of another
        model."""
        self._counts = []
        if experts is None:
            return {}
        found, first = tuple(experts.ids_TLK.shape[1:]), self._routers[0]
        if found != (self._num_layers, first.top_k) or experts.highest >= first.num_experts:
            raise TrainingError(
                f"the engine's choices are for {found[0]} layers of {found[1]} experts, ids up to {experts.highest}, "
                f"and the model has {self._num_layers} layers of {first.top_k} out of {first.num_experts}: engine and "
                "trainer must have the same model"
            )
        return {KEYWORD: experts.ids_TLK}

    def counted(self) -> dict[str, Tensor]:
        """Pairs of token and layer since `arguments`: with a choice of the engine's, and with another set of experts in
        the trainer. Call it before the backward pass: this may compute layers again."""
        counts = torch.stack(self._counts).sum(0) if self._counts else torch.zeros(2)
        differ, compared = counts.unbind()
        return {"experts_differ": differ, "experts_compared": compared}

    def _replaying(self, router: Any, own: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Any]:
        @torch.compiler.disable  # it counts, and its choices differ from row to row
        def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            given_TK, router.slipstream_given = router.slipstream_given, None
            logits_TE, weights_TK, own_TK = own(hidden_states)
            if given_TK is None:
                return logits_TE, weights_TK, own_TK
            is_given_T1 = given_TK[:, :1] >= 0
            ids_TK = torch.where(is_given_T1, given_TK.long(), own_TK)
            self._count(own_TK, ids_TK, is_given_T1)
            weights_TK = torch.softmax(logits_TE, -1, dtype=torch.float32).gather(-1, ids_TK)
            if router.norm_topk_prob:
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
            return logits_TE, weights_TK.to(logits_TE.dtype), ids_TK

        router.slipstream_given = None
        return forward

    @torch.no_grad()
    def _count(self, own_TK: Tensor, ids_TK: Tensor, is_given_T1: Tensor) -> None:
        is_other_T = (own_TK.sort(-1).values != ids_TK.sort(-1).values).any(-1)  # never for a choice of its own
        self._counts.append(torch.stack([is_other_T.sum(), is_given_T1.sum()]))


def share_that_differs(sums: dict[str, Tensor]) -> dict[str, float]:
    """The metric of a step's sums from `ExpertReplay.counted`; takes them out of `sums`. Empty without."""
    differ, compared = sums.pop("experts_differ", None), sums.pop("experts_compared", None)
    if differ is None or compared is None:
        return {}
    return {"mismatch/experts_differ": differ.item() / max(1.0, compared.item())}


def _decoder(network: nn.Module) -> Any:
    any_network: Any = network
    decoder = any_network.get_decoder()
    if not hasattr(decoder, "layers") or not all(hasattr(layer, "mlp") for layer in decoder.layers):
        raise ConfigError(f"{type(network).__name__} has no layers with an mlp: set model.replay_experts = false")
    return decoder


def _handing_over(router: Any, number: int) -> Callable[..., None]:
    def hand_over(_attention: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        ids_TLK = kwargs.get(KEYWORD)
        router.slipstream_given = None if ids_TLK is None else ids_TLK[:, number]

    disabled: Any = torch.compiler.disable(hand_over)
    return disabled
