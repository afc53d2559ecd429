"""The objective of rollout matching: losses and gradients against float64 references, the expectation loop, packing."""

import math

import pytest
import torch
from tests.matching.matching_runs import answer_ids, new_detector, rollout, target_of
from tests.trainer.steps import learner_of

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, micro_batches
from slipstream_matching.objective import MatchingObjective
from slipstream_matching.row_boxes import row_boxes
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.targets import examples_of, matched


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    found = new_detector(tmp_path_factory.mktemp("detector") / "model")
    found.examples = list(found.examples)
    return found


def load(detector, **options):
    """The model with weights wide enough that one token matters to another."""
    model = PolicyModel.load(detector.folder, train_tower=True, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.12, generator=generator)
    return model


def objective(detector, **settings):
    return MatchingObjective(MatchingConfig(**settings), detector.tokens.coordinate_ids)


def step(detector, sequences, settings, micro_batch_tokens=10_000, packing=True):
    """Metrics and gradients of a step."""
    model = load(detector, packing=packing)
    learner = learner_of(model, micro_batch_tokens)
    metrics = learner.forward_backward(StepBatch(sequences), objective(detector, **settings))
    return metrics, {name: master.grad.clone() for name, master in learner.optimizer.masters().items()}


def rolled_out(detector):
    """Channel B's sequences: one object found a little off, and one false positive; and an answer of nothing."""
    ids = answer_ids(detector, ("tiny", (9, 590, 95, 705)), ("x", (500, 500, 600, 600)))
    rollouts = [rollout(detector, 1, ids), rollout(detector, 0, ids[:3])]
    return matched(rollouts, [detector.tasks[1], detector.tasks[0]], detector.tokens, MatchingConfig(), 512)


def giou64(predicted, true):
    """1 - GIoU of two boxes, in Python's floats."""
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = (
        (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3])) for b in (predicted, true)
    )
    common = max(0.0, min(ax2, bx2) - max(ax1, bx1)) * max(0.0, min(ay2, by2) - max(ay1, by1))
    either = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - common
    hull = (max(ax2, bx2) - min(ax1, bx1)) * (max(ay2, by2) - min(ay1, by1))
    return 1.0 - (common / either - (hull - either) / hull)


def logits_of(model, sequence):
    """In float64, at every place."""
    every = records.Sequence(sequence.token_ids, [False] + [True] * (len(sequence) - 1), media=sequence.media)
    (row,) = micro_batches(StepBatch([every]), 10_000)
    with torch.no_grad():
        return model.logits(row).double()


def reference(detector, sequences, desc_ce_weight=1.0):
    """Loss terms in float64 from plain logits, sequence by sequence and token by token."""
    model, ids = load(detector), list(detector.tokens.coordinate_ids)
    ce = weights = l1 = giou = gate = boxes = 0.0
    for sequence in sequences:
        logits = logits_of(model, sequence)
        target = target_of(sequence)
        for place in range(1, len(sequence)):
            if weight := target.weights[place]:
                ce -= weight * logits[place - 1].log_softmax(-1)[sequence.token_ids[place]].item()
                weights += weight
        for box in target.boxes:
            predicted = []
            for slot in box.slots:
                row_logits = logits[slot - 1]
                probs = row_logits[ids].softmax(-1)
                predicted.append(sum(p * k / 999 for k, p in enumerate(probs.tolist())))
                gate += (row_logits.logsumexp(-1) - row_logits[ids].logsumexp(-1)).item() / 4
            true = [k / 999 for k in box.coordinates]
            l1 += sum(abs(a - b) for a, b in zip(predicted, true, strict=True)) / 4
            giou += giou64(predicted, true)
            boxes += 1
    return {
        "loss/ce": ce / weights,
        "loss/bbox_l1": l1 / boxes,
        "loss/bbox_giou": giou / boxes,
        "loss/coord_gate": gate / boxes,
        "loss": ce / weights + (l1 + giou + gate) / boxes,
    }


