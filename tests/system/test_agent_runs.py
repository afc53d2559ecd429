"""Runs that train an agent: a function or a command that sends requests of its own, with real vLLM."""

import json
import sys
from pathlib import Path

import pytest

from slipstream.runlog import read_metrics
from slipstream.runlog.batches import read_batch
from slipstream.trainer.model.small.tiny_qwen3 import new_model

from .test_real_runs import check_run

pytestmark = pytest.mark.engine

AGENTS = Path(__file__).with_name("agents.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=256)


def table(**settings):
    return "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items()) + "}"


TASKS = {"tasks": f"{AGENTS}:tasks", "reward": f"{AGENTS}:reward"}
KINDS = {"callable": {"callable": f"{AGENTS}:solve"}, "command": {"command": [sys.executable, str(AGENTS)]}}


@pytest.mark.parametrize("kind", ["callable", pytest.param("command", marks=pytest.mark.servers)])
def test_an_agent_is_trained_on_what_was_sampled(command, run_file, model, tmp_path, kind):
    folder = tmp_path / "run"
    settings = ("--environment.name", "agent", "--environment.settings", table(**TASKS, **KINDS[kind]))
    options = ("--model.path", model, "--sampling.max_tokens", "8", "--evaluation.num_tasks", "4")
    size = ("--training.steps", "2", "--environment.run_timeout_s", "60")
    command("train", run_file, *settings, *options, *size, "--run.folder", folder).ok()
    check_run(folder, steps=2)
    rows = read_metrics(folder)
    for row in rows[1:]:
        assert (row["reward/agent_requests"], row["reward/agent_rows"], row["reward/agent_undelivered"]) == (2, 1, 0)
        assert row["rollout/turns"] == 2
        assert not [name for name in row if name.startswith("dropped/") and row[name]]
    for step in range(2):
        for rollout in read_batch(folder, step)[0].rollouts:
            (sequence,) = rollout.sequences
            assert len(rollout.turn_spans) == 2
            assert sequence.num_trainable == sum(span.end - span.start for span in rollout.turn_spans)
            assert [span.version for span in sequence.versions] == [f"0.{step}"]
            assert all(value < 0 for value, sampled in zip(sequence.logprobs, sequence.mask, strict=True) if sampled)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])
    out = command("trace", folder, sample["id"], "--token", "3").ok()
    assert rows[-1] is not None
    assert sample["sequences"][0]["versions"][0][1] in out


@pytest.mark.servers
def test_sessions_are_divided_between_two_engines(command, run_file, model, tmp_path):
    folder = tmp_path / "run"
    settings = ("--environment.name", "agent", "--environment.settings", table(**TASKS, **KINDS["callable"]))
    options = (
        "--model.path",
        model,
        "--sampling.max_tokens",
        "8",
        "--evaluation",
        "false",
        "--inference.replicas",
        "2",
    )
    size = ("--training.steps", "2", "--training.staleness", "1", "--weights.bridge", "disk")
    command("train", run_file, *settings, *options, *size, "--run.folder", folder).ok()
    rows = read_metrics(folder)
    for number in (0, 1):
        assert sum(row.get(f"replica_{number}/requests", 0) for row in rows) > 0
    versions = {
        span.version
        for step in range(2)
        for rollout in read_batch(folder, step)[0].rollouts
        for sequence in rollout.sequences
        for span in sequence.versions
    }
    assert versions <= {"0.0", "0.1"}
