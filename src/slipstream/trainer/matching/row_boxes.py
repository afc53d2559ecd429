"""The boxes that a row of tokens predicts, as tensors. Shape suffixes: N trainable tokens of the row, B boxes, M = 4 B
coordinates in the order of the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import TrainingError
from slipstream.records import DetectionTarget
from slipstream.trainer.attention.row_layout import to_device
from slipstream_matching.coordinates import fraction_of


@dataclass
class RowBoxes:
    """What rollout matching needs to know of a row besides its tokens."""

    weights_N: Tensor
    """Of each trainable token's cross-entropy."""
    index_M: Tensor
    """Which of the N trainable tokens each coordinate is: its logits are those that predict this token."""
    slots_M: Tensor
    """Row position of each coordinate's own token, an input of those after it."""
    true_B4: Tensor
    """The true boxes, in [0, 1]."""
    is_appended_B: Tensor


def row_boxes(
    given: Sequence[DetectionTarget | None],
    positions: Sequence[list[int]],
    predict_index: Sequence[int],
    device: torch.device | str,
) -> RowBoxes | None:
    """The boxes of a row's sequences; None without rollout matching. `positions`: of each sequence's trainable tokens;
    `predict_index`: the row position before each of all of them. Raises `TrainingError` where only a part of the
    sequences has targets, or a coordinate is not trainable."""
    found = [target for target in given if target is not None]
    if not found:
        return None
    if len(found) < len(given):
        raise TrainingError("a batch mixes rows of rollout matching with others: report this")
    weights: list[float] = []
    index: list[int] = []
    boxes: list[list[float]] = []
    appended: list[bool] = []
    for target, places in zip(found, positions, strict=True):
        number_of = {place: len(weights) + number for number, place in enumerate(places)}
        weights += [target.weights[place] for place in places]
        for box in target.boxes:
            if not number_of.keys() >= set(box.slots):
                raise TrainingError(f"a box has its coordinates at {list(box.slots)}, not all trainable: report this")
            index += [number_of[slot] for slot in box.slots]
            boxes.append([fraction_of(bin_) for bin_ in box.coordinates])
            appended.append(box.is_appended)
    return RowBoxes(
        weights_N=to_device(torch.tensor(weights, dtype=torch.float32), device),
        index_M=to_device(torch.tensor(index, dtype=torch.int64), device),
        slots_M=to_device(torch.tensor([predict_index[number] + 1 for number in index], dtype=torch.int64), device),
        true_B4=to_device(torch.tensor(boxes, dtype=torch.float32).view(-1, 4), device),
        is_appended_B=to_device(torch.tensor(appended, dtype=torch.bool), device),
    )
