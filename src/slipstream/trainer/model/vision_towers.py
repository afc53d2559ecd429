"""Vision-language models, trained on text: decoder and LM head are trained, vision towers stay frozen.

Guarantees: all parts outside of decoder and LM head are vision towers, under any name. Text-only
models have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, one_line


def reads_images(config: Any) -> bool:
    """Whether a model of this configuration has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def auto_class(config: Any) -> Any:
    """Transformers' auto class for models of this configuration, vision towers included."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def blank_network(path: str, *, trust_remote_code: bool = False) -> nn.Module:
    """The network of a folder's or hub id's configuration on the meta device: for names, shapes and sizes. Raises
    ConfigError if there is no usable configuration."""
    config = read_config(path, trust_remote_code)
    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise unusable(path, error) from error


def read_config(path: str, trust_remote_code: bool) -> Any:
    """The configuration of a folder or hub id. Raises ConfigError if there is no usable one."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise unusable(path, error) from error


def unusable(path: str, error: Exception) -> ConfigError:
    """The ConfigError for a model with a configuration refused by transformers."""
    reason = one_line(error)
    if "custom code" in reason:
        return ConfigError(
            f"model.path {path!r} brings its own Python code, which is run only if you trust it: read it, then set "
            "model.trust_remote_code = true (--trust-remote-code)"
        )
    return ConfigError(f"model.path {path!r} holds no usable configuration ({reason}): use another model")


def text_config(config: Any) -> Any:
    """The decoder's part of the configuration."""
    return config.get_text_config() if reads_images(config) else config


def text_parts(network: nn.Module) -> list[nn.Module]:
    """Decoder and LM head, or a whole text-only network."""
    known: Any = network
    if not reads_images(getattr(known, "config", None)):
        return [network]
    parts = (known.get_decoder(), known.get_output_embeddings())
    return [part for part in parts if isinstance(part, nn.Module)]


def frozen_parameters(network: nn.Module) -> Iterator[Tensor]:
    """The parameters of vision towers."""
    reached = {id(parameter) for part in text_parts(network) for parameter in part.parameters()}
    return (parameter for parameter in network.parameters() if id(parameter) not in reached)


def freeze_towers(network: nn.Module) -> None:
    """Freeze the vision towers."""
    for parameter in frozen_parameters(network):
        parameter.requires_grad_(False)


def tower_names(network: nn.Module) -> list[str]:
    """Names of the outermost modules with only vision-tower parameters."""
    return list(_names(network, {id(part) for part in text_parts(network)}, ""))


def names_in_towers(path: str, names: Iterable[str], *, trust_remote_code: bool = False) -> list[str]:
    """The module names inside a vision tower of the model in `path`; see `blank_network`."""
    names = list(names)
    # A text-only model is not built for this.
    if not names or not reads_images(read_config(path, trust_remote_code)):
        return []
    return in_modules(names, tower_names(blank_network(path, trust_remote_code=trust_remote_code)))


def in_modules(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The names of `modules` themselves or of modules below them."""
    heads = tuple(f"{module}." for module in modules)
    return [name for name in names if f"{name}.".startswith(heads)]


def _names(module: nn.Module, parts: set[int], prefix: str) -> Iterator[str]:
    for name, child in module.named_children() if id(module) not in parts else ():
        if parts.isdisjoint(map(id, child.modules())):
            if next(child.parameters(), None) is not None:
                yield prefix + name
        else:
            yield from _names(child, parts, f"{prefix}{name}.")
