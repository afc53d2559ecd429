"""DPO and KTO through the command, and the example."""

import json
import random
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.runlog import read_metrics
from tests.refusals import refuses

EXAMPLES = Path(__file__).parents[2] / "examples/preferences"
RUN = """
[model]
path = "{model}"
[data]
path = "rows.jsonl"
[algorithm]
kind = "sft"
[preferences]
loss = "{loss}"
[training]
steps = 30
prompts_per_batch = 16
learning_rate = 3e-3
[run]
threads = 1
"""


@pytest.fixture
def write(model, tmp_path):
    """Writes a run file with rows of short and long answers; a tenth of the prompts is much longer than the others."""

    def write(kind):
        draw, rows = random.Random(0), []
        for number in range(96):
            left, right = draw.randrange(10), draw.randrange(10)
            good, bad = f"{left}", f"{left}{right}"  # the shorter answer is preferred
            row = {"prompt": f"{left}+{right}=" + " " * (20 if number % 10 == 0 else 0)}
            labelled = {"completion": good if number % 2 else bad, "label": bool(number % 2)}
            rows.append(row | (labelled if kind == "kto" else {"chosen": good, "rejected": bad}))
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / f"{kind}.toml"
        path.write_text(RUN.format(model=model, loss="sigmoid" if kind == "dpo" else kind))
        return path

    return write


def rows_of(folder):
    return read_metrics(folder)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_model_learns_what_is_preferred(kind, command, write, tmp_path):
    options = ("--data.eval_fraction", "0.2", "--run.folder", tmp_path / "run")
    command("train", write(kind), *options).ok()
    before, first, *_, last = rows_of(tmp_path / "run")
    assert before["eval/loss"] == pytest.approx(0.6931 if kind == "dpo" else 0.5, abs=1e-3)
    assert last["eval/loss"] < before["eval/loss"]
    assert last["eval/preference_chosen_reward"] > last["eval/preference_rejected_reward"]
    assert first["train/loss"] == pytest.approx(0.6931 if kind == "dpo" else 0.5, abs=1e-3)
    assert last["train/loss"] < first["train/loss"]
    assert last["preference/chosen_reward"] > last["preference/rejected_reward"] + 0.05
    if kind == "dpo":
        assert last["preference/accuracy"] > 0.6


@pytest.mark.full
@pytest.mark.quick("ranks")
@pytest.mark.parametrize(
    "options",
    [("--training.micro_batch_tokens", "16"), ("--training.ranks", "2"), ("--training.packing", "false")],
    ids=["small rows", "ranks", "unpacked"],
)
def test_rows_and_ranks_change_rounding_only(options, command, write, tmp_path):
    """A pair whose sequences lie in different rows, and on different ranks, has the gradient of a pair in one row."""
    path, steps = write("dpo"), ("--training.steps", "4")
    command("train", path, *steps, "--run.folder", tmp_path / "one").ok()
    command("train", path, *steps, *options, "--run.folder", tmp_path / "other").ok()
    for one, other in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "other"), strict=True):
        for name in ("train/loss", "train/grad_norm", "preference/margin"):
            assert other[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5)


@pytest.mark.full
def test_it_goes_on_where_it_was(command, write, tmp_path):
    path = write("kto")
    command("train", path, "--training.steps", "8", "--run.folder", tmp_path / "whole").ok()
    options = ("--run.folder", tmp_path / "half", "--run.checkpoint_every", "4")
    command("train", path, "--training.steps", "4", *options).ok()
    command("train", path, "--training.steps", "8", *options, "--resume").ok()
    whole, again = rows_of(tmp_path / "whole")[-1], rows_of(tmp_path / "half")[-1]
    assert again["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-4)


@pytest.mark.full
def test_an_adapter_is_its_own_reference(command, write, tmp_path):
    command("train", write("dpo"), "--lora.rank", "4", "--run.folder", tmp_path / "run").ok()
    rows = rows_of(tmp_path / "run")
    assert rows[0]["preference/margin"] == 0.0
    assert rows[-1]["preference/margin"] > 0.01


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--lora.rank", "4"), marks=pytest.mark.full),
     pytest.param(("--training.ranks", "2"), marks=pytest.mark.full)],
    ids=["whole", "adapter", "ranks"],
)  # fmt: skip
def test_a_reward_model_learns_the_order_and_transformers_loads_it(options, command, write, tmp_path):
    file = write("reward")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[16:]))
    (tmp_path / "held_out.jsonl").write_text("".join(lines[:16]))
    given = ("--data.eval_path", tmp_path / "held_out.jsonl", "--training.learning_rate", "1e-3")
    command("train", file, *given, "--run.folder", tmp_path / "run", *options).ok()
    before, *_, last = rows_of(tmp_path / "run")
    assert before["eval/loss"] == pytest.approx(0.6931, abs=0.05)
    assert last["eval/preference_accuracy"] == 1.0
    assert last["eval/loss"] < 0.3 * before["eval/loss"]
    (path,) = tmp_path.glob("run/checkpoints/*/weights")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    margins = []
    for row in map(json.loads, lines[:16]):
        texts = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
                 for name in ("chosen", "rejected")]  # fmt: skip
        batch = tokenizer.apply_chat_template(texts, padding=True, return_tensors="pt", return_dict=True)
        (chosen,), (rejected,) = model(**batch).logits.tolist()
        margins.append(chosen - rejected)
    assert min(margins) > 0.0
    assert sum(margins) / len(margins) == pytest.approx(last["eval/preference_margin"], rel=1e-3)


