import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_matching.coordinate_losses import (
    box_ciou_loss,
    box_giou_loss,
    box_l1,
    expected_coordinates,
    gate_loss,
    soft_cross_entropy,
    soft_targets,
    with_expected_embeddings,
)

GENERATOR = torch.Generator().manual_seed(5)
LOGITS = 4 * torch.randn(3, 1000, generator=GENERATOR, dtype=torch.float64)


def softmax(row):
    shifted = np.exp(np.asarray(row) - np.max(row))
    return shifted / shifted.sum()


def test_expected_coordinates_by_their_formula():
    for temperature in (1.0, 0.5):
        expected = [float(np.dot(softmax(row / temperature), np.arange(1000) / 999)) for row in LOGITS.numpy()]
        assert expected_coordinates(LOGITS, temperature).tolist() == pytest.approx(expected, abs=1e-12)
        assert expected_coordinates(LOGITS.float(), temperature).tolist() == pytest.approx(expected, abs=1e-5)
        assert expected_coordinates(LOGITS.bfloat16(), temperature).dtype == torch.float32


def test_checklist_6_half_of_0_and_half_of_999_is_the_middle():
    logits = torch.full((3, 1000), -torch.inf)
    logits[0, [0, 999]] = 0.0
    logits[1, 0] = logits[2, 999] = 0.0
    assert expected_coordinates(logits).tolist() == [0.5, 0.0, 1.0]


def giou_loss(one, other):
    """In fractions; corners sorted and clipped."""
    boxes = []
    for x1, y1, x2, y2 in (one, other):
        x1, y1, x2, y2 = (min(max(Fraction(value), Fraction(0)), Fraction(1)) for value in (x1, y1, x2, y2))
        boxes.append((min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)))
    a, b = boxes
    common = max(Fraction(0), min(a[2], b[2]) - max(a[0], b[0])) * max(Fraction(0), min(a[3], b[3]) - max(a[1], b[1]))
    either = sum((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in boxes) - common
    if either == 0:
        return 0.0
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return float(1 - common / either + (hull - either) / hull)


VALUES = st.integers(-64, 320).map(lambda value: value / 256)
CORNERS = st.tuples(VALUES, VALUES, VALUES, VALUES)


@given(CORNERS, CORNERS)
def test_checklist_6_giou_is_finite_and_that_of_fractions(one, other):
    """Inverted boxes, those beyond the image and those without an area included."""
    predicted = torch.tensor([one], dtype=torch.float64, requires_grad=True)
    loss = box_giou_loss(predicted, torch.tensor([other], dtype=torch.float64))
    assert loss.item() == pytest.approx(giou_loss(one, other), abs=1e-12)
    loss.sum().backward()
    assert torch.isfinite(predicted.grad).all()


def test_giou_of_known_boxes():
    true = torch.tensor([[0.0, 0.0, 0.5, 0.5]] * 4)
    predicted = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 1.0, 1.0], [0.2, 0.2, 0.2, 0.4]])
    assert box_giou_loss(predicted, true).tolist() == pytest.approx([0.0, 0.0, 1.5, 1.0])
    nothing = torch.tensor([[0.1, 0.1, 0.1, 0.3]], requires_grad=True)
    loss = box_giou_loss(nothing, torch.tensor([[0.4, 0.4, 0.6, 0.4]]))
    loss.backward()
    assert (loss.item(), nothing.grad.abs().sum().item()) == (0.0, 0.0)
    assert math.isnan(box_giou_loss(torch.full((1, 4), math.nan), true[:1]).item())


