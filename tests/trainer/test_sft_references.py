"""SFT's loss and gradients against a float64 reference written from the definition, and against TRL's own code."""

import pytest
import torch
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


def test_equals_the_definition(ours, model_folder):
    """Minus the mean of log p of the trained tokens, token by token."""
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    batch, terms, right = ours[0], [], 0
    for sequence in batch.sequences:
        logits = network(input_ids=torch.tensor([sequence.token_ids])).logits[0]
        for place, token in enumerate(sequence.token_ids):
            if sequence.mask[place]:
                row = logits[place - 1]
                terms.append(torch.exp(row).sum().log() - row[token])
                right += int(row.argmax() == token)
    loss = torch.stack(terms).mean()
    loss.backward()
    check(ours, loss, network)
    assert ours[1]["token_accuracy"] == pytest.approx(right / len(terms))


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
