"""Matches predicted objects to true ones: candidates by boxes, overlap by masks, and the assignment of least cost.

Guarantees: each object is in one pair at most, every pair is a candidate whose masks overlap at least as much as the
gate asks, and equal inputs give equal pairs. Descriptions play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream_matching.coordinates import LAST_BIN
from slipstream_matching.objects import SceneObject

_INFEASIBLE = 1e6
Mask = NDArray[np.bool_]


IN_TASKS = "matching"
"""In a task's info: how its objects are matched (`MatchSettings`), where a run says it."""


@dataclass(frozen=True)
class MatchSettings:
    """How objects are matched."""

    candidate_top_k: int = 10
    """True objects that are compared with each prediction, those with the largest overlap of boxes."""
    maskiou_gate: float = 0.3
    """Masks that overlap less are no match."""
    maskiou_resolution: int = 256
    """Pixels along each side of the canvas on which masks are drawn."""
    fp_cost: float = 1.0
    """Cost of a prediction without a match; that of a match is 1 - IoU."""
    fn_cost: float = 1.0
    """Cost of a true object without a match."""


class Pair(NamedTuple):
    """A match."""

    prediction: int
    truth: int
    iou: float
    """Of the masks."""


@dataclass(frozen=True)
class Matching:
    """Pairs of places in the two lists, in the order of predictions, and the places without a match."""

    pairs: list[Pair]
    false_positives: list[int]
    missed: list[int]
    gating_rejections: int
    """Candidates whose masks overlapped less than the gate asks."""


def mask_of(object_: SceneObject, resolution: int) -> Mask:
    """The pixels of a box on a square canvas, `[resolution, resolution]`, by row and column.

    Corners are rounded to the nearest pixel, bin 999 being the last one. Both edges are drawn, so that no object is
    without pixels. In integers, thus exact.
    """
    x1, y1, x2, y2 = ((2 * bin_ * (resolution - 1) + LAST_BIN) // (2 * LAST_BIN) for bin_ in object_.bounds)
    canvas = np.zeros((resolution, resolution), np.bool_)
    canvas[y1 : y2 + 1, x1 : x2 + 1] = True
    return canvas


def mask_iou(one: Mask, other: Mask) -> float:
    """Pixels of both over pixels of either, 0 for two empty masks."""
    common = int(np.count_nonzero(one & other))
    either = int(np.count_nonzero(one)) + int(np.count_nonzero(other)) - common
    return common / either if either else 0.0


def box_iou(one: SceneObject, other: SceneObject) -> float:
    """Intersection over union of the areas of the smallest boxes around two objects, 0 if neither has an area."""
    a, b = one.bounds, other.bounds
    common = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
    either = sum((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (a, b)) - common
    return common / either if either else 0.0


def candidates(prediction: SceneObject, truths: Sequence[SceneObject], top_k: int) -> list[int]:
    """The true objects with which a prediction is compared: those of the largest box IoU, or if none overlaps it those
    of the nearest centres; of equal ones the first."""
    ious = [box_iou(prediction, truth) for truth in truths]
    if any(ious):
        order = sorted(range(len(truths)), key=lambda place: -ious[place])
    else:
        order = sorted(range(len(truths)), key=lambda place: _distance(prediction, truths[place]))
    return order[:top_k]


def _distance(one: SceneObject, other: SceneObject) -> int:
    """Four times the squared distance of the centres."""
    a, b = one.bounds, other.bounds
    return (a[0] + a[2] - b[0] - b[2]) ** 2 + (a[1] + a[3] - b[1] - b[3]) ** 2


def match(predictions: Sequence[SceneObject], truths: Sequence[SceneObject], settings: MatchSettings) -> Matching:
    """Match by the least sum of costs (Kuhn, 1955): `1 - IoU` of each pair, and the cost of each object without one.

    Raises `ConfigError` if scipy is missing.
    """
    num_predictions, num_truths = len(predictions), len(truths)
    truth_masks = [mask_of(each, settings.maskiou_resolution) for each in truths]
    ious = np.full((num_predictions, num_truths), -1.0)
    rejections = 0
    for place, prediction in enumerate(predictions):
        mask = mask_of(prediction, settings.maskiou_resolution)
        for truth in candidates(prediction, truths, settings.candidate_top_k):
            iou = mask_iou(mask, truth_masks[truth])
            if iou < settings.maskiou_gate:
                rejections += 1
            else:
                ious[place, truth] = iou
    size = num_predictions + num_truths
    cost = np.zeros((size, size))
    cost[:num_predictions, :num_truths] = np.where(ious >= 0.0, 1.0 - ious, _INFEASIBLE)
    cost[:num_predictions, num_truths:] = settings.fp_cost
    cost[num_predictions:, :num_truths] = settings.fn_cost
    pairs = [
        Pair(prediction, truth, float(ious[prediction, truth]))
        for prediction, truth in _assignment(cost)
        if prediction < num_predictions and truth < num_truths and ious[prediction, truth] >= 0.0
    ]
    of_prediction, of_truth = {pair.prediction for pair in pairs}, {pair.truth for pair in pairs}
    return Matching(
        pairs,
        [place for place in range(num_predictions) if place not in of_prediction],
        [place for place in range(num_truths) if place not in of_truth],
        rejections,
    )


def _assignment(cost: NDArray[np.float64]) -> list[tuple[int, int]]:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ConfigError(
            f"matching needs the package scipy, which cannot be imported ({error}): pip install 'slipstream[detection]'"
        ) from error
    rows, columns = linear_sum_assignment(cost)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