def test_gradients_are_those_of_finite_differences():
    predicted = torch.tensor([[0.1, 0.2, 0.55, 0.6], [0.7, 0.3, 0.4, 0.9]], dtype=torch.float64, requires_grad=True)
    true = torch.tensor([[0.15, 0.1, 0.5, 0.7], [0.0, 0.0, 0.2, 0.2]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda boxes: box_giou_loss(boxes, true), predicted)
    logits = LOGITS[:1, :].clone().requires_grad_()
    targets = soft_targets(torch.tensor([7])).double()
    ids = torch.arange(100, 200)
    for function in (
        expected_coordinates,
        lambda given: soft_cross_entropy(given, targets),
        lambda given: gate_loss(given, ids),
    ):
        assert torch.autograd.gradcheck(function, logits, fast_mode=True)


def test_l1_is_the_mean_over_coordinates_in_the_order_given():
    found = box_l1(torch.tensor([[0.5, 0.5, 0.1, 0.1]]), torch.tensor([[0.1, 0.1, 0.5, 0.5]]))
    assert found.tolist() == pytest.approx([0.4])


def test_the_gate_sees_all_logits():
    logits = 3 * torch.randn(2, 40, generator=GENERATOR, dtype=torch.float64)
    ids = torch.tensor([7, 3, 20])
    expected = [-math.log(sum(math.exp(row[i]) for i in ids) / sum(map(math.exp, row))) for row in logits.tolist()]
    assert gate_loss(logits, ids).tolist() == pytest.approx(expected, abs=1e-12)
    logits[:, 11] = 50.0
    assert (gate_loss(logits, ids) > 40).all()


def test_soft_targets_are_gaussians_over_the_bins():
    bins = torch.tensor([0, 500, 999])
    for row, bin_ in zip(soft_targets(bins).double().numpy(), bins.tolist(), strict=True):
        weights = [math.exp(-((k - bin_) ** 2) / (2 * 2.0**2)) for k in range(1000)]
        assert row == pytest.approx(np.array(weights) / sum(weights), abs=1e-7)
    narrow = soft_targets(bins, 0.01)
    assert narrow.argmax(-1).tolist() == bins.tolist()
    assert narrow.max(-1).values.tolist() == [1.0] * 3


def test_soft_cross_entropy_by_its_formula():
    bins = torch.tensor([3, 400, 999])
    targets = soft_targets(bins).double()
    for row, target, cross_entropy in zip(
        LOGITS.numpy(), targets.numpy(), soft_cross_entropy(LOGITS, targets), strict=True
    ):
        probs = softmax(row)
        assert cross_entropy.item() == pytest.approx(-sum(t * math.log(p) for t, p in zip(target, probs, strict=True)))


@settings(max_examples=10)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]), st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True)
)
def test_checklist_4_and_5_slots_alone_become_expected_embeddings(dtype, slots):
    embeddings = torch.randn(12, 5, generator=GENERATOR).to(dtype)
    table = torch.randn(1000, 5, generator=GENERATOR).to(dtype).requires_grad_()
    logits = LOGITS[:1].repeat(len(slots), 1) * torch.rand(len(slots), 1, generator=GENERATOR, dtype=torch.float64)
    logits.requires_grad_()
    before = embeddings.clone()
    found = with_expected_embeddings(embeddings, torch.tensor(slots), logits, table, 0.7)
    assert torch.equal(embeddings, before)
    others = [place for place in range(12) if place not in slots]
    assert torch.equal(found[others], before[others])
    assert found.dtype == dtype
    assert not found.requires_grad
    for slot, row in zip(slots, logits.detach().numpy(), strict=True):
        expected = softmax(row / 0.7) @ table.detach().double().numpy()
        assert found[slot].double().tolist() == pytest.approx(
            expected.tolist(), abs=1e-6 if dtype == torch.float32 else 0.02
        )


def ciou64(predicted, true):
    """1 - CIoU (arXiv 1911.08287) of two boxes of proper corners, in Python's floats."""
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = predicted, true
    common = max(0.0, min(ax2, bx2) - max(ax1, bx1)) * max(0.0, min(ay2, by2) - max(ay1, by1))
    iou = common / ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - common)
    diagonal = (max(ax2, bx2) - min(ax1, bx1)) ** 2 + (max(ay2, by2) - min(ay1, by1)) ** 2
    distance = ((ax1 + ax2 - bx1 - bx2) ** 2 + (ay1 + ay2 - by1 - by2) ** 2) / 4
    aspect = 4 / math.pi**2 * (math.atan((bx2 - bx1) / (by2 - by1)) - math.atan((ax2 - ax1) / (ay2 - ay1))) ** 2
    return 1 - iou + distance / diagonal + (aspect / (1 - iou + aspect) if aspect else 0.0) * aspect


@pytest.mark.parametrize(
    ("predicted", "true"),
    [
        ((0.1, 0.2, 0.5, 0.9), (0.1, 0.2, 0.5, 0.9)),
        ((0.1, 0.2, 0.5, 0.9), (0.2, 0.1, 0.7, 0.6)),
        ((0.0, 0.0, 0.1, 0.1), (0.8, 0.7, 1.0, 0.9)),
        ((0.0, 0.0, 1.0, 1.0), (0.4, 0.1, 0.5, 0.9)),
    ],
)
def test_ciou_is_that_of_a_float64_reference(predicted, true):
    boxes = [torch.tensor([box], dtype=torch.float64) for box in (predicted, true)]
    assert box_ciou_loss(*boxes).item() == pytest.approx(ciou64(predicted, true), abs=1e-9)
    inverted = boxes[0][:, [2, 1, 0, 3]]
    assert box_ciou_loss(inverted, boxes[1]).item() == pytest.approx(ciou64(predicted, true), abs=1e-9)


@pytest.mark.parametrize("true", [(0.3, 0.3, 0.3, 0.3), (0.0, 0.0, 1.0, 1.0), (0.2, 0.2, 0.2, 0.9)])
def test_ciou_and_its_gradient_are_finite_for_any_box(true):
    given = [(0.3, 0.3, 0.3, 0.3), (0.5, 0.5, 0.5, 0.7), (-1.0, 2.0, 0.4, 0.1), (0.0, 0.0, 1.0, 1.0)]
    predicted = torch.tensor(given, requires_grad=True)
    loss = box_ciou_loss(predicted, torch.tensor([true] * len(given)))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert predicted.grad.isfinite().all()
