"""Tries, before anything is trained, whether sequences that share a row see one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream import records
from slipstream.errors import ConfigError
from slipstream.trainer.attention.row_layout import SegmentLayout
from slipstream.trainer.batching import StepBatch, micro_batches
from slipstream.trainer.model.vision_towers import text_config

if TYPE_CHECKING:
    from slipstream.trainer.model.policy import PolicyModel


@torch.no_grad()
def check_isolation(model: PolicyModel) -> None:
    """Change the first of two packed sequences and look whether the second one's logits move: of two sequences
    that share nothing, of which the first may also be at the end of the context, and of two that share their prompt,
    which must also give the same logits.

    Raises ConfigError if they move, or if the attention never saw the layout or its sliding window.
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
            # As if it were so long: what its positions are is all that others may see of them.
            row.position_ids_T.view(2, -1)[1 - place] += start
        logits = model.logits(row)
        assert isinstance(logits, Tensor)
        return logits.float().split(row.counts)[place], row.layout

    alone, layout = second(others)
    if not layout.windows_seen:
        raise ConfigError(f"{name} does not use its attention interface: set training.packing = false")
    shared, _ = second(tokens[:prompt] + others[prompt:])
    longest = min(filter(None, (model.max_model_len, getattr(config, "max_position_embeddings", None))), default=0)
    # Equal shapes give equal bits, except where work is regrouped by content (experts): hence a tolerance.
    tolerance = (1e-4 if model.dtype == torch.float32 else 3e-2) * alone.std()
    for before, after in (
        (alone, second(third)),
        (alone, second(others, max(0, longest - length))),
        (shared, second(tokens[:prompt] + third[prompt:])),
    ):
        if (before - after[0]).abs().max() > tolerance:
            raise ConfigError(f"packed sequences see one another in {name}: set training.packing = false")
    # Other shapes round otherwise, in bfloat16 visibly; a prefix or a position that is lost changes everything.
    if (shared - alone).abs().max() > 10 * tolerance:
        raise ConfigError(f"{name} does not continue a shared prompt as its own: set training.packing = false")
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if window and sliding and layout.windows_seen == {0}:
        raise ConfigError(f"{name} does not tell its attention about the sliding window: set training.packing = false")
