"""Logits in float32 that never exist whole: against float64, and against the ordinary head."""

import pytest
import torch
from tests.trainer.steps import learner_of

from slipstream import records
from slipstream.algo import logprobs as algo_sampling
from slipstream.algo.logprobs import HeadLogits, greedy_tokens, processed_logprobs
from slipstream.errors import ConfigError
from slipstream.trainer.learner import score
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch

RULES = [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.3, 5, 0.9, 0.0), (1.0, 0, 1.0, 0.1)]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("chunk", [11, 2**24])
def test_values_and_gradients_are_those_of_the_whole_product(rules, chunk, monkeypatch):
    monkeypatch.setattr(algo_sampling, "_CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    ids = torch.randint(11, (9,), generator=generator)
    factors = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    found = []
    for whole in (True, False):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        logprobs, entropy = processed_logprobs(h @ w.t() if whole else HeadLogits(h, w), ids, *rules)
        (factors[0] * logprobs + factors[1] * entropy).sum().backward()
        found.append((logprobs, entropy, h.grad, w.grad))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=1e-10)
    assert torch.equal(greedy_tokens(HeadLogits(hidden, weight)), (hidden @ weight.t()).argmax(-1))


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


def test_a_network_that_changes_its_logits_afterwards_is_refused(model_folder):
    model = PolicyModel.load(model_folder, "bfloat16")
    forward = model.network.forward

    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 2.0 * torch.tanh(output.logits / 2.0)
        return output

    model.network.forward = capped
    with pytest.raises(ConfigError, match="changes its logits after the output head"):
        model.use_fp32_head()
