"""A trial of a model in float16: activations of some models are above its largest number, 65,504.

Such a model computes NaN from some token on; the check names the first module with such an output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream import records
from slipstream.errors import ConfigError
from slipstream.trainer.model.packing_check import TriedModel
from slipstream.trainer.model.vision_towers import text_config
from slipstream.trainer.packing import StepBatch, micro_batches

_LENGTH = 128
"""Tokens of a trial's sequence; the first one of a sequence often has the largest activations."""


@torch.no_grad()
def check_float16(model: TriedModel) -> None:
    """Compute tokens from all over the vocabulary. Raises ConfigError if some output is not finite."""
    vocabulary, found = int(text_config(model.config).vocab_size), list[str]()

    def watch(name: str) -> Any:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(first, Tensor) and not bool(torch.isfinite(first).all()):
                found.append(name)

        return look

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in model.network.named_modules()
        if not any(True for _ in module.children())
    ]
    tokens = [(place * max(1, vocabulary // _LENGTH)) % vocabulary for place in range(_LENGTH)]
    sequence = records.Sequence(tokens, [False] + [True] * (_LENGTH - 1))
    try:
        for row in micro_batches(StepBatch([sequence]), _LENGTH, packing=model.packing, device=model.device):
            model.logits(row)
    finally:
        for hook in hooks:
            hook.remove()
    if found:
        raise ConfigError(
            f"{type(model.network).__name__} computes values in {found[0]} that float16 cannot hold (above 65,504): "
            'set model.dtype = "bfloat16"'
        )
