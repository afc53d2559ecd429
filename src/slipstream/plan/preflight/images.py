"""Whether a run can train on the images in its data, and facts on them."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config import PlannedConfig
from slipstream.config.traits import uses_engine
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import ConfigError
from slipstream.plan.summary import Note
from slipstream.records import Message


def check_images(
    config: PlannedConfig, tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]], *, on_cpu: bool
) -> list[Note]:
    """Notes on the images of the run's conversations and prompts. Raises ConfigError for settings excluded by images,
    and for those without an effect if there are none. `on_cpu`: an engine has no GPU."""
    images = {image.sha256: image for talk in conversations for message in talk for image in message.media}
    if not images:
        # An adapter to start from, or to evaluate, may be a tower's whatever the data.
        trains_tower = config.model.train_tower and (config.lora is None or config.lora.path is None)
        unused = {"train_tower = true": trains_tower, "max_pixels": config.model.max_pixels}
        for name, value in unused.items():
            if value:
                raise ConfigError(
                    f"model.{name} has no effect without an image in the data: remove it, or name the column of the "
                    "images `images`"
                )
        return []
    if config.teacher is not None:
        raise ConfigError(
            "[teacher] and images in the data: an engine does not score prompts with images: remove [teacher], or the "
            "images"
        )
    processor = tokenizer.images
    if processor.sees_itself:
        _check_blocks(config, on_cpu)
    tokens = [processor.num_tokens(image) for image in images.values()]
    bounds = f"scaled once, {processor.bounds}, by the model's processor"
    return [Note("images", len(images), "", f"{min(tokens)} to {max(tokens)} tokens each; {bounds}")]


def _check_blocks(config: PlannedConfig, on_cpu: bool) -> None:
    """For models with attention among all tokens of an image."""
    of_model = f"model.path = {config.model.path} has images whose tokens attend to later ones too"
    if not config.training.packing:
        raise ConfigError(f"{of_model}, and training.packing = false has a causal mask: set it to true")
    if on_cpu and uses_engine(config):
        raise ConfigError(
            f"{of_model}, which vLLM does not do on a CPU: use a GPU, or here SFT without [evaluation] of answers"
        )


def image_tokens(tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]]) -> list[list[tuple[str, int]]]:
    """Digests and tokens of the images, for each conversation or prompt with images."""
    found = [[image for message in talk for image in message.media] for talk in conversations]
    return [[(image.sha256, tokenizer.images.num_tokens(image)) for image in images] for images in found if images]
