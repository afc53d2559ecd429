"""From images to placeholder tokens and patches; no other module expands a placeholder or scales an image.

Guarantees: an image is scaled here, once, by the image processor of the model's folder, and the engine gets the scaled
one, which it then leaves as it is: trainer and engine see the same pixels and count the same tokens. The chat template
renders one placeholder for each image; `expand` makes it as many tokens as the image has in the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.data.images.reading import bytes_of, decoded, encoded
from slipstream.errors import ConfigError, DataError, one_line
from slipstream.records import Media

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose images can be trained on."""
_MOST_BYTES = 64 << 20
"""Of scaled images that are kept, since every request of a group sends the same one."""


class ImageProcessor:
    """The image processor and placeholder token of the model in `folder`. `max_pixels`: a lower bound on an image's
    size than the processor's own. Raises `ConfigError` for a model whose images cannot be trained on."""

    def __init__(self, folder: str | Path, trust_remote_code: bool = False, *, max_pixels: int | None = None) -> None:
        from transformers import AutoConfig, AutoImageProcessor

        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        _check_family(config, folder)
        try:
            # On CPUs, as everywhere: the backends scale differently, and torchvision need not be installed.
            loaded: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"model.path = {folder}: its image processor cannot be loaded ({one_line(error)}): add the model's "
                "preprocessor_config.json"
            ) from error
        self._processor = loaded
        self._factor: int = loaded.patch_size * loaded.merge_size
        self.token_id: int = config.image_token_id
        """The placeholder token."""
        self.pinned = self._bounds(max_pixels)
        """What decides how an image is scaled: bounds of its pixels, and the sizes of patches and of their groups."""
        self._scaled: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def _bounds(self, max_pixels: int | None) -> dict[str, int]:
        size, processor = self._processor.size, self._processor
        least, most = int(size["shortest_edge"]), int(size["longest_edge"])
        lowest = max(least, self._factor**2)
        if max_pixels is not None and not lowest <= max_pixels <= most:
            raise ConfigError(
                f"model.max_pixels = {max_pixels} is not between {lowest} and {most}, the bounds of the model's own "
                "processor, which the engine uses: choose one in between, or leave it out"
            )
        return {
            "min_pixels": least,
            "max_pixels": most if max_pixels is None else max_pixels,
            "patch_size": int(processor.patch_size),
            "merge_size": int(processor.merge_size),
        }

    def size_of(self, image: Media) -> tuple[int, int]:
        """Width and height that the image is scaled to: those of its grid, if it has one already."""
        if image.grid[0]:
            return image.grid[2] * self._factor, image.grid[1] * self._factor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        bounds = self.pinned["min_pixels"], self.pinned["max_pixels"]
        size, scaled = (0, 0), (image.height, image.width)
        while scaled != size:  # a narrow image is scaled again, and the engine would do that
            size, scaled = scaled, smart_resize(*scaled, self._factor, *bounds)
        height, width = size
        return width, height

    def grid_of(self, image: Media) -> tuple[int, int, int]:
        """Frames, rows and columns of an image's placeholder tokens."""
        width, height = self.size_of(image)
        return 1, height // self._factor, width // self._factor

    def expand(self, token_ids: Sequence[int], images: Sequence[Media]) -> list[int]:
        """The tokens with as many placeholders for each image as it has tokens. Raises `DataError` unless there is one
        placeholder for each."""
        if (found := token_ids.count(self.token_id)) != len(images):
            raise DataError(
                f"the chat template renders {found} image placeholders for {len(images)} images: use the template of a "
                "vision-language model, and keep its image token out of texts"
            )
        expanded: list[int] = []
        given = iter(images)
        for token in token_ids:
            if token == self.token_id:
                frames, rows, columns = self.grid_of(next(given))
                expanded += [token] * (frames * rows * columns)
            else:
                expanded.append(token)
        return expanded

    def place(self, token_ids: Sequence[int], images: Sequence[Media]) -> tuple[Media, ...]:
        """The images with their places in expanded tokens that begin with all of them."""
        placed: list[Media] = []
        end = 0
        for image in images:
            grid = self.grid_of(image)
            start, num_tokens = token_ids.index(self.token_id, end), grid[0] * grid[1] * grid[2]
            end = start + num_tokens
            placed.append(msgspec.structs.replace(image, start=start, num_tokens=num_tokens, grid=grid))
        return tuple(placed)

    def request(self, token_ids: Sequence[int], placed: Sequence[Media]) -> tuple[list[int], tuple[bytes, ...]]:
        """What the engine is asked for a prompt of these tokens: one placeholder for each image, and the images."""
        collapsed: list[int] = []
        end = 0
        for image in placed:
            collapsed += [*token_ids[end : image.start], self.token_id]
            end = image.start + image.num_tokens
        return [*collapsed, *token_ids[end:]], tuple(map(self.scaled, placed))

    def scaled(self, image: Media) -> bytes:
        """PNG bytes of the scaled image."""
        if (known := self._scaled.get(image.sha256)) is not None:
            self._scaled.move_to_end(image.sha256)
            return known
        made = self._scaled[image.sha256] = encoded(self._scale(image))
        self._num_bytes += len(made)
        while self._num_bytes > _MOST_BYTES and len(self._scaled) > 1:
            self._num_bytes -= len(self._scaled.popitem(last=False)[1])
        return made

    def _scale(self, image: Media) -> Image:
        picture = decoded(bytes_of(image), f"image {image.uri:.80}")
        size = self.size_of(image)
        return picture if picture.size == size else picture.resize(size, self._processor.resample)

    def patches(self, images: Sequence[Media]) -> tuple[Tensor, Tensor]:
        """`pixel_values` `[P, D]` and `image_grid_thw` `[I, 3]` of the images, as the model's tower takes them."""
        found = self._processor(images=[self._scale(image) for image in images], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]


def _check_family(config: Any, folder: str | Path) -> None:
    if getattr(config, "vision_config", None) is None:
        raise ConfigError(
            f"model.path = {folder} reads no images, and there are some in the data: use a vision-language model, or "
            "remove the images"
        )
    if config.model_type not in FAMILIES:
        why = ", whose tokens of an image attend to later ones too" if config.model_type.startswith("gemma3") else ""
        raise ConfigError(
            f"model.path = {folder} is of the type {config.model_type}{why}: images can be trained on with "
            f"{', '.join(FAMILIES)}, this model with text alone"
        )
