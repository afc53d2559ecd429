"""SFT's loss and gradients against the plain model's, one sequence at a time, and against TRL's own code."""

import pytest
import torch
from tests.trainer.plain import loss_and_gradients, plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.trainer.loss import SFTObjective


@pytest.fixture
def ours(make_learner, make_batch, gradients_of):
    batch = make_batch(advantages=False)
    learner = make_learner(150)
    metrics = learner.forward_backward(batch, SFTObjective())
    assert metrics["num_micro_batches"] > 1
    return batch, metrics, gradients_of(learner)


def check(ours, loss, network):
    _, metrics, gradients = ours
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    named = dict(network.named_parameters())
    assert gradients.keys() == named.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, named[name].grad.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [100, 150, 10_000])
def test_sft_equals_the_plain_model_however_it_is_cut(
    packing, micro_batch_tokens, model_folder, make_learner, make_batch, gradients_of
):
    batch = make_batch(advantages=False)
    loss, gradients = loss_and_gradients(plain(model_folder), batch.sequences)
    learner = make_learner(micro_batch_tokens, packing=packing)
    metrics = learner.forward_backward(batch, SFTObjective())
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    num_micro_batches = {100: 4, 150: 3, 10_000: 1}[micro_batch_tokens] if packing else 9
    assert metrics["num_micro_batches"] == num_micro_batches
    ours = gradients_of(learner)
    torch.testing.assert_close(ours, gradients, atol=1e-5, rtol=1e-5)


def test_equals_trl(ours, model_folder, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    batch, metrics, _ = ours
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    trainer = trl.SFTTrainer(
        model=network,
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        train_dataset=Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[-100, 2]]}),
        args=trl.SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none"
        ),
    )

    def padded(rows, value):
        rows = [torch.tensor(row) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = [sequence.token_ids for sequence in batch.sequences]
    labels = [
        [token if trained else -100 for token, trained in zip(s.token_ids, s.mask, strict=True)]
        for s in batch.sequences
    ]
    inputs = {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        "labels": padded(labels, -100),
    }
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    check(ours, loss, network)
    for theirs, name in (("entropy", "entropy"), ("mean_token_accuracy", "token_accuracy")):
        assert metrics[name] == pytest.approx(trainer._metrics["train"][theirs][0], abs=1e-5)
