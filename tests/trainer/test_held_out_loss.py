"""The loss of held-out sequences against transformers' own, in float64, and over ranks."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import records
from slipstream.trainer.learner import Scores
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.metrics import held_out_loss
from slipstream.trainer.packing import StepBatch


@pytest.fixture
def sequences(make_batch):
    return make_batch(num=23, advantages=False).sequences


def test_it_is_transformers_loss_over_all_tokens(sequences, make_learner, model_folder):
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    total, count = 0.0, 0
    for sequence in sequences:
        pairs = zip(sequence.token_ids, sequence.mask, strict=True)
        labels = torch.tensor([[token if trained else -100 for token, trained in pairs]])
        with torch.no_grad():
            mean = network(input_ids=torch.tensor([sequence.token_ids]), labels=labels).loss
        total += mean.item() * sequence.num_trainable
        count += sequence.num_trainable
    learner, parts = make_learner(150), []
    found = held_out_loss(learner.forward, sequences, 400, parts.append)
    assert len(parts) > 1
    assert sum(parts) == len(sequences)
    assert found["eval/loss"] == pytest.approx(total / count, abs=2e-6)
    assert found["eval/perplexity"] == pytest.approx(torch.tensor(total / count).exp().item(), rel=1e-5)
    assert all(parameter.grad is None for parameter in learner.model.network.parameters())
    trained = learner.forward_backward(StepBatch([*sequences]), SFTObjective())
    assert found["eval/loss"] == pytest.approx(trained["loss"], abs=2e-6), "and what training on them would report"


def test_it_is_a_mean_over_tokens_not_over_sequences():
    def forward(part):
        return Scores([torch.full((sequence.num_trainable,), -float(len(sequence))) for sequence in part], [])

    sequences = [records.Sequence([0] * size, [False] + [True] * (size - 1)) for size in (2, 5)]
    for at_once in (1, 100):
        assert held_out_loss(forward, sequences, at_once)["eval/loss"] == pytest.approx((1 * 2 + 4 * 5) / 5)


def test_a_huge_loss_has_a_finite_exponential():
    found = held_out_loss(lambda part: Scores([torch.tensor([-1e4])], []), [records.Sequence([0, 0], [False, True])], 8)
    assert found["eval/loss"] == 1e4
    assert found["eval/perplexity"] < float("inf")


def test_calls_get_consecutive_sequences_of_at_most_so_many_tokens():
    calls, measured = [], []

    def forward(part):
        calls.append([len(sequence) for sequence in part])
        return Scores([torch.zeros(1) for _ in part], [])

    sequences = [records.Sequence([0] * size, [False] * (size - 1) + [True]) for size in (2, 3, 1, 4, 9, 4, 2)]
    held_out_loss(forward, sequences, 5, measured.append)
    assert calls == [[2, 3], [1, 4], [9], [4], [2]]
    assert measured == [2, 2, 1, 1, 1]
