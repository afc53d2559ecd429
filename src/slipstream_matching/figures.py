"""What rollouts came to, as counts that add up over samples, and the figures that follow from sums.

Guarantees: the names are those of the log; a figure without anything to divide by is left out, never NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream_matching.matching import Matching
from slipstream_matching.parser import ParsedAnswer


@dataclass(frozen=True)
class DetectionCounts:
    """Sums over samples. Their sum is that of all."""

    samples: int = 0
    truncated: int = 0
    """Answers with something unclosed at their end."""
    invalid: int = 0
    """Answers of which nothing could be kept."""
    empty: int = 0
    """Whole answers that list nothing."""
    predictions: int = 0
    """Valid objects."""
    dropped: int = 0
    """Parts of answers that are no valid objects, polygons excepted."""
    polygons: int = 0
    """Polygons where boxes are wanted."""
    without_geometry: int = 0
    wrong_coordinates: int = 0
    truths: int = 0
    matched: int = 0
    matched_iou: float = 0.0
    """Sum over matches."""
    gating_rejections: int = 0
    samples_with_predictions: int = 0
    samples_with_matches: int = 0

    def __add__(self, other: DetectionCounts) -> DetectionCounts:
        names = [field.name for field in fields(self)]
        return DetectionCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def metrics(self) -> dict[str, float]:
        """Counters, and figures over all samples: precision is 0 where truths met no prediction at all."""
        found: dict[str, float] = {
            "stage2/invalid_rollout": self.invalid,
            "stage2/empty_rollout": self.empty,
            "stage2/drop_poly": self.polygons,
            "stage2/drop_unknown": self.without_geometry,
            "stage2/drop_bbox_invalid": self.wrong_coordinates,
            "rollout/parse_truncated": self.truncated,
            "rollout/parse_dropped_invalid": self.dropped,
            "rollout/gating_rejections": self.gating_rejections,
            "rollout/fn_appended": self.truths - self.matched,
        }
        figures = {
            "parse_truncated_rate": (self.truncated, self.samples),
            "parse_obj_valid_frac": (self.predictions, self.predictions + self.dropped + self.polygons),
            "sample_valid_pred_rate": (self.samples_with_predictions, self.samples),
            "sample_any_match_rate": (self.samples_with_matches, self.samples),
            "precision": (self.matched, self.predictions or self.truths),
            "recall": (self.matched, self.truths),
            "f1": (2 * self.matched, self.predictions + self.truths),
            "matched_maskiou_mean": (self.matched_iou, self.matched),
        }
        return found | {f"rollout/{name}": share / whole for name, (share, whole) in figures.items() if whole}


def counts_of(answer: ParsedAnswer, matching: Matching) -> DetectionCounts:
    """The counts of one sample; `matching`: of `answer.objects`."""
    reasons = [dropped.reason for dropped in answer.dropped]
    num_matched = len(matching.pairs)
    return DetectionCounts(
        samples=1,
        truncated=int(answer.is_truncated),
        invalid=int(answer.is_invalid),
        empty=int(answer.is_empty),
        predictions=len(answer.objects),
        dropped=len(reasons) - reasons.count("polygon"),
        polygons=reasons.count("polygon"),
        without_geometry=reasons.count("no_geometry"),
        wrong_coordinates=reasons.count("coordinates"),
        truths=num_matched + len(matching.missed),
        matched=num_matched,
        matched_iou=sum(pair.iou for pair in matching.pairs),
        gating_rejections=matching.gating_rejections,
        samples_with_predictions=int(bool(answer.objects)),
        samples_with_matches=int(num_matched > 0),
    )
