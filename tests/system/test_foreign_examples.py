"""examples/foreign: what users of verl, TRL and verifiers have, trained for a few steps by SFT and RL with real vLLM.

A rollout's turns are text that the environment saw. Here the tokens that were trained on are decoded again, and must be
that text, turn by turn.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.commands.small_models.tiny_qwen3 import END, new_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.runlog import read_exit, read_metrics
from slipstream.runlog.batches import read_batch

from ..envs.verifiers_interpreters import interpreter

EXAMPLES = Path(__file__).parents[2] / "examples" / "foreign"
STEPS = 3
"""Of RL; SFT has all its steps, as without them no rewards differ and RL trains on nothing."""
SMALL = ("--evaluation.num_tasks", 20, "--run.threads", 1)

pytestmark = [pytest.mark.full, pytest.mark.engine]


class Example:
    """One of the examples, copied with its data into a folder of the test's own."""

    def __init__(self, name, script, folder, command, python=sys.executable):
        self.name, self.folder, self.command = name, folder, command
        files = folder / "examples" / "foreign"
        files.mkdir(parents=True)
        for file in (EXAMPLES / script, *EXAMPLES.glob(f"{name}_*.toml")):
            (files / file.name).write_text(file.read_text())
        subprocess.run([python, files / script], cwd=folder, check=True, timeout=120)
        self.model = new_model(folder / "models/small")

    def run(self, kind, *options):
        """One stage; returns the run's folder."""
        file, folder = self.folder / f"examples/foreign/{self.name}_{kind}.toml", self.folder / "run" / kind
        verb = {"sft": "sft", "rl": "train"}[kind]
        self.command(verb, file, *SMALL, *options, "--run.folder", folder).ok()
        assert read_exit(folder).status == "finished"
        return folder

    def learns(self, metrics, *options):
        """Both stages; RL's rollouts of all batches."""
        (weights,) = self.run("sft", *options).glob("checkpoints/*/weights")
        few = ("--training.steps", STEPS, "--training.warmup_steps", 1, "--training.prompts_per_batch", 16)
        folder = self.run("rl", "--model.path", weights, *few, *options)
        rows = read_metrics(folder)
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        assert all(row["probe/abs_logprob_diff"] < 1e-3 for row in rows)
        assert all(row["eval/num_failed"] == 0 for row in rows if "eval/num_failed" in row)
        for row in rows[1:]:
            assert not [name for name in row if name.startswith("dropped/") and row[name]]
            assert all(name in row for name in metrics), sorted(row)
        batches = [read_batch(folder, step)[0] for step in range(STEPS)]
        assert all(len(batch.rollouts) == 16 * 8 and not batch.dropped for batch in batches)
        tokenizer = ChatTokenizer(self.model)
        rollouts = [rollout for batch in batches for rollout in batch.rollouts]
        for rollout in rollouts:
            check_tokens(rollout, tokenizer)
        return rollouts


def check_tokens(rollout, tokenizer):
    """The tokens marked as sampled are the turns, and nothing else is."""
    said = [message.content for message in rollout.turns if message.role == "assistant"] or [rollout.completion]
    assert len(said) == len(rollout.turn_spans) == rollout.num_turns
    for text, span in zip(said, rollout.turn_spans, strict=True):
        sequence = rollout.sequences[span.sequence]
        assert all(sequence.mask[span.start : span.end])
        assert tokenizer.decode(sequence.token_ids[span.start : span.end]).removesuffix(END) == text
    assert sum(span.end - span.start for span in rollout.turn_spans) == rollout.num_sampled
    for sequence in rollout.sequences:
        assert len(sequence.logprobs) == len(sequence.token_ids)
        assert all(value < 0 for value, sampled in zip(sequence.logprobs, sequence.mask, strict=True) if sampled)


def test_rows_of_verl(command, tmp_path):
    example = Example("verl", "verl_rows.py", tmp_path, command)
    rollouts = example.learns(["reward/in_order"])
    backward = [rollout for rollout in rollouts if rollout.prompt.startswith("Backward")]
    assert 0 < len(backward) < len(rollouts)
    for rollout in rollouts:
        assert rollout.reward == float(rollout.completion == rollout.answer)
        assert ("in_order" in rollout.metrics) == rollout.prompt.startswith("Sorted")


def test_a_function_of_trl(command, tmp_path):
    example = Example("trl", "trl_rewards.py", tmp_path, command)
    rollouts = example.learns(["reward/repeats"])
    assert all("repeats" in rollout.metrics for rollout in rollouts)


def test_an_environment_of_verifiers(command, tmp_path):
    python = interpreter("0.3")
    example = Example("verifiers", "verifiers_boxes.py", tmp_path, command, python)
    rollouts = example.learns(["reward/right", "reward/opened", "reward/num_turns"], "--environment.python", python)
    assert all(rollout.num_turns == rollout.metrics["num_turns"] for rollout in rollouts)
