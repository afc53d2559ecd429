"""Models that read images, as far as text goes: what of them text reaches is trained, their towers stay as they are.

Guarantees: nothing here looks at names; a tower is what is neither the decoder nor its output head. A model of text
alone has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, one_line


def reads_images(config: Any) -> bool:
    """Whether a model of this configuration has an image tower."""
    return getattr(config, "vision_config", None) is not None


def auto_class(config: Any) -> Any:
    """Transformers' class for models of this configuration, with their towers."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def blank_network(path: str, *, trust_remote_code: bool = False) -> nn.Module:
    """The network of a folder's or hub id's configuration, without any memory: for names, shapes and sizes. Raises
    ConfigError when there is none."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise unusable(path, error) from error


def unusable(path: str, error: Exception) -> ConfigError:
    """What is said of a model folder whose configuration transformers refuses."""
    reason = one_line(error)
    if "custom code" in reason:
        return ConfigError(
            f"model.path {path!r} brings its own Python code, which is run only if you trust it: read it, then set "
            "model.trust_remote_code = true (--trust-remote-code)"
        )
    return ConfigError(f"model.path {path!r} holds no usable configuration ({reason}): use another model")


def text_config(config: Any) -> Any:
    """The part of the configuration that is the decoder's."""
    return config.get_text_config() if reads_images(config) else config


def text_parts(network: nn.Module) -> list[nn.Module]:
    """What text goes through: decoder and output head, or all of a network of text alone."""
    known: Any = network
    if not reads_images(getattr(known, "config", None)):
        return [network]
    parts = (known.get_decoder(), known.get_output_embeddings())
    return [part for part in parts if isinstance(part, nn.Module)]


def frozen_parameters(network: nn.Module) -> Iterator[Tensor]:
    """The parameters that text does not reach."""
    reached = {id(parameter) for part in text_parts(network) for parameter in part.parameters()}
    return (parameter for parameter in network.parameters() if id(parameter) not in reached)


def freeze_towers(network: nn.Module) -> None:
    """Leave out of training what text does not reach."""
    for parameter in frozen_parameters(network):
        parameter.requires_grad_(False)


def tower_names(network: nn.Module) -> list[str]:
    """The outermost modules with parameters that text does not reach."""
    return list(_names(network, {id(part) for part in text_parts(network)}, ""))


def _names(module: nn.Module, parts: set[int], prefix: str) -> Iterator[str]:
    for name, child in module.named_children() if id(module) not in parts else ():
        if parts.isdisjoint(map(id, child.modules())):
            if next(child.parameters(), None) is not None:
                yield prefix + name
        else:
            yield from _names(child, parts, f"{prefix}{name}.")
