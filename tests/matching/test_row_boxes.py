"""Which of a row's tokens are its boxes' coordinates, and what an objective says of them, by value."""

import math
from types import SimpleNamespace

import pytest
import torch

from slipstream.errors import TrainingError
from slipstream.records import Sequence
from slipstream.trainer.packing import StepBatch, micro_batches
from slipstream_matching.objective import MatchingObjective
from slipstream_matching.row_boxes import mask_and_streams, row_boxes
from slipstream_matching.row_targets import BoxTarget
from slipstream_matching.settings import MatchingConfig

IDS = range(3, 1003)
"""Of the bins; the tokens before them are text."""


def sequence(*boxes, weight=1.0, is_rollout=False):
    """A text token, then each box's coordinates and a text token; all but the first are trained on."""
    ids, weights, made = [0, 1], [0.0, weight], []
    for bins, is_appended in boxes:
        made.append(BoxTarget(tuple(range(len(ids), len(ids) + 4)), bins, is_appended))
        ids += [*(IDS[bin_] for bin_ in bins), 2]
        weights += [0.0] * 4 + [weight]
    mask, streams = mask_and_streams(weights, made, is_rollout=is_rollout)
    assert mask == [False] + [True] * (len(ids) - 1)
    return Sequence(ids, mask, streams=streams)


FIRST, SECOND = (0, 111, 333, 999), (111, 0, 444, 555)


