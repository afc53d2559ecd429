"""The images of a packed row: positions of their placeholder tokens, and the rotary positions from these.

Positions are mRoPE's (Qwen2-VL, arXiv 2409.12191): frame, row and column of each token. A text token has the same
number in all three. The tokens of an image begin at the next free number p: frame f, row r and column c have p + f,
p + r and p + c. The text after it goes on at p plus the larger of its rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream import records
from slipstream.errors import TrainingError

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's tokens."""


@dataclass(frozen=True)
class RowImage:
    """An image in a row: its placeholder tokens begin at row position `start`."""

    media: records.Media
    start: int


class RowImages:
    """Collects the images of a row and, if there are any, the rotary positions of its segments."""

    def __init__(self) -> None:
        self.found: list[RowImage] = []
        self._segments: list[tuple[records.Sequence, int, int]] = []

    def add(self, sequence: records.Sequence, start: int, end: int, origin: int) -> None:
        """Tokens `start` to `end` of a sequence, from row position `origin` on."""
        self._segments.append((sequence, start, end))
        for media in sequence.media:
            first, last = media.start, media.start + media.num_tokens
            if start <= first and last <= end:
                self.found.append(RowImage(media, origin + first - start))
            elif first < end and start < last:
                raise TrainingError(
                    f"image {media.sha256[:12]} of tokens {first} to {last} is cut by tokens {start} to {end} of its "
                    "sequence: mask its placeholders out of the loss"
                )

    def blocks(self) -> list[tuple[int, int]]:
        """Row positions, first and past the last, of each image with mutual attention of all its tokens."""
        found = [(image.start, image.media.num_tokens) for image in self.found if image.media.sees_itself]
        return [(start, start + num_tokens) for start, num_tokens in found]

    def rotary_ids(self) -> Tensor | None:
        """`[3, T]`; None without images with a grid."""
        if not any(image.media.num_tokens and image.media.grid[0] for image in self.found):
            return None
        parts = [
            image_positions(end, [(image.start, image.grid) for image in sequence.media])[:, start:]
            for sequence, start, end in self._segments
        ]
        return torch.cat(parts, 1)


def image_positions(length: int, images: Iterable[tuple[int, Grid]]) -> Tensor:
    """Positions `[3, length]` of a sequence with images, each by its first token and its grid, in their order; images
    beyond `length` are left out."""
    parts: list[Tensor] = []
    end = following = 0
    for start, grid in images:
        if start >= length:
            break
        parts.append(_text(start - end, following))
        following += start - end
        frames, rows, columns = (torch.arange(size) for size in grid)
        own = torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij")).flatten(1)
        parts.append(own + following)
        end, following = start + own.shape[1], following + max(grid[1], grid[2])
    parts.append(_text(max(0, length - end), following))
    return torch.cat(parts, 1)[:, :length]


def _text(length: int, first: int) -> Tensor:
    return torch.arange(first, first + length).expand(3, -1)
