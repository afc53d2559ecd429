"""Which models' images can be trained on, and each one's image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.data.images.grids import GridProcessor
from slipstream.data.images.processor import ImageProcessor
from slipstream.data.images.squares import SquareProcessor
from slipstream.errors import ConfigError, one_line

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Model types whose images can be trained on."""
SEE_THEMSELVES = ("gemma3",)
"""Those in which all tokens of an image attend to one another."""


def image_processor(
    folder: str | Path, trust_remote_code: bool = False, *, max_pixels: int | None = None
) -> ImageProcessor:
    """The image processor of the model in `folder`. `max_pixels`: a lower bound on an image's size than the processor's
    own. Raises `ConfigError` for a model whose images cannot be trained on."""
    from transformers import AutoConfig, AutoImageProcessor

    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if getattr(config, "vision_config", None) is None:
        raise ConfigError(
            f"model.path = {folder} reads no images, and there are some in the data: use a vision-language model, or "
            "remove the images"
        )
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model.path = {folder} is of the type {config.model_type}: images can be trained on with "
            f"{', '.join(FAMILIES)}, this model with text alone"
        )
    try:
        # On CPUs, as everywhere: the backends scale differently, and torchvision need not be installed.
        loaded: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model.path = {folder}: its image processor cannot be loaded ({one_line(error)}): add the model's "
            "preprocessor_config.json"
        ) from error
    if config.model_type in SEE_THEMSELVES:
        return SquareProcessor(loaded, config, Path(folder), max_pixels=max_pixels)
    return GridProcessor(loaded, config, max_pixels=max_pixels)
