import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco

from slipstream.errors import ConfigError
from slipstream_matching.matching import MatchSettings, box_iou, candidates, mask_iou, mask_of, match
from slipstream_matching.objects import SceneObject

SMALL = MatchSettings(maskiou_resolution=40)
BINS = st.integers(0, 999)
ANY_BOX = st.tuples(BINS, BINS, BINS, BINS).map(lambda c: SceneObject("", "bbox_2d", c))
SHAPES = st.lists(ANY_BOX, max_size=4)


def box(*coordinates):
    return SceneObject("", "bbox_2d", coordinates)


def coco_box(one):
    x1, y1, x2, y2 = one.bounds
    return [x1, y1, x2 - x1, y2 - y1]


@given(ANY_BOX, ANY_BOX)
def test_box_overlap_is_pycocotools(one, other):
    expected = coco.iou(np.array([coco_box(one)], float), np.array([coco_box(other)], float), [0])[0][0]
    assert box_iou(one, other) == pytest.approx(0.0 if math.isnan(expected) else expected, abs=1e-12)
    assert box_iou(one, other) == box_iou(other, one)


@given(ANY_BOX, ANY_BOX)
def test_mask_overlap_is_pycocotools(one, other):
    a, b = mask_of(one, 64), mask_of(other, 64)
    runs = [coco.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in (a, b)]
    assert mask_iou(a, b) == pytest.approx(coco.iou(runs[:1], runs[1:], [0])[0][0], abs=1e-12)
    assert mask_iou(a, b) == mask_iou(b, a)
    assert mask_iou(a, a) == 1.0


@given(ANY_BOX, st.sampled_from([1, 2, 37, 256]))
def test_boxes_are_drawn_with_both_edges(one, resolution):
    x1, y1, x2, y2 = (math.floor(bin_ * (resolution - 1) / 999 + 0.5) for bin_ in one.bounds)
    expected = np.zeros((resolution, resolution), bool)
    expected[y1 : y2 + 1, x1 : x2 + 1] = True
    drawn = mask_of(one, resolution)
    assert (drawn == expected).all()
    far = [x1, y1, x2 + 1, y1, x2 + 1, y2 + 1, x1, y2 + 1]  # pycocotools draws up to its last edge
    runs = coco.frPyObjects([[float(value) for value in far]], resolution, resolution)
    assert (coco.decode(runs)[:, :, 0].astype(bool) == expected).all()


def test_candidates_are_those_that_overlap_most_and_else_the_nearest():
    truths = [box(500, 500, 600, 600), box(0, 0, 100, 100), box(0, 0, 50, 100), box(0, 0, 100, 100)]
    assert candidates(box(0, 0, 90, 100), truths, 3) == [1, 3, 2]  # equal ones by their place
    assert candidates(box(0, 0, 90, 100), truths, 9) == [1, 3, 2, 0]
    assert candidates(box(400, 400, 450, 450), truths, 2) == [0, 1]
    assert candidates(box(450, 450, 400, 400), truths, 2) == [0, 1]  # corners in any order
    assert candidates(box(5, 5, 5, 5), truths, 2) == [2, 1]  # without an area nothing overlaps
    assert candidates(box(5, 5, 5, 5), [], 2) == []


def brute_force(predictions, truths, rules):
    """The least cost of all matchings, by trying them all; and the numbers of pairs that have it."""
    gated = {}
    for (i, one), (j, other) in itertools.product(enumerate(predictions), enumerate(truths)):
        iou = mask_iou(mask_of(one, rules.maskiou_resolution), mask_of(other, rules.maskiou_resolution))
        if iou >= rules.maskiou_gate and j in candidates(one, truths, rules.candidate_top_k):
            gated[i, j] = iou
    best, found = math.inf, set()
    for chosen in itertools.product([None, *range(len(truths))], repeat=len(predictions)):
        pairs = [(i, j) for i, j in enumerate(chosen) if j is not None]
        if len({j for _, j in pairs}) < len(pairs) or not set(pairs) <= set(gated):
            continue
        cost = sum(1 - gated[pair] for pair in pairs)
        cost += rules.fp_cost * (len(predictions) - len(pairs)) + rules.fn_cost * (len(truths) - len(pairs))
        if cost < best - 1e-9:
            best, found = cost, set()
        if cost < best + 1e-9:
            found.add(tuple(pairs))
    return best, found