@pytest.mark.parametrize("channel", ["A", "B"])
def test_losses_are_those_of_a_float64_reference(detector, channel):
    sequences = detector.examples if channel == "A" else [r.sequences[0] for r in rolled_out(detector).rollouts]
    metrics, _ = step(detector, sequences, {})
    for name, value in reference(detector, sequences).items():
        assert metrics[name] == pytest.approx(value, abs=2e-5), name


def test_soft_cross_entropy_is_that_of_a_float64_reference(detector):
    metrics, _ = step(detector, detector.examples, {"soft_ce_weight": 0.5, "soft_ce_sigma": 3.0})
    model, ids, total, boxes = load(detector), list(detector.tokens.coordinate_ids), 0.0, 0
    for sequence in detector.examples:
        logits = logits_of(model, sequence)[:, ids].log_softmax(-1)
        for box in target_of(sequence).boxes:
            boxes += 1
            for slot, bin_ in zip(box.slots, box.coordinates, strict=True):
                target = [math.exp(-((k - bin_) ** 2) / 18) for k in range(1000)]
                row_logprobs = logits[slot - 1].tolist()
                total -= sum(t * lp for t, lp in zip(target, row_logprobs, strict=True)) / sum(target) / 4
    assert metrics["loss/coord_soft_ce"] == pytest.approx(total / boxes, abs=1e-4)
    plain, _ = step(detector, detector.examples, {})
    assert "loss/coord_soft_ce" not in plain
    assert metrics["loss"] == pytest.approx(plain["loss"] + 0.5 * total / boxes, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"softctx_iterations": 3},
        {"softctx_iterations": 2, "softctx_unrolled": True, "box_loss": "ciou", "softctx_temperature": 0.7},
        {"channel": "B", "desc_ce_weight": 0.5},
    ],
)
def test_packed_gradients_are_the_unpacked_ones(detector, settings):
    settings = dict(settings)
    sequences = detector.examples
    if settings.pop("channel", "A") == "B":
        sequences = [r.sequences[0] for r in rolled_out(detector).rollouts]
    one, ours = step(detector, sequences, settings)
    for options in ({"micro_batch_tokens": 100}, {"packing": False}):
        other, theirs = step(detector, sequences, settings, **options)
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    assert any(gradient.abs().max() > 1e-3 for gradient in ours.values())


class Spy:
    """Passes on to a model, and keeps what its forwards read."""

    def __init__(self, model):
        self.model, self.read, self.with_grad = model, [], []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, embeddings, row):
        self.read.append(embeddings.embeds_TD.detach().clone())
        self.with_grad.append(torch.is_grad_enabled())
        return self.model.forward(embeddings, row)


def spied(detector, sequences, **settings):
    spy, ours = Spy(load(detector)), objective(detector, **settings)
    batch = StepBatch(sequences)
    (micro,) = micro_batches(batch, 10_000)
    loss, sums = ours.terms(spy, micro, ours.counts(batch))
    loss.backward()
    return spy, micro, sums


@pytest.mark.parametrize(("iterations", "unrolled"), [(1, False), (2, False), (4, False), (3, True)])
def test_forwards_are_counted_and_have_gradients_where_promised(detector, iterations, unrolled):
    spy, _, sums = spied(detector, detector.examples, softctx_iterations=iterations, softctx_unrolled=unrolled)
    assert len(spy.read) == iterations == int(sums["forwards"])
    assert spy.with_grad == [unrolled] * (iterations - 1) + [True]
    assert spy.model.network.get_input_embeddings().weight.grad.abs().max() > 0


def test_rollouts_take_one_forward_however_many_iterations(detector):
    sequences = [r.sequences[0] for r in rolled_out(detector).rollouts]
    assert len(spied(detector, sequences, softctx_iterations=4)[0].read) == 1


