"""Whole runs in which only an adapter is trained: scripted, and through the real command with real vLLM."""

import json

import pytest

from slipstream.commands.export import export
from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.runlog import read_events, read_metrics
from slipstream.view import make_view
from slipstream.weights.adapter_folder import read_adapter_config, read_adapter_tensors
from slipstream.weights.fingerprint import describe
from slipstream.weights.model_files import read_model_folder

LORA = ("--lora.rank", "4", "--lora.alpha", "8", "--training.learning_rate", "1e-2")


def test_the_disk_bridge_publishes_the_adapter_merged(scripted, model, tmp_path):
    kl = ("--algorithm.kl_coef", "0.1")
    assert scripted.run(*LORA, *kl, "--weights.bridge", "disk").status == "finished"
    rows = scripted.metrics
    assert all(row["probe/abs_logprob_diff"] < 1e-5 for row in rows)
    # The first step is the base itself; after it the adapter has moved away.
    assert rows[1]["train/kl_reference"] == pytest.approx(0, abs=1e-7)
    assert rows[3]["train/kl_reference"] > 1e-6
    weights = scripted.folder / "checkpoints" / "step-000003" / "weights"
    assert read_adapter_config(weights).base == str(model)
    export(weights.parent, tmp_path / "merged", merged=True)
    published = dict(read_model_folder(scripted.folder / "weights" / "0.3"))
    assert describe(read_model_folder(tmp_path / "merged")) == describe(published.items())
    base = dict(read_model_folder(model))
    assert base.keys() == published.keys()
    assert sum(not base[name].equal(published[name]) for name in base) == 7


def test_a_resumed_adapter_run_ends_on_the_same_bits(scripted, run_file, tmp_path):
    options = (*LORA, "--algorithm.kind", "sft", "--evaluation", "false")
    text = run_file.with_name("sft.toml").read_text().replace("[weights]\nprobe_tasks = 2\n", "")
    run_file.write_text(text)
    steps = "--training.steps"
    first = scripted.folder
    scripted.run(*options, steps, "4")
    scripted.folder = tmp_path / "again"
    scripted.run(*options, steps, "2")
    scripted.run(*options, steps, "4", "--run.folder", str(scripted.folder), resume=True)
    ends = [read_adapter_tensors(folder / "checkpoints/step-000004/weights") for folder in (first, scripted.folder)]
    assert describe(ends[0].items()) == describe(ends[1].items())


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (("--lora.rank", "2"), "lora.rank = 2, and the adapter of checkpoint .* has 4: set lora.rank = 4, or start"),
        (("--lora.dora", "true"), "lora.dora = true, and .* has false: set lora.dora = false"),
        ((), "is an adapter, and there is no .lora.: set lora.rank = 4"),
    ],
)
def test_another_adapter_is_refused_before_the_model_is_loaded(scripted, run_file, other, says):
    options = (*LORA, "--algorithm.kind", "sft", "--evaluation", "false")
    run_file.write_text(run_file.with_name("sft.toml").read_text().replace("[weights]\nprobe_tasks = 2\n", ""))
    scripted.run(*options, "--training.steps", "1")
    before = read_events(scripted.folder)
    given = (*(options if other else options[len(LORA) :]), "--training.steps", "2", *other)
    prepared = prepare(load_config(run_file, given))
    with pytest.raises(ConfigError, match=says):
        train(prepared, scripted.folder, make_view("none"), resume=True)
    assert read_events(scripted.folder) == before


