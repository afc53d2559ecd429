"""Checks, when a model is loaded, the isolation of sequences packed into one row: none may attend to another."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream import records
from slipstream.algo.logprobs import Logits
from slipstream.errors import ConfigError
from slipstream.trainer.attention.row_layout import SegmentLayout
from slipstream.trainer.model.vision_towers import text_config
from slipstream.trainer.packing import MicroBatch, StepBatch, micro_batches


class TriedModel(Protocol):
    """A `PolicyModel`, as this check and the one of float16 see it."""

    network: nn.Module
    packing: bool
    max_model_len: int | None

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        ...

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        ...

    def logits(self, row: MicroBatch) -> Logits:
        """Logits `[N, V]` of the row's trainable tokens."""
        ...


@torch.no_grad()
def check_isolation(model: TriedModel) -> None:
    """Change the first of two packed sequences and compare the second one's logits before and after.

    Three cases: two sequences with nothing in common; the same with the first at the end of the context; two with a
    shared prompt, and here logits must also equal the ones without sharing. Raises ConfigError if the logits change, or
    if the attention function never received the row's layout or its sliding window.
    """
    config = text_config(model.config)
    vocabulary, length, prompt = int(config.vocab_size), 9, 5
    mask = [place >= prompt for place in range(length)]
    tokens, others, third = ([(place + k) % vocabulary for place in range(length)] for k in (0, 1, vocabulary // 2))
    name = type(model.network).__name__

    def second(first: list[int], start: int = 0) -> tuple[Tensor, SegmentLayout]:
        batch = StepBatch([records.Sequence(first, mask), records.Sequence(tokens, mask)])
        (row,) = micro_batches(batch, 2 * length, device=model.device)
        place = row.sequences.index(1)
        if start:
            # Only its position ids move to the end of the context: nothing else could change others' rotary embeddings.
            row.position_ids_T.view(2, -1)[1 - place] += start
        logits = model.logits(row)
        assert isinstance(logits, Tensor)
        return logits.float().split(row.counts)[place], row.layout

    alone, layout = second(others)
    if not layout.windows_seen:
        raise ConfigError(f"{name} does not use its attention interface: set training.packing = false")
    shared, _ = second(tokens[:prompt] + others[prompt:])
    longest = min(filter(None, (model.max_model_len, getattr(config, "max_position_embeddings", None))), default=0)
    # Equal shapes give equal bits, unless work is regrouped by content (experts): hence a tolerance.
    tolerance = (1e-4 if model.dtype == torch.float32 else 3e-2) * alone.std()
    for before, after in (
        (alone, second(third)),
        (alone, second(others, max(0, longest - length))),
        (shared, second(tokens[:prompt] + third[prompt:])),
    ):
        if (before - after[0]).abs().max() > tolerance:
            raise ConfigError(f"packed sequences see one another in {name}: set training.packing = false")
    # Other shapes round otherwise, in bfloat16 visibly; a lost prefix or position changes everything.
    if (shared - alone).abs().max() > 10 * tolerance:
        raise ConfigError(f"{name} does not continue a shared prompt as its own: set training.packing = false")
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if window and sliding and layout.windows_seen == {0}:
        raise ConfigError(f"{name} does not tell its attention about the sliding window: set training.packing = false")
