"""From images to placeholder tokens and pixels; no other package expands a placeholder or scales an image.

Guarantees: an image is scaled here, once, by the image processor of the model's folder, and the engine gets the scaled
one, which it then leaves as it is: trainer and engine see the same pixels and count the same tokens. The chat template
renders one placeholder for each image; `expand` makes it as many tokens as the image has in the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.data.images.reading import bytes_of, decoded, encoded
from slipstream.errors import DataError
from slipstream.records import Media

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

_MOST_BYTES = 64 << 20
"""Bytes of kept scaled images: every request of a group sends the same one."""


class ImageProcessor(ABC):
    """The image processor and the placeholder token of a model; `families.py` has one for each family."""

    token_id: int
    """The placeholder that the chat template renders."""
    _expanded_id: int
    """Its replacement, once for each token of the image."""
    patches_per_token: int
    sees_itself = False
    """Whether all tokens of an image attend to one another."""
    bounds: str
    """The sizes of scaled images, in words."""

    _arguments: tuple[str, ...] = ("pixel_values",)
    """Outputs of transformers' processor for the tower."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        """Transformers' own."""
        self._scaled: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    @abstractmethod
    def size_of(self, image: Media) -> tuple[int, int]:
        """Width and height that the image is scaled to."""

    @abstractmethod
    def num_tokens(self, image: Media) -> int:
        """How many tokens the image is in the model."""

    def expand(self, token_ids: Sequence[int], images: Sequence[Media]) -> list[int]:
        """The tokens with as many placeholders for each image as it has tokens. Raises `DataError` unless there is one
        placeholder for each."""
        if (found := token_ids.count(self.token_id)) != len(images):
            raise DataError(
                f"the chat template renders {found} image placeholders for {len(images)} images: use the template of a "
                "vision-language model, and keep its image token out of texts"
            )
        return self._expanded(token_ids, images)

    @abstractmethod
    def _expanded(self, token_ids: Sequence[int], images: Sequence[Media]) -> list[int]: ...

    def grid_of(self, image: Media) -> tuple[int, int, int]:
        """Frames, rows and columns of an image's placeholder tokens; zeros where positions do not follow them."""
        return 0, 0, 0

    def place(self, token_ids: Sequence[int], images: Sequence[Media]) -> tuple[Media, ...]:
        """The images with their places in expanded tokens that begin with all of them."""
        placed: list[Media] = []
        end = 0
        for image in images:
            start, num_tokens = token_ids.index(self._expanded_id, end), self.num_tokens(image)
            end = start + num_tokens
            facts: dict[str, Any] = {"grid": self.grid_of(image), "sees_itself": self.sees_itself}
            placed.append(msgspec.structs.replace(image, start=start, num_tokens=num_tokens, **facts))
        return tuple(placed)

    def request(self, token_ids: Sequence[int], placed: Sequence[Media]) -> tuple[list[int], tuple[bytes, ...]]:
        """The engine's prompt for these tokens, with one placeholder for each image, and the images."""
        return self._collapsed(token_ids, placed), tuple(map(self.scaled, placed))

    @abstractmethod
    def _collapsed(self, token_ids: Sequence[int], placed: Sequence[Media]) -> list[int]: ...

    def scaled(self, image: Media) -> bytes:
        """PNG bytes of the scaled image."""
        if (known := self._scaled.get(image.sha256)) is not None:
            self._scaled.move_to_end(image.sha256)
            return known
        made = self._scaled[image.sha256] = self.scaled_now(image)
        self._num_bytes += len(made)
        while self._num_bytes > _MOST_BYTES and len(self._scaled) > 1:
            self._num_bytes -= len(self._scaled.popitem(last=False)[1])
        return made

    def scaled_now(self, image: Media) -> bytes:
        """As `scaled`, without the cache: for any thread."""
        return encoded(self._scale(image))

    def _scale(self, image: Media) -> Image:
        picture = decoded(bytes_of(image), f"image {image.uri:.80}")
        size = self.size_of(image)
        return picture if picture.size == size else picture.resize(size, self._processor.resample)

    def pixels(self, images: Sequence[Media]) -> dict[str, Tensor]:
        """The images as the model's `get_image_features` takes them."""
        found = self._processor(images=[self._scale(image) for image in images], return_tensors="pt")
        return {name: found[name] for name in self._arguments}
