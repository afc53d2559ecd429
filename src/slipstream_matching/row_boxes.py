"""What a sequence of rollout matching is trained on, as streams of its trained tokens; and from the streams of a packed
row, its boxes as tensors. Shape suffixes: N trainable tokens of the row, B boxes, M = 4 B coordinates in the row's
order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from torch import Tensor

from slipstream.errors import TrainingError
from slipstream.plugins import MicroBatch
from slipstream.records import Stream
from slipstream_matching.coordinates import LAST_BIN
from slipstream_matching.row_targets import BoxTarget

WEIGHTS, BINS, ORIGINS = "ce_weights", "true_bins", "box_origins"
"""Streams: the weight of a token's cross-entropy; the bin of the true coordinate, -1 where no box is; its box's
origin."""
IN_ROLLOUT, APPENDED, WRITTEN = 0, 1, 2
"""Origins of a box: found by a rollout, missed by it, of an answer without a rollout."""


def mask_and_streams(
    weights: Sequence[float], boxes: Sequence[BoxTarget], *, is_rollout: bool
) -> tuple[list[bool], dict[str, Stream]]:
    """The mask of a sequence, true at weights above 0 and at coordinates of boxes, and its streams. `weights`: of each
    token. The slots of a box, and boxes with each other, are in the sequence's order."""
    bins, origins = [-1] * len(weights), [-1] * len(weights)
    for box in boxes:
        origin = WRITTEN if not is_rollout else APPENDED if box.is_appended else IN_ROLLOUT
        for slot, bin_ in zip(box.slots, box.coordinates, strict=True):
            bins[slot], origins[slot] = bin_, origin
    mask = [weight > 0.0 or bin_ >= 0 for weight, bin_ in zip(weights, bins, strict=True)]
    return mask, {
        WEIGHTS: Stream.of(compress(weights, mask)),
        BINS: Stream.of(compress(bins, mask), "int64"),
        ORIGINS: Stream.of(compress(origins, mask), "int64"),
    }


@dataclass
class RowBoxes:
    """Weights and boxes of a row, beside its tokens."""

    weights_N: Tensor
    """Weight of each trainable token's cross-entropy."""
    index_M: Tensor
    """Each coordinate's number among the N trainable tokens. Its logits predict this token."""
    slots_M: Tensor
    """Row position of each coordinate's own token, an input of those after it."""
    true_B4: Tensor
    """The true boxes, in [0, 1]."""
    is_appended_B: Tensor


def row_boxes(micro: MicroBatch) -> RowBoxes:
    """The boxes of a row, in the order of its tokens. Raises `TrainingError` where a sequence has no targets."""
    if missing := [name for name in (WEIGHTS, BINS, ORIGINS) if name not in micro.streams]:
        raise TrainingError(f"a sequence has no targets of rollout matching ({', '.join(missing)}): report this")
    weights_N, bins_N, origins_N = (micro.streams[name] for name in (WEIGHTS, BINS, ORIGINS))
    index_M = (bins_N >= 0).nonzero().squeeze(1)
    return RowBoxes(
        weights_N,
        index_M,
        slots_M=micro.predict_index_N[index_M] + 1,
        true_B4=(bins_N[index_M].double() / LAST_BIN).float().view(-1, 4),
        is_appended_B=origins_N[index_M].view(-1, 4)[:, 0] != IN_ROLLOUT,
    )
