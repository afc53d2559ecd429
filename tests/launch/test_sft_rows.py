"""SFT on rows: what is held out, cut and counted, how many steps epochs are, and the loss of held-out rows."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import DataError
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.records import Message
from slipstream.runlog import read_metrics
from slipstream.view import make_view
from tests.refusals import refuses

RUN = """
[model]
path = "{model}"
[data]
path = "rows.jsonl"
[algorithm]
kind = "sft"
[training]
epochs = 1.5
prompts_per_batch = 8
learning_rate = 1e-3
[run]
threads = 1
"""
ROWS = [{"prompt": f"{number} + 1?", "completion": str(number + 1)} for number in range(40)]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)


@pytest.fixture
def run_file(model, tmp_path):
    write(tmp_path / "rows.jsonl", ROWS)
    path = tmp_path / "sft.toml"
    path.write_text(RUN.format(model=model))
    return path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(run_file, *flags):
    return prepare(load_config(run_file, flags))


def carry_out(run_file, folder, *flags, resume=False):
    ready = prepared(run_file, *flags)
    return train(ready, folder, make_view("none"), resume=resume), read_metrics(folder)


def losses(rows):
    return {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}


def transformers_loss(model, rows):
    """Mean over all target tokens, by float64 weights."""
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), ChatTokenizer(model)
    total, count = 0.0, 0
    for row in rows:
        sequence = tokenizer.training_tokens([Message("user", row["prompt"]), Message("assistant", row["completion"])])
        pairs = zip(sequence.token_ids, sequence.mask, strict=True)
        labels = torch.tensor([[token if trained else -100 for token, trained in pairs]])
        with torch.no_grad():
            mean = network(input_ids=torch.tensor([sequence.token_ids]), labels=labels).loss.item()
        total, count = total + mean * sequence.num_trainable, count + sequence.num_trainable
    return total / count


def test_epochs_become_steps(run_file):
    plan = prepared(run_file).plan
    assert plan.config.training.steps == 8, "60 rows in batches of 8"
    reasons = {item.name: item.reason for item in plan.derived}
    assert reasons["training.steps"] == "1.5 passes over 40 training prompts in batches of 8"
    with refuses("training.warmup_steps"):
        prepared(run_file, "--training.warmup_steps", "9")


def test_the_loss_of_held_out_rows(run_file, model, tmp_path):
    held_out = [{"prompt": f"{number} + 1?", "completion": str(number + 1)} for number in range(35, 60)]
    flags = ("--data.eval_path", write(tmp_path / "eval.jsonl", held_out), "--evaluation.every", "3")
    ready = prepared(run_file, *flags)
    assert (ready.num_items, len(ready.held_out), ready.dropped) == (35, 25, {"also_held_out": 5})
    notes = {note.name: (note.value, note.how) for note in ready.plan.notes}
    assert notes["evaluations"] == (4, "of the loss of 25 held-out rows")
    assert not ready.uses_engine

    result, rows = carry_out(run_file, tmp_path / "run", *flags)
    assert ready.config.training.steps == result.steps == 7
    found = losses(rows)
    assert [*found] == [0, 3, 6, 7]
    assert found[7] < found[0]
    assert result.held_out_loss["eval/loss"] == found[7]
    for step, weights in ((0, model), (7, result.checkpoint)):
        assert transformers_loss(weights, held_out) == pytest.approx(found[step], abs=2e-5)


def test_training_is_the_same_with_and_without_held_out_rows(run_file, tmp_path):
    held_out = write(tmp_path / "eval.jsonl", [{"prompt": "100 + 1?", "completion": "101"}])
    _, without = carry_out(run_file, tmp_path / "without", "--training.steps", "4")
    more = ("--data.eval_path", held_out, "--evaluation.every", "1")
    _, beside = carry_out(run_file, tmp_path / "beside", "--training.steps", "4", *more)
    assert [row["train/loss"] for row in without] == [row["train/loss"] for row in beside if row["step"]]


def test_a_resumed_run_has_the_same_batches_and_losses(run_file, tmp_path):
    flags = ("--data.eval_fraction", "0.2", "--evaluation.every", "2")
    _, whole = carry_out(run_file, tmp_path / "whole", *flags, "--training.steps", "6")
    carry_out(run_file, tmp_path / "parts", *flags, "--training.steps", "4")
    _, parts = carry_out(run_file, tmp_path / "parts", *flags, "--training.steps", "6", resume=True)
    assert [*losses(whole)] == [0, 2, 4, 6]
    assert losses(parts) == losses(whole)
    names = ("train/loss", "train/grad_norm")
    assert [[row.get(name) for name in names] for row in parts] == [[row.get(name) for name in names] for row in whole]


def test_long_rows_are_dropped_by_default_or_cut(run_file, tmp_path):
    write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "1?", "completion": "2" * 70}])
    rows = [{"prompt": "2?", "completion": "3" * 70}, {"prompt": "3", "completion": "4"}]
    held_out = write(tmp_path / "eval.jsonl", rows)
    by_default = prepared(run_file, "--data.eval_path", held_out)
    assert (by_default.num_items, len(by_default.held_out)) == (40, 1)
    assert by_default.dropped == {"conversation_too_long": 1, "eval_conversation_too_long": 1}
    cut = prepared(run_file, "--data.too_long", "truncate", "--data.max_length", "50")
    assert (cut.num_items, max(cut.examples.lengths), cut.facts.data.max_sequence_tokens) == (41, 50, 50)
    assert cut.dropped == {"end of a conversation, beyond 50 tokens": 1}
    with pytest.raises(DataError, match=r"row 41 of .*rows.jsonl has \d+ tokens, more than the model.s context of 64"):
        prepared(run_file, "--data.too_long", "error")
    with pytest.raises(DataError, match=r"every one of the 41 conversations is longer than data.max_length = 4: use"):
        prepared(run_file, "--data.max_length", "4")
    with refuses("data.max_length"):
        prepared(run_file, "--data.max_length", "65")


def test_everything_carries_loss(run_file):
    answers, everything = (prepared(run_file, "--algorithm.train_on", name).examples for name in ("all", "everything"))
    assert all(sum(each.mask) == len(each) - 1 for each in everything)
    assert everything.num_trainable > 2 * answers.num_trainable


def test_a_warning_where_thinking_is_on_and_nothing_thinks(run_file, model, tmp_path):
    def warned(*flags):
        return [text for text in prepared(run_file, *flags).plan.warnings if "<think>" in text]

    assert warned() == []
    thinks = tmp_path / "thinks"
    shutil.copytree(model, thinks)
    template = thinks / "chat_template.jinja"
    template.write_text(
        "{% if enable_thinking is defined and enable_thinking is false %}{% endif %}" + template.read_text()
    )
    (text,) = warned("--model.path", str(thinks))
    assert text.startswith("none of the 40 answers to imitate holds a <think>")
    assert warned("--model.path", str(thinks), "--model.thinking", "false") == []
    write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "a", "completion": "<think>b</think>c"}])
    assert warned("--model.path", str(thinks)) == []


def test_the_first_rows_alone_and_the_others_counted(run_file):
    ready = prepared(run_file, "--data.max-examples", "8")
    assert len(ready.conversations) == 8
    assert ready.dropped == {"row beyond data.max_examples": 32}
    assert [message.content for message in ready.conversations[7]] == ["7 + 1?", "8"]