RULES = st.builds(
    MatchSettings,
    candidate_top_k=st.integers(1, 4),
    maskiou_gate=st.sampled_from([0.0, 0.1, 0.3]),
    maskiou_resolution=st.just(24),
    fp_cost=st.sampled_from([0.1, 0.5, 1.0]),
    fn_cost=st.sampled_from([0.1, 2.0]),
)
NEAR = st.tuples(*[st.integers(0, 6)] * 4).map(lambda c: box(*(160 * value for value in c)))


@settings(max_examples=60)
@given(st.lists(NEAR, max_size=3), st.lists(NEAR, max_size=4), RULES)
def test_the_assignment_is_the_best_of_all(predictions, truths, rules):
    found = match(predictions, truths, rules)
    _, best = brute_force(predictions, truths, rules)
    assert tuple((pair.prediction, pair.truth) for pair in found.pairs) in best


@settings(max_examples=60)
@given(SHAPES, SHAPES, st.randoms(use_true_random=False))
def test_checklist_11_counts_add_up_and_order_does_not_matter(predictions, truths, random):
    found = match(predictions, truths, SMALL)
    assert match(predictions, truths, SMALL) == found
    paired = [pair.prediction for pair in found.pairs], [pair.truth for pair in found.pairs]
    assert sorted(paired[0] + found.false_positives) == list(range(len(predictions)))  # P = match + FP, none twice
    assert sorted(paired[1] + found.missed) == list(range(len(truths)))
    assert paired[0] == sorted(paired[0])
    assert all(pair.iou >= SMALL.maskiou_gate for pair in found.pairs)
    shuffled, others = random.sample(predictions, len(predictions)), random.sample(truths, len(truths))
    again = match(shuffled, others, SMALL)
    cost = [
        sum(1 - pair.iou for pair in each.pairs) + len(each.missed) + len(each.false_positives)
        for each in (found, again)
    ]
    assert cost[0] == pytest.approx(cost[1])


@given(st.permutations([box(0, 0, 300, 300), box(500, 0, 900, 300), box(0, 500, 400, 900), box(600, 600, 999, 999)]))
def test_checklist_11_without_ties_every_order_gives_the_same_pairs(predictions):
    truths = [box(510, 0, 900, 300), box(0, 0, 310, 300), box(600, 620, 999, 999)]
    found = match(predictions, truths, SMALL)
    pairs = {(predictions[pair.prediction].coordinates, pair.truth) for pair in found.pairs}
    assert pairs == {((500, 0, 900, 300), 0), ((0, 0, 300, 300), 1), ((600, 600, 999, 999), 2)}


@settings(max_examples=40)
@given(st.lists(ANY_BOX, max_size=5, unique_by=lambda each: mask_of(each, 40).tobytes()))
def test_checklist_11_identical_objects_all_match(objects):
    found = match(objects, objects, MatchSettings(maskiou_resolution=40))
    assert [(pair.prediction, pair.truth, pair.iou) for pair in found.pairs] == [
        (i, i, 1.0) for i in range(len(objects))
    ]


def test_checklist_11_equal_boxes_all_match():
    found = match([box(1, 2, 300, 400)] * 3, [box(1, 2, 300, 400)] * 2, SMALL)
    assert ([pair.truth for pair in found.pairs], len(found.false_positives), found.missed) == ([0, 1], 1, [])


def test_checklist_11_below_the_gate_nothing_matches_and_is_counted():
    truth = [box(0, 0, 999, 999)]
    below, above = box(0, 0, 999, 280), box(0, 0, 999, 320)
    found = match([below, below], truth, MatchSettings(maskiou_resolution=256))
    assert (found.pairs, found.false_positives, found.missed, found.gating_rejections) == ([], [0, 1], [0], 2)
    found = match([below, above], truth, MatchSettings(maskiou_resolution=256))
    assert ([pair[:2] for pair in found.pairs], found.gating_rejections) == ([(1, 0)], 1)


def test_predictions_match_with_their_corners_in_any_order():
    found = match([box(300, 400, 100, 200)], [box(100, 200, 300, 400)], SMALL)
    assert found.pairs == [(0, 0, 1.0)]


def test_a_missing_scipy_is_named_and_so_is_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"needs the package scipy.* pip install 'slipstream\[detection\]'"):
        match([box(1, 2, 3, 4)], [box(1, 2, 3, 4)], SMALL)