def test_only_slots_change_and_hold_what_the_forward_before_expects(detector):
    spy, micro, _ = spied(detector, detector.examples, softctx_iterations=3, softctx_temperature=0.5)
    slots = row_boxes(micro).slots_M
    ids = torch.tensor(detector.tokens.coordinate_ids)
    table = spy.model.network.get_input_embeddings().weight.detach()
    assert [int(micro.token_ids_T[slot]) in detector.tokens.bins for slot in slots] == [True] * 12
    others = torch.ones(len(micro.token_ids_T), dtype=torch.bool)
    others[slots] = False
    for before, after in zip(spy.read, spy.read[1:], strict=False):
        assert torch.equal(before[others], after[others])
        with torch.no_grad():
            embeddings = spy.model.embed(micro)
            embeddings.embeds_TD = before
            logits = spy.model.head(spy.model.forward(embeddings, micro), slots - 1)
        expected = (logits[:, ids] / 0.5).softmax(-1) @ table[ids]
        torch.testing.assert_close(after[slots], expected, atol=1e-5, rtol=1e-5)


def test_first_forward_is_that_of_the_network_itself(detector):
    model = load(detector)
    (micro,) = micro_batches(StepBatch(detector.examples), 10_000)
    with torch.no_grad():
        ours = model.head(model.forward(model.embed(micro), micro), micro.predict_index_N)
        torch.testing.assert_close(ours, model.logits(micro))


def test_unrolled_gradients_reach_the_earlier_forwards(detector):
    """The whole loss as a function of a weight, by finite differences in float64."""
    gradients = {}
    for unrolled in (True, False):
        settings = {"softctx_iterations": 2, "softctx_unrolled": unrolled}
        _, found = step(detector, detector.examples[:1], settings)
        gradients[unrolled] = found["model.language_model.norm.weight"]
    model, ours = load(detector), objective(detector, softctx_iterations=2)
    model.network.double()
    model.images.clear()
    batch = StepBatch(detector.examples[:1])
    (micro,) = micro_batches(batch, 10_000)
    weight, losses = model.network.model.language_model.norm.weight, []
    place = int((gradients[True] - gradients[False]).abs().argmax())
    for change in (1e-5, -2e-5):
        with torch.no_grad():
            weight[place] += change
            losses.append(ours.terms(model, micro, ours.counts(batch))[0].item())
    slope = (losses[0] - losses[1]) / 2e-5
    assert gradients[True][place].item() == pytest.approx(slope, rel=2e-2)
    assert abs(gradients[False][place].item() - slope) > 2 * abs(gradients[True][place].item() - slope)


def test_a_false_positive_changes_no_target(detector):
    """What a rollout gets wrong is context: its tokens are in no mask, whatever they are."""
    target = rolled_out(detector).rollouts[0].sequences[0]
    text = [detector.tokens.piece(id_).decode() for id_ in target.token_ids]
    start = "".join(text).index('{"desc": "x"')
    places = [place for place in range(len(text)) if start <= len("".join(text[:place])) < start + 40]
    assert places
    weights = target_of(target).weights
    assert not any(target.mask[place] or weights[place] for place in places)


def test_a_description_without_weight_is_not_trained(detector):
    config = MatchingConfig(desc_ce_weight=0.0)
    examples = examples_of(detector.tasks, detector.tokenizer, detector.tokens, config, 512)
    plain = detector.examples[0]
    hidden = [place for place in range(len(plain)) if plain.mask[place] and not examples[0].mask[place]]
    assert "".join(detector.tokens.piece(plain.token_ids[place]).decode() for place in hidden) == "red"
    assert examples[0].mask[-1]  # the end of the turn


def test_a_batch_of_two_kinds_is_refused(detector):
    plain = records.Sequence([1, 2, 3], [False, True, True])
    (micro,) = micro_batches(StepBatch([detector.examples[0], plain]), 10_000)
    with pytest.raises(TrainingError, match="a sequence has no targets of rollout matching"):
        objective(detector).terms(load(detector), micro, {})
