"""Gradients of a network by preferences, in micro-batches, against the losses of whole batches by transformers in
float64: all sequences of a step in one graph."""

import copy
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import records
from slipstream.errors import DataError
from slipstream.trainer.learner import Reference, predicted
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch
from slipstream_preferences.losses import PAIR_LOSSES, kto_baseline, kto_loss
from slipstream_preferences.method import WeightedLikelihood
from slipstream_preferences.settings import PreferencesConfig
from slipstream_preferences.weights import weigh

LENGTHS = [(4, 3, 6), (7, 5, 2), (2, 8, 8)]
"""Tokens of a prompt and of its two completions."""


@pytest.fixture(scope="module")
def start(model_folder, tmp_path_factory):
    """Another model of the same shape, for log-ratios that are not 0."""
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("models") / "start"
    network.save_pretrained(folder)
    return folder


def pairs():
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for prompt, *completions in LENGTHS:
        shared = torch.randint(40, (prompt,), generator=generator).tolist()
        for length in completions:
            own = torch.randint(40, (length,), generator=generator).tolist()
            sequences.append(records.Sequence(shared + own, [False] * prompt + [True] * length))
    return sequences


def log_ratios(networks, sequences):
    """By networks in float64."""
    found = []
    for sequence in sequences:
        ids, mask = torch.tensor([sequence.token_ids]), torch.tensor(sequence.mask[1:])
        each = [network(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0] for network in networks]
        found.append((each[0] - each[1].detach())[mask].sum())
    return torch.stack(found)


def exchanged(sequences):
    """Each prompt with the next sequence's completion, as long as the longest sequence at most."""
    found, most = [], max(map(len, sequences))
    for one, other in zip(sequences, [*sequences[1:], sequences[0]], strict=True):
        start, after = one.mask.index(True), other.mask.index(True)
        mask = [False] * start + [True] * (len(other) - after)
        found.append(records.Sequence((one.token_ids[:start] + other.token_ids[after:])[:most], mask[:most]))
    return found


@pytest.mark.parametrize("room", [8, 400], ids=["apart", "together"])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "kto"])
def test_the_gradient_is_that_of_the_whole_loss(loss, room, make_learner, model_folder, start):
    learner = make_learner(room)
    model = PolicyModel.load(start, "float32")
    reference = Reference(functools.partial(predicted, model), 256)
    judgements = [1.0, 0.0] * 3 if loss != "kto" else [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    section = PreferencesConfig(loss=loss, beta=0.3)
    step = StepBatch(pairs(), judgements)
    metrics = weigh(step, section, learner, reference)
    learner.forward_backward(step, WeightedLikelihood())
    ours = {name: holder.grad for name, holder in learner.optimizer._holders.items()}

    networks = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for f in (model_folder, start)]
    ratios, labels = log_ratios(networks, pairs()), torch.tensor(judgements) > 0
    if loss != "kto":
        own = ratios / torch.tensor([n for _, *both in LENGTHS for n in both]) if loss == "ipo" else ratios
        exact = PAIR_LOSSES[loss](own[0::2], own[1::2], 0.3).mean()
        margins = (ratios[0::2] - ratios[1::2]).detach()
        assert metrics["preference/accuracy"] == pytest.approx((margins > 0).double().mean().item())
        assert metrics["preference/margin"] == pytest.approx(0.3 * margins.mean().item(), rel=1e-4)
    else:
        baseline = kto_baseline(log_ratios(networks, exchanged(pairs())))
        exact = kto_loss(ratios, labels, baseline, 0.3).mean()
        assert metrics["preference/reference_point"] == pytest.approx(baseline.item(), rel=1e-4, abs=1e-6)
    assert metrics["loss"] == pytest.approx(exact.item(), rel=1e-4)
    assert metrics["preference/chosen_reward"] == pytest.approx(0.3 * ratios[labels].mean().item(), rel=1e-3)
    exact.backward()
    for name, parameter in networks[0].named_parameters():
        torch.testing.assert_close(ours[name].double(), parameter.grad, rtol=1e-3, atol=1e-5)


def test_records_of_others_stay_as_they_are(make_learner, start):
    sequences = pairs()
    before = copy.deepcopy(sequences)
    reference = Reference(functools.partial(predicted, PolicyModel.load(start, "float32")), 256)
    weigh(StepBatch(sequences, [1.0, 0.0] * 3), PreferencesConfig(), make_learner(), reference)
    assert sequences == before


def test_kto_has_another_completion_to_compare_with(make_learner, start):
    reference = Reference(functools.partial(predicted, PolicyModel.load(start, "float32")), 256)
    alone = StepBatch(pairs()[:1], [1.0])
    with pytest.raises(DataError, match="there is one alone: give more rows"):
        weigh(alone, PreferencesConfig(loss="kto"), make_learner(), reference)
