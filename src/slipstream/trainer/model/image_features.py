"""Features of images by a model's vision tower, for the rows of a step.

Guarantees: the tower reads an image once, however many rows and completions have it. Features are kept while they fit
`MOST_BYTES`, the least recently used ones given up first. A trained tower's features are leaves of each row's graph;
`backward` passes their summed gradient through the tower once, at the end of the step. So memory holds the tower's
activations of a few images only. Features are valid until the tower changes (`clear`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.algo.balancing import runs
from slipstream.config.bounds import KEPT_FEATURES, TOWER_PATCHES
from slipstream.data.images.families import image_processor
from slipstream.data.images.processor import ImageProcessor
from slipstream.errors import TrainingError
from slipstream.records import Media
from slipstream.trainer.attention.row_images import RowImage

MOST_BYTES = KEPT_FEATURES
_MOST_PATCHES = TOWER_PATCHES


@dataclass
class Features:
    """An image's features: its placeholder tokens' embeddings, and the additions to the first layers' outputs there
    (DeepStack), each `[P, D]`."""

    parts: list[Tensor]
    media: Media

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return sum(part.nbytes for part in self.parts)


class ImageFeatures:
    """The vision tower of `network` and the image processor in `folder`. `trained`: the tower gets gradients."""

    def __init__(self, network: nn.Module, folder: Path, *, trained: bool, trust_remote_code: bool = False) -> None:
        self._network: Any = network
        self._folder = folder
        self._trained = trained
        self._trusted = trust_remote_code
        self._kept: OrderedDict[tuple[str, tuple[int, int, int]], Features] = OrderedDict()
        self.num_read = 0
        """Images read by the tower."""

    def frozen(self) -> ImageFeatures:
        """Separate features without gradients, of a tower with another computation (without its adapter); these
        themselves if the tower is not trained."""
        if not self._trained:
            return self
        return ImageFeatures(self._network, self._folder, trained=False, trust_remote_code=self._trusted)

    @cached_property
    def _processor(self) -> ImageProcessor:
        return image_processor(self._folder, self._trusted)

    def of(self, images: Sequence[RowImage]) -> list[Features]:
        """The features of a row's images, in their order."""
        missing = {_key(image.media): image.media for image in images if _key(image.media) not in self._kept}
        for chunk in self._chunks(missing.values()):
            with torch.no_grad():
                found = self._read(chunk)
            for media, features in zip(chunk, found, strict=True):
                leaves = [part.clone().requires_grad_(self._trained) for part in features.parts]
                self._kept[_key(media)] = Features(leaves, media)
        for image in images:
            self._kept.move_to_end(_key(image.media))
        found = [self._kept[_key(image.media)] for image in images]
        self._forget({_key(image.media) for image in images})
        return found

    def _forget(self, needed: set[tuple[str, tuple[int, int, int]]]) -> None:
        """Give up features beyond `MOST_BYTES`, but none with a gradient or among the `needed`."""
        size = sum(features.num_bytes for features in self._kept.values())
        for key in [key for key in self._kept if key not in needed]:
            if size <= MOST_BYTES:
                return
            if all(part.grad is None for part in self._kept[key].parts):
                size -= self._kept.pop(key).num_bytes

    def backward(self) -> None:
        """Pass the rows' gradients of the features through the tower."""
        if not self._trained:
            return
        used = [features.media for features in self._kept.values() if features.parts[0].grad is not None]
        for chunk in self._chunks(used):
            outputs: list[Tensor] = []
            gradients: list[Tensor] = []
            for media, features in zip(chunk, self._read(chunk), strict=True):
                for output, leaf in zip(features.parts, self._kept[_key(media)].parts, strict=True):
                    if leaf.grad is not None:
                        if output.requires_grad:  # an adapter may be of later parts only
                            outputs.append(output)
                            gradients.append(leaf.grad)
                        leaf.grad = None
            torch.autograd.backward(outputs, gradients)

    def clear(self) -> None:
        """The tower has changed, or may have: forget its features."""
        if self._trained:
            self._kept.clear()

    def _chunks(self, images: Iterable[Media]) -> Iterator[list[Media]]:
        """The images in groups for one call of the tower each."""
        most = _MOST_PATCHES // self._processor.patches_per_token
        return runs(images, lambda image: image.num_tokens, most)

    def _read(self, images: Sequence[Media]) -> list[Features]:
        device = next(self._network.parameters()).device
        pixels = {name: tensor.to(device) for name, tensor in self._processor.pixels(images).items()}
        output = self._network.base_model.get_image_features(**pixels, return_dict=True)
        self.num_read += len(images)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        layers = [_by_image(layer, images) for layer in layers]
        found = [Features([layer[place] for layer in layers], media) for place, media in enumerate(images)]
        for features in found:
            media = features.media
            if len(features.parts[0]) != media.num_tokens:
                raise TrainingError(
                    f"the tower gives {len(features.parts[0])} features for image {media.uri:.80}, and the prompt has "
                    f"{media.num_tokens} placeholder tokens for it: use the processor of the model's own folder"
                )
        return found


def _by_image(layer: Tensor | Sequence[Tensor], images: Sequence[Media]) -> Sequence[Tensor]:
    """Outputs of a tower's layer by image. Older versions of transformers return deepstack features of all images in
    one tensor `[P, D]`, and of images of one size as `[I, P, D]`."""
    if not isinstance(layer, Tensor):
        return layer
    return layer.unbind() if layer.ndim == 3 else layer.split([media.num_tokens for media in images])


def _key(media: Media) -> tuple[str, tuple[int, int, int]]:
    return media.sha256, media.grid


def uses_its_own_attention(network: nn.Module) -> None:
    """Have the vision tower attend as transformers does: packed attention is causal."""
    for module in network.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation") and "vision" in type(config).__name__.lower():
            config._attn_implementation = "sdpa"


@dataclass
class RowEmbeddings:
    """The decoder's inputs for a row."""

    embeds_TD: Tensor
    image_mask_T: Tensor | None = None
    deepstack_PD: Sequence[Tensor] = ()
    """Added to the outputs of the first layers at the row's P placeholder tokens."""

    def further(self) -> dict[str, Any]:
        """Arguments of the decoder beside the embeddings."""
        if not self.deepstack_PD or self.image_mask_T is None:
            return {}
        return {"visual_pos_masks": self.image_mask_T[None], "deepstack_visual_embeds": list(self.deepstack_PD)}


def image_places(images: Sequence[RowImage]) -> Tensor:
    """Row positions `[P]` of the images' placeholder tokens."""
    return torch.cat([torch.arange(image.start, image.start + image.media.num_tokens) for image in images])


def embed_images(embeds_TD: Tensor, index_P: Tensor, found: Sequence[Features]) -> RowEmbeddings:
    """The row's embeddings with the features `found` of its images at the row positions `index_P`."""
    layers_PD = [torch.cat(parts).to(embeds_TD.dtype) for parts in zip(*(each.parts for each in found), strict=True)]
    mask_T = torch.zeros(len(embeds_TD), dtype=torch.bool, device=embeds_TD.device)
    mask_T[index_P] = True
    return RowEmbeddings(embeds_TD.index_copy(0, index_P, layers_PD[0]), mask_T, layers_PD[1:])
