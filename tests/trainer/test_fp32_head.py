"""Logits in float32 that never exist whole: against float64, and against the ordinary head."""

import pytest
import torch
from tests.trainer.steps import learner_of

from slipstream import records
from slipstream.algo.logprobs import HeadLogits, processed_logprobs
from slipstream.trainer.learner import score
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch


def test_bfloat16_inputs_are_multiplied_exactly():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (3 * torch.randn(n, 64, generator=generator) for n in (20, 300))
    hidden, weight, ids = hidden.bfloat16(), weight.bfloat16(), torch.arange(20)
    exact, _ = processed_logprobs(hidden.double() @ weight.double().t(), ids)
    chunked, _ = processed_logprobs(HeadLogits(hidden, weight), ids)
    rounded, _ = processed_logprobs(hidden @ weight.t(), ids)
    assert (chunked.double() - exact).abs().max() < 1e-4
    assert (rounded.double() - exact).abs().mean() > 100 * (chunked.double() - exact).abs().mean()


@pytest.fixture
def sequences():
    torch.manual_seed(2)
    tokens = torch.randint(3, 90, (4, 30)).tolist()
    return [records.Sequence(own, [False] * 8 + [True] * 22, [0.0] * 30) for own in tokens]


def test_in_float32_it_changes_nothing(model_folder, sequences, gradients_of):
    learners = []
    for fp32_head in (False, True):
        model = PolicyModel.load(model_folder, "float32", fp32_head=fp32_head)
        learner = learner_of(model, 64)
        metrics = learner.forward_backward(StepBatch(sequences), SFTObjective())
        learners.append((metrics, gradients_of(learner), learner.forward(sequences).logprobs))
    (ordinary, gradients, logprobs), (ours, own_gradients, own_logprobs) = learners
    assert ours == pytest.approx(ordinary, rel=1e-5)
    torch.testing.assert_close(own_gradients, gradients, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(logprobs, own_logprobs, atol=1e-5, rtol=1e-5)


def test_its_names_and_its_adapter_stay(model_folder, sequences):
    plain, model = (PolicyModel.load(model_folder, "bfloat16", fp32_head=on) for on in (False, True))
    assert [name for name, _ in model.named_weights()] == [name for name, _ in plain.named_weights()]
    (base,) = score(model.without_adapter(), sequences[:1], micro_batch_tokens=64).logprobs
    assert torch.equal(base, score(model, sequences[:1], micro_batch_tokens=64).logprobs[0])