@pytest.mark.engine
def test_sft_then_grpo_from_its_adapter_then_resume_evaluate_and_export(command, run_file, tmp_path):
    sft = run_file.with_name("sft.toml")
    sft.write_text(sft.read_text().replace("[weights]\nprobe_tasks = 2\n", ""))
    out = command("sft", sft, *LORA, "--evaluation", "false", "--run.folder", tmp_path / "sft", "--json").ok()
    adapter = json.loads(out)["weights"]

    # A new model never says the letter: rewards that alternate give GRPO something to learn from.
    coin = ("--environment.settings", "{coin = true}")
    options = (*LORA, *coin, "--lora.path", adapter, "--algorithm.kl_coef", "0.05")
    options += ("--run.folder", tmp_path / "grpo", "--json")
    command("train", run_file, *options).ok()
    rows = read_metrics(tmp_path / "grpo")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["probe/abs_logprob_diff"] < 0.001 for row in rows)
    assert rows[1]["train/kl_reference"] == 0.0, "the reference is the adapter that was started from"
    assert rows[3]["train/kl_reference"] > 0.0
    events = read_events(tmp_path / "grpo")
    digests = {event["version"]: event["digest"] for event in events if event["kind"] == "publish"}
    assert len(set(digests.values())) == 4
    assert {event["version"]: event["digest"] for event in events if event["kind"] == "apply"} == digests

    # Now one step ahead: new adapters come while the next batch is being made with the one before.
    ahead = ("--training.staleness", "1", "--training.steps", "6")
    out = command("train", run_file, *options, *ahead, "--resume").ok()
    summary = json.loads(out)
    assert summary["steps"] == 6
    rows = read_metrics(tmp_path / "grpo")
    assert all(row["probe/abs_logprob_diff"] < 0.001 for row in rows)
    # How far generation has come when a version is there is a matter of speed; the bound is not.
    assert 1.0 in [row["staleness/max"] for row in rows[-2:]]
    assert max(row["staleness/max"] for row in rows[1:]) <= 1.0
    assert summary["weights"].endswith("step-000006/weights")

    out = command("eval", tmp_path / "grpo", "--json").ok()
    assert json.loads(out)["results"].startswith(str(tmp_path / "grpo/evaluations"))
    assert json.loads(out)["eval/num_failed"] == 0
    assert json.loads(out)["eval/accuracy"] == summary["eval/accuracy"]

    command("export", tmp_path / "grpo/checkpoints/step-000006", tmp_path / "whole", "--merged").ok()
    assert {name for name, _ in read_model_folder(tmp_path / "whole")}
    code, _, err = command("export", tmp_path / "grpo/checkpoints/step-000006", tmp_path / "whole").wait()
    assert code == 2
    assert "exists already" in err


def test_dora_is_published_merged(scripted, model):
    assert scripted.run(*LORA, "--lora.dora", "true").status == "finished"
    rows = scripted.metrics
    assert all(row["probe/abs_logprob_diff"] < 1e-5 for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    weights = scripted.folder / "checkpoints" / "step-000003" / "weights"
    assert read_adapter_config(weights).dora
    base, published = (dict(read_model_folder(folder)) for folder in (model, scripted.folder / "weights" / "0.3"))
    assert sum(not base[name].equal(published[name]) for name in base) == 7


@pytest.mark.parametrize("bridge", ["lora", "single_copy"])
def test_dora_is_refused_where_the_adapter_travels_alone(run_file, bridge):
    with pytest.raises(ConfigError, match=f'lora.dora = true needs an engine .* weights.bridge = "{bridge}"'):
        load_config(run_file, (*LORA, "--lora.dora", "true", "--weights.bridge", bridge))


@pytest.mark.full
@pytest.mark.engine
def test_dora_with_a_live_engine_then_evaluated_from_its_folder(command, run_file, tmp_path):
    """bfloat16, from memory to memory, only what changed."""
    options = (*LORA, "--lora.dora", "true", "--environment.settings", "{coin = true}", "--model.dtype", "bfloat16")
    more = ("--weights.bridge", "broadcast", "--weights.delta", "true", "--run.folder", tmp_path / "run", "--json")
    out = command("train", run_file, *options, *more).ok(500)
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 4
    assert all(row["probe/abs_logprob_diff"] < 0.03 for row in rows)
    assert all(0 < row["update/changed_fraction"] < 1 for row in rows[2:])
    adapter = json.loads(out)["weights"]
    out = command("eval", run_file, *options, "--lora.path", adapter, "--json").ok()
    code, _, err = command("chat", adapter, "--json").wait()
    assert code == 2
    assert "slipstream export --merged" in err
