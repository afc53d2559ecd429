"""Images whose tokens lie in a grid that follows their size: Qwen2-VL, Qwen2.5-VL, Qwen3-VL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.data.images.processor import ImageProcessor
from slipstream.errors import ConfigError
from slipstream.records import Media


class GridProcessor(ImageProcessor):
    """`max_pixels`: a lower bound on an image's size than the processor's own."""

    _arguments = ("pixel_values", "image_grid_thw")

    def __init__(self, processor: Any, config: Any, *, max_pixels: int | None) -> None:
        super().__init__(processor)
        self._factor: int = processor.patch_size * processor.merge_size
        self.token_id = self._expanded_id = config.image_token_id
        self.patches_per_token = int(processor.merge_size) ** 2
        self.pinned = self._pin(max_pixels)
        """What decides how an image is scaled: bounds of its pixels, and the sizes of patches and of their groups."""
        self.bounds = f"to {self.pinned['min_pixels']:,} to {self.pinned['max_pixels']:,} pixels"

    def _pin(self, max_pixels: int | None) -> dict[str, int]:
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
        """See `ImageProcessor`."""
        width, height = self.size_of(image)
        return 1, height // self._factor, width // self._factor

    def num_tokens(self, image: Media) -> int:
        """How many tokens the image is in the model."""
        frames, rows, columns = self.grid_of(image)
        return frames * rows * columns

    def _expanded(self, token_ids: Sequence[int], images: Sequence[Media]) -> list[int]:
        expanded: list[int] = []
        given = iter(images)
        for token in token_ids:
            expanded += [token] * (self.num_tokens(next(given)) if token == self.token_id else 1)
        return expanded

    def _collapsed(self, token_ids: Sequence[int], placed: Sequence[Media]) -> list[int]:
        collapsed: list[int] = []
        end = 0
        for image in placed:
            collapsed += [*token_ids[end : image.start], self.token_id]
            end = image.start + image.num_tokens
        return [*collapsed, *token_ids[end:]]
