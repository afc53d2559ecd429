"""A policy that calls tools, from SFT to RL, with real vLLM: examples/environments/calculator.py and its run files."""

import json
from pathlib import Path

import pytest

from slipstream.runlog import read_metrics

from .test_real_runs import check_run

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples/environments"
FEW = ("--environment.num_train_tasks", "4", "--evaluation", "false", "--run.threads", "1")


@pytest.fixture
def imitator(command, tmp_path):
    """A model that knows the demonstrations of four tasks by heart."""
    shape = ("--hidden-size", "64", "--num-layers", "2", "--context-length", "384")
    assert command("model", "new", tmp_path / "model", *shape).wait()[0] == 0
    steps = ("--training.steps", "120", "--training.prompts_per_batch", "8", "--training.learning_rate", "8e-3")
    options = ("--model.path", tmp_path / "model", *FEW, *steps, "--run.folder", tmp_path / "sft", "--json")
    out = command("sft", EXAMPLES / "calculator_sft.toml", *options).ok()
    return json.loads(out)["weights"]


@pytest.mark.parametrize("streams", ["files", pytest.param("memory", marks=pytest.mark.full)])
def test_calls_are_made_answered_and_trained_on(command, imitator, tmp_path, streams):
    folder = tmp_path / "run"
    size = ("--training.steps", "2", "--training.warmup_steps", "0", "--training.prompts_per_batch", "4")
    options = ("--model.path", imitator, *FEW, *size, "--run.streams", streams, "--run.folder", folder)
    command("train", EXAMPLES / "calculator_rl.toml", *options).ok()
    check_run(folder, steps=2)
    rows = read_metrics(folder)
    assert all(row["reward/tool_calls"] > 0 for row in rows[1:])
    samples = [json.loads(line) for path in folder.glob("samples*.jsonl") for line in path.open()]
    called = [sample for sample in samples if any(turn["role"] == "tool" for turn in sample.get("turns", []))]
    answered = [sample for sample in called if sample["stop"] == "answer" and not sample["metrics"]["tool_failures"]]
    assert answered, samples
    for sample in answered:
        call, result, answer = sample["turns"]
        assert call["content"].startswith('<tool_call>{"name":"calculator","arguments":{"expression":')
        expression = json.loads(call["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert result["content"] == str(eval(expression["arguments"]["expression"]))
        assert answer == {"role": "assistant", "content": sample["completion"]}
        (sequence,) = sample["sequences"]  # the second turn continues the first one's tokens
        assert len(sequence["sampled"]) == 2
        assert sum(end - start for start, end in sequence["sampled"]) == len(sequence["logprobs"])
