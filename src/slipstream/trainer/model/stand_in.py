"""A reduced network with one layer of each kind and a small vocabulary: torch reuses its compiled code when it
compiles the full network in the same process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.trainer.model.layers import decoder_layers
from slipstream.trainer.model.loading import DTYPES, hide_progress_bars
from slipstream.trainer.model.vision_towers import auto_class, reads_images, text_config

_VOCABULARY_SIZE = 512
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_stand_in(folder: Path, target: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
    """Write the reduced network of the model in `folder` to `target`, with random weights. Raises ConfigError for
    models with a vision tower, and for models with another number of decoder layers than `num_hidden_layers`."""
    from transformers import AutoConfig

    hide_progress_bars()
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text: Any = text_config(settings)
    if reads_images(settings) or text is not settings:
        raise ConfigError(f"{folder} has more than layers for text: it has no stand-in")
    with torch.device("meta"):
        whole = auto_class(settings).from_config(settings, trust_remote_code=trust_remote_code)
    types = getattr(text, "layer_types", None)
    kinds = [
        (type(layer), types and types[number], [(name, each.shape) for name, each in layer.named_parameters()])
        for number, layer in enumerate(decoder_layers(whole))
    ]
    if len(kinds) != text.num_hidden_layers:
        raise ConfigError(f"{folder} has other layers than its num_hidden_layers says: it has no stand-in")
    num_layers = 1 + max(kinds.index(kind) for kind in kinds)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(kinds):
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers, text.vocab_size = num_layers, min(_VOCABULARY_SIZE, text.vocab_size)
    for name in _TOKENS:
        setattr(text, name, None)
    network = auto_class(settings).from_config(settings, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    network.save_pretrained(target)
