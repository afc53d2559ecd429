"""Fixes rotary frequencies to vLLM's values, if transformers recomputes them for every row.

`longrope` (short or long factors) and `dynamic` (NTK) depend on the highest position of the whole row: a sequence's
frequencies would depend on the other sequences of its row. vLLM chooses once. Under `longrope` it has the long factors
for sequences of every length if its `max_model_len` is above the original context, else the short ones. Under `dynamic`
it has the frequencies of `max_position_embeddings`, and none beyond. All other kinds (default, linear, llama3, yarn,
proportional, several dimensions of positions) depend on nothing but a token's own position, there and here.

Guarantees: after `fix_rotary` a position's rotation depends on no other position. A trial checks this; other models
are refused. Separate frequencies of layer types are fixed separately."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError

_FIXED = "fixed"
"""A `rope_type` without dynamic treatment in transformers."""


def fix_rotary(network: nn.Module, config: Any, max_model_len: int | None) -> None:
    """Set the rotary frequencies of `network`, with decoder configuration `config`, to vLLM's for this `max_model_len`;
    None: vLLM's default, the original context. Raises ConfigError if this is impossible."""
    name, found = type(network).__name__, False
    for module in network.modules():
        for layer, kind in _kinds_of(module):
            found = True
            parameters = _parameters(module.config, layer)
            if kind == "longrope":
                length = max_model_len or _original(config, parameters)
                _choose_factors(module, layer, length)
            else:
                length = _checked_length(name, config, parameters, max_model_len)
            _set_kind(module, layer)
            _try(name, module, layer, length, _vllm_scaling(config, parameters, length) if kind == "longrope" else None)
    if not found:
        _refuse_own_code(name, config, max_model_len)


def changing_kinds(parameters: Any) -> dict[str, Mapping[str, Any]]:
    """The entries of a configuration's `rope_parameters`, or of each layer type in it, by rope type: only those
    dependent on the row's length."""
    if not isinstance(parameters, Mapping):
        return {}
    kind = str(parameters.get("rope_type", parameters.get("type", "")))
    if kind:
        return {kind: parameters} if _changes(kind) else {}
    return {kind: each for part in parameters.values() for kind, each in changing_kinds(part).items()}


def _changes(kind: str) -> bool:
    """Whether transformers' `dynamic_rope_update` changes frequencies of this rope type."""
    return kind == "longrope" or "dynamic" in kind


def _kinds_of(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """(layer type, rope type) of a rotary embedding's dynamic frequencies; layer type None if there is only one."""
    own: Any = getattr(module, "rope_type", None)
    named = own if isinstance(own, dict) else {None: own}
    yield from [(layer, kind) for layer, kind in named.items() if isinstance(kind, str) and _changes(kind)]


def _parameters(config: Any, layer: str | None) -> Mapping[str, Any]:
    return config.rope_parameters if layer is None else config.rope_parameters[layer]


def _original(config: Any, parameters: Mapping[str, Any]) -> int:
    given = parameters.get("original_max_position_embeddings")
    return int(given or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)


def _choose_factors(module: Any, layer: str | None, length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute: Any = ROPE_INIT_FUNCTIONS["longrope"]
    prefix = "" if layer is None else f"{layer}_"
    device = getattr(module, f"{prefix}inv_freq").device
    frequencies, scaling = compute(module.config, device, seq_len=length, layer_type=layer)
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    if layer is None and hasattr(module, "rope_init_fn"):
        # PhiMoE calls it in every pass, and would get the short factors.
        module.rope_init_fn = lambda *_, **__: (module.inv_freq, scaling)


def _checked_length(name: str, config: Any, parameters: Mapping[str, Any], max_model_len: int | None) -> int:
    longest = int(config.max_position_embeddings)
    if parameters.get("max_trained_positions") is not None:
        raise ConfigError(
            f"{name} has rotary frequencies with max_trained_positions, which vLLM knows and transformers does not: "
            "remove it from the model's config.json, or use another model"
        )
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"inference.max_model_len = {max_model_len} is above {name}'s max_position_embeddings = {longest}, up to "
            "which vLLM has dynamic rotary frequencies: use at most that"
        )
    return max_model_len or longest


def _set_kind(module: Any, layer: str | None) -> None:
    module.rope_type = _FIXED if layer is None else {**module.rope_type, layer: _FIXED}


def _vllm_scaling(config: Any, parameters: Mapping[str, Any], length: int) -> float:
    """vLLM's attention scaling: the factor on cosines and sines."""
    original = _original(config, parameters)
    given = parameters.get("long_mscale" if length > original else "short_mscale")
    scale = config.max_position_embeddings / original
    computed = 1.0 if scale <= 1.0 else math.sqrt(1 + math.log(scale) / math.log(original))
    return computed if given is None else float(given)


@torch.no_grad()
def _try(name: str, module: nn.Module, layer: str | None, length: int, scaling: float | None) -> None:
    """Raise ConfigError if a far position changes the rotation of the first ones, or if their scale differs from
    `scaling`."""

    def turned(*positions: int) -> Tensor:
        own: dict[str, Any] = {} if layer is None else {"layer_type": layer}
        found = module(torch.zeros(1), torch.tensor([positions]), **own)
        return torch.stack([part[0, :2] for part in found]) if isinstance(found, tuple) else found[0, :2]

    near = turned(0, 1)
    if not torch.equal(near, turned(0, 1, length - 1)):
        raise ConfigError(
            f"{type(module).__name__} of {name} chooses its rotary frequencies by the longest sequence of a row: lower "
            "inference.max_model_len to the model's original context, or use another model"
        )
    # At position 0 the cosine is 1: the rest is the scale.
    if scaling is not None and not abs(near.abs().max().item() - scaling) <= 1e-6 * scaling:
        raise ConfigError(
            f"{name} scales its rotary embedding by {near.abs().max().item():.6g}, and vLLM by {scaling:.6g}, which "
            "goes by max_position_embeddings: make factor and attention_factor in the model's config.json agree with it"
        )


def _refuse_own_code(name: str, config: Any, max_model_len: int | None) -> None:
    """Raise ConfigError for custom-code models with dynamic frequencies, unless `max_model_len` is within the original
    context: there they are the same in every row."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for kind, parameters in changing_kinds(given).items():
        original = _original(config, parameters)
        if max_model_len is not None and max_model_len > original:
            raise ConfigError(
                f"{name} chooses its rotary frequencies ({kind}) by code that is not transformers': set "
                f"inference.max_model_len to at most {original}, or use a model that transformers knows"
            )
