"""Images that are all scaled to one square and have equally many tokens: Gemma 3.

Around the tokens of an image stand two others and empty lines. Newlines are tokens of one to four of them, and those of
the text are joined with those of the image: as Gemma's tokenizer does with the whole text, and vLLM with tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.data.images.processor import ImageProcessor
from slipstream.errors import ConfigError, DataError
from slipstream.records import Media


class SquareProcessor(ImageProcessor):
    """The tokenizer in `folder` has the newlines' tokens."""

    sees_itself = True

    def __init__(self, processor: Any, config: Any, folder: Path, *, max_pixels: int | None) -> None:
        super().__init__(processor)
        self._side, self._num_tokens = int(config.vision_config.image_size), int(config.mm_tokens_per_image)
        self.token_id: int = config.boi_token_id
        self._expanded_id, self._end_id = int(config.image_token_id), int(config.eoi_token_id)
        self.patches_per_token = (self._side // config.vision_config.patch_size) ** 2 // self._num_tokens
        self.bounds = f"to {self._side} x {self._side} pixels"
        self._folder = folder
        self._check(config.get_text_config(), folder, max_pixels)

    def _check(self, text: Any, folder: Path, max_pixels: int | None) -> None:
        sides = int(self._processor.size["height"]), int(self._processor.size["width"])
        if sides != (self._side, self._side):
            raise ConfigError(
                f"model.path = {folder}: its image processor scales to {sides[1]} x {sides[0]} pixels, and its tower "
                f"reads {self._side} x {self._side}: correct its preprocessor_config.json"
            )
        if getattr(self._processor, "do_pan_and_scan", False):
            raise ConfigError(
                f"model.path = {folder}: its image processor cuts images into several (do_pan_and_scan), which is not "
                "trained on: set it to false in its preprocessor_config.json"
            )
        if max_pixels is not None:
            raise ConfigError(
                f"model.max_pixels = {max_pixels} has no effect: this model scales every image {self.bounds}; remove it"
            )
        window = getattr(text, "sliding_window", None) or self._num_tokens
        if window < self._num_tokens:
            raise ConfigError(
                f"model.path = {folder}: an image has {self._num_tokens} tokens and its sliding window {window}, where "
                "transformers and vLLM differ in what its tokens see: use a wider window"
            )

    def size_of(self, image: Media) -> tuple[int, int]:
        """Width and height of the square."""
        return self._side, self._side

    def num_tokens(self, image: Media) -> int:
        """As many as any other image has."""
        return self._num_tokens

    def _expanded(self, token_ids: Sequence[int], images: Sequence[Media]) -> list[int]:
        if self._expanded_id in token_ids:
            raise DataError(
                "a text has the token that stands for a part of an image in the model: keep the names of its special "
                "tokens out of texts"
            )
        two = self._newlines[1]
        whole = [two, self.token_id, *[self._expanded_id] * self._num_tokens, self._end_id, two]
        parts = [whole if token == self.token_id else [token] for token in token_ids]
        return self._joined(list(itertools.chain.from_iterable(parts)))

    @cached_property
    def _newlines(self) -> list[int]:
        """The tokens of one to four newlines."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        found: list[int] = []
        for number in range(1, 5):
            token = tokenizer.token_to_id("\n" * number)
            if token is None:
                raise ConfigError(
                    f"model.path = {self._folder}: its tokenizer has no token of {number} newlines, which vLLM needs "
                    "around images: use the model's own tokenizer.json"
                )
            found.append(token)
        return found

    def _joined(self, token_ids: list[int]) -> list[int]:
        one, two, three, four = self._newlines
        for pair, together in (((one, two), three), ((two, one), three), ((two, two), four)):
            token_ids = _replaced(token_ids, pair, together)
        return token_ids

    def _collapsed(self, token_ids: Sequence[int], placed: Sequence[Media]) -> list[int]:
        collapsed: list[int] = []
        end = 0
        for number, image in enumerate(placed):
            # Around it: the token before an image's and the one after them.
            collapsed += self._alone(token_ids[end : image.start - 1], after=number > 0, before=True)
            collapsed.append(self.token_id)
            end = image.start + image.num_tokens + 1
        return collapsed + self._alone(token_ids[end:], after=bool(placed), before=False)

    def _alone(self, between: Sequence[int], *, after: bool, before: bool) -> list[int]:
        """What of the tokens `between` images is text. `after` an image, `before` an image: with its empty line."""
        one, two, three, four = self._newlines
        text_of = {two: [], three: [one], four: [two]}
        text = list(between)
        if after:
            text = [*text_of.get(text[0], text[:1]), *text[1:]] if text else text
        if before:
            text = [*text[:-1], *text_of.get(text[-1], text[-1:])] if text else text
        if self._joined([*[two] * after, *text, *[two] * before]) != list(between):
            raise DataError(
                f"tokens {list(between)[:3]} to {list(between)[-3:]} around an image are not what its empty lines make "
                "of a text: render the conversation with the model's chat template"
            )
        return text


def _replaced(token_ids: list[int], pair: tuple[int, int], together: int) -> list[int]:
    """Every `pair` as the token `together`, from the left."""
    replaced: list[int] = []
    place = 0
    while place < len(token_ids):
        is_pair = tuple(token_ids[place : place + 2]) == pair
        replaced.append(together if is_pair else token_ids[place])
        place += 1 + is_pair
    return replaced
