"""Whole runs through the real command with real vLLM: from a new model to an accuracy; signals; dead engines.

Judged by `metrics.jsonl`, `events.jsonl`, `exit.json` and exit codes.
"""

import json
import signal

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.orchestrator.control.handle import Orchestrator
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.runlog.evaluations import find_evaluation, read_evaluation
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder

from .conftest import LETTERS, learned

pytestmark = pytest.mark.engine

COIN = ("--environment.settings", "{coin = true}", "--evaluation", "false")
SHORT, LONG, ENDLESS = (("--training.steps", str(steps)) for steps in (2, 25, 100_000))


def test_from_a_new_model_to_an_accuracy(command, run_file, tmp_path):
    shape = ("--hidden-size", "64", "--num-layers", "2", "--context-length", "64")
    assert command("model", "new", tmp_path / "model", *shape).wait()[0] == 0
    common = ("--environment.settings", '{letters = "ab", size = 500}', "--run.folder")
    where = (tmp_path / "sft", "--model.path", tmp_path / "model", "--json")
    weights = json.loads(command("sft", sft_file(run_file), *common, *where).ok())["weights"]
    assert read_exit(tmp_path / "sft").status == "finished"
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "sft")]
    assert losses[-1] < 0.5 * losses[0]

    options = ("--evaluation.num_tasks", "100", "--training.prompts_per_batch", "16", "--model.path")
    summary = json.loads(command("train", run_file, *common, tmp_path / "grpo", *options, weights, "--json").ok())
    assert summary["steps"] == 3
    stages = {stage["name"]: stage["seconds"] for stage in summary["startup"]["stages"]}
    parts = {f"start vLLM: {part}" for part in ("import vLLM", "load weights", "measure memory", "make the KV cache")}
    assert {"read model and data", "start vLLM", *parts, "first update", "first rollouts"} <= stages.keys()
    assert stages["start vLLM"] < summary["startup"]["seconds"]
    began = {stage["name"]: stage["began_s"] for stage in summary["startup"]["stages"]}
    assert began["start vLLM"] < stages["read model and data"], "vLLM is imported meanwhile"
    check_run(tmp_path / "grpo", steps=3)
    rows = read_metrics(tmp_path / "grpo")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 3]
    assert summary["eval/accuracy"] == rows[-1]["eval/accuracy"]

    # The run's own settings, and its last weights.
    metrics = json.loads(command("eval", tmp_path / "grpo", "--evaluation.samples_per_task", "4", "--json").ok())
    results = read_evaluation(find_evaluation(tmp_path / "grpo"))
    assert metrics["results"] == str(find_evaluation(tmp_path / "grpo"))
    assert [len(task.samples) for task in results.tasks] == [4] * 100
    assert metrics["eval/accuracy"] == sum(task.accuracy for task in results.tasks) / 100
    assert metrics["eval/worst@4"] < metrics["eval/mean@4"] < metrics["eval/best@4"] < metrics["eval/pass@4"]
    assert metrics["eval/worst@4"] < metrics["eval/maj@4"] < metrics["eval/best@4"]
    assert len({sample.text for task in results.tasks for sample in task.samples}) > 1
    assert metrics["eval/num_tasks"] == 100
    assert metrics["eval/num_failed"] == 0
    assert 0 < metrics["eval/accuracy_low"] < metrics["eval/accuracy"] < metrics["eval/accuracy_high"] < 1
    assert abs(metrics["eval/accuracy"] - summary["eval/accuracy"]) <= 0.1


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_requests_that_wait_in_the_engine_give_the_same_run(kind, slipstream, run_file, tmp_path, monkeypatch):
    """DAPO's refills come after the version that the batch waited for."""
    begun, begin = [], Orchestrator.begin
    monkeypatch.setattr(Orchestrator, "begin", lambda self, step: begun.append(step) or begin(self, step))
    rewards = ("--environment.settings", "{parity = true}", "--algorithm.group_size", "2")  # by what was said alone
    options = (*rewards, "--evaluation", "false", "--algorithm.kind", kind, "--weights.bridge", "single_copy")
    options = (*options, "--training.steps", "4")
    early, late = tmp_path / "early", tmp_path / "late"
    assert slipstream("train", run_file, *options, "--run.folder", early)[0] == 0
    assert begun == [1, 2, 3]
    monkeypatch.setattr("slipstream.launch.run.begins_early", lambda config: False)
    assert slipstream("train", run_file, *options, "--run.folder", late)[0] == 0
    assert begun == [1, 2, 3]
    assert learned(early) == learned(late)
    assert any(row.get("rollout/refills") for row in read_metrics(early)) == (kind == "dapo")
    ends = [read_model_folder(folder / "checkpoints/step-000004/weights") for folder in (early, late)]
    assert describe(ends[0]) == describe(ends[1])
    check_run(early, steps=4)


def test_ctrl_c_leaves_a_checkpoint_and_no_process(command, run_file, tmp_path):
    folder = tmp_path / "run"
    run = command("train", run_file, *COIN, *ENDLESS, "--run.folder", folder)
    run.until(lambda: num_steps(folder) >= 2)
    assert run.engines()
    run.process.send_signal(signal.SIGINT)
    check_interrupted(run, folder)


@pytest.mark.real_start
@pytest.mark.full
def test_a_second_signal_ends_at_once(command, run_file, tmp_path):
    folder = tmp_path / "run"
    run = command("train", run_file, *COIN, *LONG, "--run.folder", folder)
    run.until(lambda: run.engines() and (folder / "events.jsonl").exists())
    # The same one twice may count as one, and after a pause the first may have ended the run: so two, at once.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        run.process.send_signal(number)
    # Which of two that wait is handled first is not ours to say.
    assert run.wait()[0] in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert read_exit(folder) is None
    assert run.left_behind() == []


def sft_file(run_file):
    """The same as an SFT run without evaluation."""
    path = run_file.with_name("sft.toml")
    text = path.read_text().replace("steps = 3", "steps = 60").replace("learning_rate = 1e-3", "learning_rate = 4e-3")
    path.write_text("evaluation = false\n" + text[: text.index("[weights]")] + text[text.index("[run]") :])
    assert str(LETTERS) in path.read_text()
    return path


def num_steps(folder):
    """Steps whose metrics are written; -1 before the first row."""
    rows = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    return rows[-1]["step"] if rows else -1


def check_run(folder, steps):
    """A finished run proved every version, and its checkpoint is the version that it proved last."""
    assert read_exit(folder).status == "finished"
    rows, events = read_metrics(folder), read_events(folder)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert max(row["probe/abs_logprob_diff"] for row in rows) <= 0.001
    published, applied = ([(e["version"], e["digest"]) for e in events if e["kind"] == k] for k in ("publish", "apply"))
    assert applied == published
    assert [version for version, _ in applied] == [f"0.{step}" for step in range(steps + 1)]
    weights = folder / "checkpoints" / f"step-{steps:06d}" / "weights"
    assert digest(describe(read_model_folder(weights))) == applied[-1][1]
    assert AutoModelForCausalLM.from_pretrained(weights).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(weights).chat_template


def check_interrupted(run, folder):
    code, _, _ = run.wait(200)
    report = read_exit(folder)
    assert (code, report.status, report.exit_code) == (130, "interrupted", 130)
    checkpoints = [event["step"] for event in read_events(folder) if event["kind"] == "checkpoint"]
    assert checkpoints[-1] >= num_steps(folder) > 0
    assert (folder / "checkpoints" / f"step-{checkpoints[-1]:06d}" / "manifest.json").is_file()
    assert run.left_behind() == []
