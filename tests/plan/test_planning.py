"""What `slipstream plan` does without a run's model, machine or plugin."""

import importlib.metadata
import json

import pytest

from slipstream.cli.app import main
from slipstream.errors import ConfigError
from slipstream.inference.preimport import check_plugin
from slipstream.plan.preflight.model_folder import has_tokenizer, has_weights

RUN = """
[model]
path = "model"
[environment]
name = "letters.py"
[algorithm]
kind = "grpo"
[training]
steps = 4
prompts_per_batch = 8
"""
LETTERS = """
from slipstream.records import Message, Task


def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {number}", "answer": "a"} for number in range(min(num_tasks, 40))]


def reward(task, completion):
    return 1.0
"""
BARE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
    "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 4096, "vocab_size": 1000, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def bare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BARE))
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "rl.toml").write_text(RUN)
    return tmp_path


def planned(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "rl.toml", *arguments, "--json"])
    return caught.value.code, json.loads(capsys.readouterr().out)


def test_a_configuration_alone_is_planned_for_another_card_and_is_no_run(bare, capsys):
    code, made = planned(capsys, "--device", "h200", "--gpus", "2")
    assert code == 0
    assert made["config"]["model"]["path"] == str(bare / "model")
    assert made["config"]["run"]["placement"] == "separate"
    assert "h200" in made["device"]
    assert any("no weights and no tokenizer" in warning for warning in made["warnings"])
    assert not has_weights(bare / "model")
    assert not has_tokenizer(bare / "model")
    with pytest.raises(SystemExit) as caught:
        main(["train", "rl.toml", "--json"])
    assert caught.value.code == ConfigError.exit_code
    assert json.loads(capsys.readouterr().out)["error"] == "ConfigError"


def test_what_does_not_fit_is_one_json_with_plan_and_error(bare, capsys):
    code, made = planned(capsys, "--device-memory", "3")
    assert (code, made["error"], made["exit_code"]) == (ConfigError.exit_code, "DoesNotFit", ConfigError.exit_code)
    assert made["message"] == made["refusals"][0]
    assert made["config"]["training"]["micro_batch_tokens"]


def test_layers_in_which_packed_sequences_see_one_another_are_not_packed(bare, capsys):
    layers = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4}
    (bare / "model" / "config.json").write_text(json.dumps(BARE | layers))
    code, made = planned(capsys, "--device", "h100")
    assert code == 0
    assert made["config"]["training"]["packing"] is False
    [why] = [each["reason"] for each in made["derived"] if each["name"] == "training.packing"]
    assert "linear_attention" in why
    code, made = planned(capsys, "--device", "h100", "--training.packing", "true")
    assert code == ConfigError.exit_code
    assert "training.packing" in made["message"]


def test_the_engines_plugin_is_looked_for_before_anything_starts(monkeypatch):
    check_plugin()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(ConfigError, match=r"vllm\.general_plugins"):
        check_plugin()
