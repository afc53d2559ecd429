"""Losses of coordinate tokens, and the expected embeddings of the expectation loop.

Pure; one value for each coordinate or box, so that the objective divides by the counts of the optimizer step.
Log-probabilities are computed in float32 at least. Shape suffixes: N coordinates, B boxes, K the 1000 coordinate tokens
by bin, V vocabulary, T tokens of a row, D embedding. The logits of the coordinate at p are those at p - 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream_matching.coordinates import LAST_BIN, NUM_BINS


def _wide(tensor: Tensor) -> Tensor:
    """As float32; float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def expected_coordinates(logits_NK: Tensor, temperature: float = 1.0) -> Tensor:
    """`sum over k of p(k) k / 999`, `p = softmax(logits / temperature)`, `[N]` in [0, 1]."""
    probs_NK = (_wide(logits_NK) / temperature).softmax(-1)
    return probs_NK @ (torch.arange(NUM_BINS, device=probs_NK.device, dtype=probs_NK.dtype) / LAST_BIN)


def box_l1(predicted_B4: Tensor, true_B4: Tensor) -> Tensor:
    """The mean of the absolute differences of a box's coordinates, in the order given, `[B]`."""
    return (predicted_B4 - true_B4).abs().mean(-1)


def box_giou_loss(predicted_B4: Tensor, true_B4: Tensor) -> Tensor:
    """`1 - GIoU` (arXiv 1902.09630, algorithm 1), from 0 to 2, `[B]`, once the corners x1, y1, x2, y2 are sorted and
    clipped to [0, 1].

    0, without a gradient, for two boxes without an area, of which the IoU is 0 / 0. NaN stays NaN: it is the model's
    fault, and the trainer has to see it.
    """
    box, true, common_B, either_B = _overlap(predicted_B4, true_B4)
    hull_B = _area((torch.minimum(box.low_B2, true.low_B2), torch.maximum(box.high_B2, true.high_B2)))
    has_area_B = either_B != 0  # so has the hull
    one = torch.ones_like(either_B)
    # Replaced before they divide: a gradient of 0 times infinity would be NaN.
    either_B, hull_B = torch.where(has_area_B, either_B, one), torch.where(has_area_B, hull_B, one)
    giou_B = common_B / either_B - (hull_B - either_B) / hull_B
    return torch.where(has_area_B, 1.0 - giou_B, torch.zeros_like(giou_B))


def box_ciou_loss(predicted_B4: Tensor, true_B4: Tensor) -> Tensor:
    """`1 - CIoU` (arXiv 1911.08287, equations 8 to 11), `[B]`, of corners as in `box_giou_loss`. It adds the
    distance of the centres over the hull's diagonal, and the difference of the aspect ratios; its weight has no
    gradient. For two boxes without an area, only the distance has a gradient."""
    (low_B2, high_B2), (true_low_B2, true_high_B2), common_B, either_B = _overlap(predicted_B4, true_B4)
    iou_B = torch.where(either_B != 0, common_B / torch.where(either_B != 0, either_B, 1.0), 1.0)
    hull_B2 = torch.maximum(high_B2, true_high_B2) - torch.minimum(low_B2, true_low_B2)
    diagonal_B = hull_B2.square().sum(-1)
    centres_B2 = (low_B2 + high_B2 - true_low_B2 - true_high_B2) / 2
    distance_B = centres_B2.square().sum(-1) / torch.where(diagonal_B != 0, diagonal_B, 1.0)
    least = torch.finfo(low_B2.dtype).eps
    size_B2, true_size_B2 = high_B2 - low_B2, true_high_B2 - true_low_B2
    angle_B = torch.atan(size_B2[:, 0] / (size_B2[:, 1] + least))
    true_angle_B = torch.atan(true_size_B2[:, 0] / (true_size_B2[:, 1] + least))
    aspect_B = 4 / math.pi**2 * (true_angle_B - angle_B).square()
    with torch.no_grad():
        weight_B = aspect_B / (1 - iou_B + aspect_B + least)
    return 1 - iou_B + distance_B + weight_B * aspect_B


class _Corners(NamedTuple):
    low_B2: Tensor
    high_B2: Tensor


def _overlap(predicted_B4: Tensor, true_B4: Tensor) -> tuple[_Corners, _Corners, Tensor, Tensor]:
    """The sorted corners of both, and the areas of what they have in common and of what either has."""
    box, true = _sorted_corners(predicted_B4), _sorted_corners(true_B4)
    common_B = _area((torch.maximum(box.low_B2, true.low_B2), torch.minimum(box.high_B2, true.high_B2)))
    return box, true, common_B, _area(box) + _area(true) - common_B


def _sorted_corners(boxes_B4: Tensor) -> _Corners:
    one_B2, other_B2 = boxes_B4.clamp(0.0, 1.0).split(2, -1)
    return _Corners(torch.minimum(one_B2, other_B2), torch.maximum(one_B2, other_B2))


def _area(corners: tuple[Tensor, Tensor]) -> Tensor:
    low_B2, high_B2 = corners
    return (high_B2 - low_B2).clamp(min=0.0).prod(-1)


def gate_loss(logits_NV: Tensor, coordinate_ids_K: Tensor) -> Tensor:
    """`logsumexp(all logits) - logsumexp(those of coordinate tokens)`, the negative log-probability that any
    coordinate is written where one belongs, in nats, `[N]`. All logits are needed: from those of coordinates alone
    nothing keeps text out of boxes."""
    logits_NV = _wide(logits_NV)
    return logits_NV.logsumexp(-1) - logits_NV[:, coordinate_ids_K].logsumexp(-1)


def soft_targets(bins_N: Tensor, sigma: float = 2.0) -> Tensor:
    """A Gaussian around each true bin with a standard deviation of `sigma` bins, normalized over the 1000 bins; float32
    `[N, K]`."""
    distance_NK = torch.arange(NUM_BINS, device=bins_N.device) - bins_N[:, None]
    return (-0.5 * (distance_NK / sigma).square()).softmax(-1)


def soft_cross_entropy(logits_NK: Tensor, targets_NK: Tensor) -> Tensor:
    """`-sum over k of target(k) log p(k)` among coordinate tokens, in nats, `[N]`."""
    return -(targets_NK * _wide(logits_NK).log_softmax(-1)).sum(-1)


def with_expected_embeddings(
    embeddings_TD: Tensor,
    slots_N: Tensor,
    logits_NK: Tensor,
    coordinate_embeddings_KD: Tensor,
    temperature: float = 1.0,
    *,
    unrolled: bool = False,
) -> Tensor:
    """A copy of a row's input embeddings in which each slot is `softmax(logits / temperature)` times the embeddings of
    coordinate tokens; all other rows are the same bits. Detached from the logits, so that an iteration's gradient ends
    here, unless it is `unrolled`."""
    if not unrolled:
        logits_NK, coordinate_embeddings_KD = logits_NK.detach(), coordinate_embeddings_KD.detach()
    probs_NK = (_wide(logits_NK) / temperature).softmax(-1)
    rows_ND = probs_NK @ coordinate_embeddings_KD.to(probs_NK.dtype)
    return embeddings_TD.index_copy(0, slots_N, rows_ND.to(embeddings_TD.dtype))