def test_coordinates_are_found_among_the_trained_tokens_and_in_the_row():
    one = sequence((FIRST, True), weight=0.5)
    two = sequence((SECOND, False), (FIRST, True), is_rollout=True)
    (micro,) = micro_batches(StepBatch([one, two]), 1000)
    order = micro.sequences
    found = row_boxes(micro)
    weights = ([0.5, 0, 0, 0, 0, 0.5], [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    assert found.weights_N.tolist() == [weight for number in order for weight in weights[number]]
    boxes = ([FIRST], [SECOND, FIRST])
    expected = [[bin_ / 999 for bin_ in box] for number in order for box in boxes[number]]
    torch.testing.assert_close(found.true_B4, torch.tensor(expected), rtol=0, atol=0)
    appended = ([True], [False, True])
    assert found.is_appended_B.tolist() == [is_one for number in order for is_one in appended[number]]
    bins = (found.true_B4 * 999).round().long().flatten().tolist()
    assert (micro.target_ids_N[found.index_M] - IDS[0]).tolist() == bins
    assert (micro.token_ids_T[found.slots_M] - IDS[0]).tolist() == bins
    assert (found.weights_N.dtype, found.true_B4.dtype) == (torch.float32, torch.float32)


def test_an_answer_of_nothing_has_no_boxes():
    (micro,) = micro_batches(StepBatch([sequence()]), 1000)
    found = row_boxes(micro)
    assert (found.true_B4.shape, found.index_M.tolist(), found.weights_N.tolist()) == ((0, 4), [], [1.0])
    assert found.is_appended_B.shape == (0,)


def of(batch, logits_NV, **settings):
    """Loss and metrics of a model with these logits."""
    objective = MatchingObjective(MatchingConfig(**settings), IDS)
    model = SimpleNamespace(
        within=lambda work: work(),
        embed=lambda micro: None,
        forward=lambda embeddings, micro: None,
        head=lambda hidden, index_N: logits_NV,
    )
    (micro,) = micro_batches(batch, 1000)
    divisors = objective.counts(batch)
    loss, sums = objective.terms(model, micro, divisors)
    return loss.item(), objective.summarize(sums, divisors), divisors


def logits_of(batch, shift):
    """Nearly sure of the bin `shift` after each coordinate, and of one text token in two."""
    (micro,) = micro_batches(batch, 1000)
    logits = torch.full((len(micro.target_ids_N), 1003), -40.0)
    for place, target in enumerate(micro.target_ids_N.tolist()):
        if target < 3:
            logits[place, [1, 2]] = torch.tensor([0.0, 1.0])
        else:
            logits[place, [target + shift, 0]] = torch.tensor([0.0, math.log(3.0)])  # a quarter for coordinates
    return logits


def test_every_term_has_its_weight_and_is_told_by_itself():
    boxes = ((111, 111, 333, 333), (222, 222, 444, 444))
    batch = StepBatch([sequence((boxes[0], True), (boxes[1], False), weight=0.5, is_rollout=True)])
    logits = logits_of(batch, 111)
    settings = {"bbox_l1_weight": 2.0, "bbox_iou_weight": 3.0, "coordinate_gate_weight": 4.0}
    loss, metrics, divisors = of(batch, logits, **settings)
    assert divisors == {"tokens": 11.0, "weights": 1.5, "boxes": 2.0, "tail": 1.0, "prefix": 1.0, "forwards": 1.0}
    # Squares of two ninths, one ninth off in both directions.
    giou = 1 - (1 / 7 - 2 / 9)
    cross_entropy = [math.log(1 + math.e), math.log(1 + math.e) - 1, math.log(1 + math.e) - 1]
    expected = {
        "num_tokens": 11.0,
        "token_accuracy": 2 / 3,
        "loss/ce": sum(cross_entropy) / 3,
        "loss/bbox_l1": 1 / 9,
        "loss/bbox_giou": giou,
        "loss/coord_gate": math.log(4.0),
        "loss/coord": 2 / 9 + 3 * giou + 4 * math.log(4.0),
        "stage2/num_boxes": 2.0,
        "stage2/num_forwards": 1.0,
    }
    whole = expected["loss/ce"] + expected["loss/coord"]
    parts = {f"loss/coord_{part}": expected["loss/coord"] for part in ("prefix", "tail")}
    assert metrics == pytest.approx(expected | parts | {"loss": whole}, abs=1e-4)
    assert loss == pytest.approx(whole, abs=1e-4)


def test_boxes_after_a_rollout_are_told_apart_from_those_in_it():
    batch = StepBatch([sequence((FIRST, True), (SECOND, False), (SECOND, False), is_rollout=True)])
    logits = logits_of(batch, 0)
    logits[1:5] = logits[1:5].roll(90, 1)  # the appended one's
    _, metrics, divisors = of(batch, logits, softctx_iterations=3, coordinate_gate_weight=0.0)
    assert (divisors["tail"], divisors["prefix"], divisors["forwards"]) == (1.0, 2.0, 1.0)
    assert metrics["stage2/num_forwards"] == 1.0
    assert metrics["loss/coord_prefix"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["loss/coord_tail"] == pytest.approx(3 * metrics["loss/coord"], rel=1e-4)
    assert metrics["loss/coord_tail"] > 0.05
    _, metrics, divisors = of(StepBatch([sequence((FIRST, True))]), logits_of(StepBatch([sequence((FIRST, True))]), 0))
    assert "loss/coord_prefix" not in metrics
    assert divisors["forwards"] == 1.0
    plain = MatchingObjective(MatchingConfig(softctx_iterations=3), IDS)
    assert plain.counts(StepBatch([sequence((FIRST, True))]))["forwards"] == 3.0


def test_further_settings_name_their_terms():
    batch = StepBatch([sequence((FIRST, True))])
    loss, metrics, _ = of(batch, logits_of(batch, 0), box_loss="ciou")
    assert metrics["loss/bbox_ciou"] == pytest.approx(0.0, abs=1e-4)
    assert "loss/bbox_giou" not in metrics
    soft, more, _ = of(batch, logits_of(batch, 0), box_loss="ciou", soft_ce_weight=0.5, soft_ce_sigma=0.1)
    assert more["loss/coord_soft_ce"] == pytest.approx(0.0, abs=1e-4)
    wide, widest, _ = of(batch, logits_of(batch, 0), box_loss="ciou", soft_ce_weight=0.5, soft_ce_sigma=2.0)
    assert widest["loss/coord_soft_ce"] > 1.0
    assert wide == pytest.approx(loss + 0.5 * widest["loss/coord_soft_ce"], rel=1e-5)
    assert soft == pytest.approx(loss, abs=1e-3)
    _, hot, _ = of(batch, logits_of(batch, 0), softctx_temperature=40.0)
    assert hot["loss/bbox_l1"] > 0.1 > metrics["loss/bbox_l1"], "expectations are at the temperature"


def test_rows_without_targets_or_with_lazy_logits_are_refused():
    objective = MatchingObjective(MatchingConfig(), IDS)
    (plain,) = micro_batches(StepBatch([Sequence([1, 2], [False, True])]), 100)
    with pytest.raises(TrainingError, match="has no targets of rollout matching"):
        objective.terms(SimpleNamespace(), plain, {})
    batch = StepBatch([sequence((FIRST, True))])
    with pytest.raises(TrainingError, match=r"set model\.fp32_head = false"):
        of(batch, object())