@pytest.mark.full
def test_a_reward_model_goes_on_where_it_was(command, write, tmp_path):
    path = write("reward")
    command("train", path, "--training.steps", "8", "--run.folder", tmp_path / "whole").ok()
    options = ("--run.folder", tmp_path / "half", "--run.checkpoint_every", "4")
    command("train", path, "--training.steps", "4", *options).ok()
    command("train", path, "--training.steps", "8", *options, "--resume").ok()
    whole, again = rows_of(tmp_path / "whole")[-1], rows_of(tmp_path / "half")[-1]
    assert again["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--data.eval_fraction", "0.1", "--environment.name", "letters.py"), "held-out rows or the tasks of"),
        (("--algorithm.train_on", "last"), "algorithm.train_on has no effect under"),
        (("--algorithm.kind", "kto"), 'set algorithm.kind = "sft" and preferences.loss = "kto"'),
        (("--algorithm.kind", "dpo"), 'set algorithm.kind = "sft" and preferences.loss = "sigmoid"'),
        (("--preferences.loss", "dpo"), 'use "sigmoid"'),
        (("--algorithm.pair_loss", "ipo"), "did you mean preferences.loss"),
        (("--algorithm.kl_coef", "0.2"), "algorithm.kl_coef applies to grpo, not to sft"),
        (("--algorithm.kind", "grpo", "--environment.name", "letters.py"), "preferences. applies to sft, not to grpo"),
    ],
)
def test_what_has_no_effect_or_another_name_is_refused(options, says, write):
    with pytest.raises(ConfigError, match=says):
        load_config(write("dpo"), options)


@pytest.mark.parametrize("steps", [1, 4])
def test_kto_wants_two_completions_in_an_optimizer_step(steps, write):
    options = ("--training.prompts_per_batch", str(steps), "--training.updates_per_batch", str(steps))
    with refuses("training.prompts_per_batch") as refusal:
        load_config(write("kto"), options)
    assert f"use at least {2 * steps}" in str(refusal.value)
    load_config(write("dpo"), options)


@pytest.mark.parametrize(("pairs", "steps"), [(1, 3), (40, 4)])
def test_a_pair_counts_as_one(pairs, steps, write):
    path = write("dpo")
    rows = path.with_name("rows.jsonl")
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:pairs]))
    path.write_text(path.read_text().replace("steps = 30", "epochs = 1.5" if pairs > 1 else "epochs = 3"))
    plan = prepare(load_config(path)).plan
    assert plan.config.training.steps == steps
    lowered = "training.prompts_per_batch was lowered from 16: the training data has only one prompt"
    assert (lowered in plan.warnings) == (pairs == 1)
    notes = {note.name: note.value for note in plan.notes}
    assert notes["sequences per batch"] == 2 * plan.config.training.prompts_per_batch


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.quick("dpo")
@pytest.mark.parametrize("kind", ["dpo", "kto", "rl"])
def test_the_example(kind, command, tmp_path, monkeypatch):
    from slipstream.commands.small_models.tiny_qwen3 import new_model

    monkeypatch.setattr(sys, "argv", ["pairs.py", "--number", "100", "--folder", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "pairs.py"))
    model = new_model(tmp_path / "model", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    data = tmp_path / ("labelled.jsonl" if kind == "kto" else "pairs.jsonl")
    common = ("--model.path", model, "--training.steps", 3, "--training.prompts_per_batch", 16)
    options = (*common, "--evaluation.num_tasks", 8, "--run.folder", tmp_path / "run", "--data.path", data)
    if kind == "rl":
        held_out = tmp_path / "held_out.jsonl"
        rewards = ("--data.path", data, "--data.eval_path", held_out, "--run.folder", tmp_path / "reward")
        assert "in the right order" in command("train", EXAMPLES / "reward.toml", *common, *rewards).ok(300)
        rubric = f'[{{ reward = "model:{tmp_path / "reward"}" }}, {{ reward = "exact", weight = 0.0 }}]'
        rows = ("--environment.settings.path", data, "--environment.settings.eval_path", held_out)
        options = (*options[:-2], *rows, "--environment.settings.rubric", rubric)
    command("train", EXAMPLES / f"{kind}.toml", *options).ok(300)
    rows = rows_of(tmp_path / "run")
    assert "eval/accuracy" in rows[-1]
    assert ("reward/exact" if kind == "rl" else "preference/chosen_reward") in rows[-1]
