"""The section [matching]: its settings, and their checks against others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from slipstream.plugins import (
    Factor,
    Fraction,
    GreedyTemperature,
    Items,
    MethodSection,
    NonNegativeFactor,
    Problems,
    Rule,
    Share,
    without_effect,
)
from slipstream_matching.schedule import Channel, channel_by_pattern, channel_by_share

if TYPE_CHECKING:
    from slipstream.plugins import RunConfig

_LEAST_TEMPERATURE = 0.01
"""A lower one vLLM would raise to it."""


class MatchingConfig(MethodSection):
    """Rollout matching: SFT of a vision-language model that answers with the objects of an image as JSON whose
    coordinates are tokens, `<|coord_0|>` to `<|coord_999|>` (docs/detection.md). Tasks come from an environment that
    has their objects, `environment.name = "detection"`. Channel A trains on the true objects alone. Channel B
    trains on greedy rollouts matched to the true objects; missed objects are appended."""

    implementation: ClassVar[str] = "slipstream_matching.method:Matching"

    pattern: Annotated[tuple[Literal["A", "B"], ...], Field(strict=False, min_length=1)] = ("A",)
    """The channels of the steps, repeated."""
    b_ratio: Share | None = None
    """In the place of `pattern`: the share of channel B; of the first n steps exactly `floor(n * b_ratio)`."""
    softctx_iterations: Annotated[int, Field(ge=1, le=16)] = 1
    """Channel A: forwards of a row. From the second one on, tokens read the coordinates expected by the forward
    before, not the true ones. 1: plain teacher forcing."""
    softctx_temperature: Factor = 1.0
    """Logits of coordinate tokens are divided by it before expectations are taken."""
    softctx_unrolled: bool = False
    """Pass gradients through the replaced coordinates into the earlier forwards, which then keep their activations;
    otherwise only the last forward has a gradient."""
    desc_ce_weight: NonNegativeFactor = 1.0
    """Weight of a description's tokens in the cross-entropy; that of all others is 1, of coordinates 0."""
    bbox_l1_weight: NonNegativeFactor = 1.0
    """Weight of the mean absolute difference of a box's expected coordinates from the true ones."""
    bbox_iou_weight: NonNegativeFactor = 1.0
    """Weight of `box_loss`."""
    box_loss: Literal["giou", "ciou"] = "giou"
    """1 - GIoU (arXiv 1902.09630) or 1 - CIoU (arXiv 1911.08287) of the expected and the true box."""
    coordinate_gate_weight: NonNegativeFactor = 1.0
    """Weight of the negative log-probability that a coordinate token is written where one belongs, and no text; 0:
    nothing keeps text out of boxes."""
    soft_ce_weight: NonNegativeFactor = 0.0
    """Weight of a coordinate token's cross-entropy against a Gaussian around the true one. Losses of boxes see
    expectations alone, so a model without plain SFT on coordinates needs this."""
    soft_ce_sigma: Annotated[float, Field(gt=0.0, le=500.0)] = 2.0
    """Standard deviation of that Gaussian, in bins."""
    object_order: Literal["sorted", "as_given"] = "sorted"
    """Order of the true objects in answers: by top and then left edge, or as the rows list them."""
    candidate_top_k: Items = 10
    """Channel B and evaluation: true objects that are compared with each prediction, those with the largest overlap of
    boxes."""
    maskiou_gate: Fraction = 0.3
    """Objects whose masks overlap less are no match."""
    maskiou_resolution: Annotated[int, Field(ge=8, le=2048)] = 256
    """Pixels along each side of the canvas on which masks are drawn."""
    fp_cost: NonNegativeFactor = 1.0
    """Cost of a prediction without a match; that of a match is 1 - IoU."""
    fn_cost: NonNegativeFactor = 1.0
    """Cost of a true object without a match."""
    temperature: GreedyTemperature = 0.0
    """Of channel B's rollouts; 0 is greedy."""
    max_invalid: Fraction = 0.9
    """The run ends when more than this share of the rollouts of the last 10 steps of channel B holds nothing that can
    be kept, with examples. 1: it goes on."""

    @property
    def rolls_out(self) -> bool:
        """Whether any step is channel B's."""
        return "B" in self.pattern if self.b_ratio is None else self.b_ratio > 0

    def channel_of(self, step: int) -> Channel:
        """The channel of the update `step -> step + 1`, all of its optimizer steps included."""
        if self.b_ratio is not None:
            return channel_by_share(step, self.b_ratio)
        return channel_by_pattern(step, self.pattern)

    def rolls_out_at(self, step: int) -> bool:
        """See `MethodSection`."""
        return self.channel_of(step) == "B"

    @property
    def draws_at(self) -> float:
        """See `MethodSection`."""
        return self.temperature

    def notes(self, steps: int) -> list[tuple[str, float, str]]:
        """Steps of channel B, and forwards of a row of channel A."""
        count = sum(map(self.rolls_out_at, range(steps)))
        how = f"matching.pattern = {', '.join(self.pattern)}"
        if self.b_ratio is not None:
            how = f"matching.b_ratio = {self.b_ratio:g}"
        if not count:
            how += ": no rollouts are made to train on"
        forwards = self.softctx_iterations
        return [
            ("steps of channel B", count, f"of {steps}, by {how}"),
            ("forwards of channel A", forwards, "of each row, by matching.softctx_iterations"),
        ]

    def inapplicable(self, config: RunConfig) -> dict[str, str]:
        """See `MethodSection`."""
        rules: list[Rule] = [
            (True, "algorithm.train_on", "has no effect under [matching], which trains on answers alone"),
            (self.b_ratio is not None, "matching.pattern", "has no effect while matching.b_ratio is set"),
            (
                self.softctx_iterations == 1,
                "matching.softctx_unrolled",
                "has no effect while matching.softctx_iterations is 1",
            ),
            (
                self.soft_ce_weight == 0,
                "matching.soft_ce_sigma",
                "has no effect while matching.soft_ce_weight is 0",
            ),
            (
                not self.rolls_out,
                "matching.temperature matching.max_invalid",
                "has no effect without a step of channel B",
            ),
            (
                not self.rolls_out and config.evaluation is None,
                "matching.candidate_top_k matching.maskiou_gate matching.maskiou_resolution matching.fp_cost "
                "matching.fn_cost",
                "has no effect without a step of channel B and without an evaluation",
            ),
        ]
        return without_effect(rules)

    def problems(self, config: RunConfig) -> Problems:
        """See `MethodSection`."""
        if config.data is not None:
            yield (
                "data.path",
                "[data] and [matching] are both there, and the objects of [matching] come from an environment: set "
                'environment.name = "detection" and environment.settings.path, and remove [data]',
            )
        if config.environment is None:
            yield (
                "matching",
                "[matching] needs an environment whose tasks have objects, and there is none: set environment.name = "
                '"detection" and environment.settings.path',
            )
        elif config.environment.mixture:
            yield (
                "environment.mixture",
                "[matching] trains on one environment, and there is a mixture: name one of them",
            )
        if config.model.fp32_head is True:
            yield (
                "model.fp32_head = true never has the logits of coordinate tokens as a whole, which [matching] reads: "
                "set it to false"
            )
        if 0.0 < self.temperature < _LEAST_TEMPERATURE:
            yield (
                f"matching.temperature = {self.temperature:g} is below {_LEAST_TEMPERATURE}, which vLLM would raise it "
                "to: use 0, which is greedy, or more"
            )
        if (size := config.training.context_parallel) > 1:
            yield f"training.context_parallel = {size} divides rows, and [matching] reads whole ones: use 1"
