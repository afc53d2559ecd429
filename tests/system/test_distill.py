"""On-policy distillation through the whole loop: with scripted engines, and with two real ones."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.scripted_engine import ScriptedEngine
from transformers import AutoModelForCausalLM

from slipstream.algo.divergences import divergence
from slipstream.commands.replay import replay
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.orchestrator.teacher_engine import agreement_warning
from slipstream.runlog import read_events, read_metrics
from slipstream.runlog.batches import read_batch
from slipstream.view import make_view
from tests.refusals import refuses

from .conftest import Command, write_run_file

EXAMPLE = Path(__file__).parents[2] / "examples/distillation/likeliest.toml"
DISTILL = ("--algorithm.kind", "distill", "--evaluation", "false")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Of the student's family, with other weights."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    return new_model(folder, hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, context_length=96, seed=7)


class Pair:
    """A run whose two engines are scripted: the teacher's scores are those of its folder."""

    def __init__(self, scripted, run_file, teacher):
        self.scripted, self.run_file, self.teacher = scripted, run_file, teacher
        self.engine = None
        """The teacher's."""

    def run(self, *overrides, on_request=lambda teacher, request: None):
        def make_engine(plan, logs, on_event):
            how = {"max_restarts": plan.max_restarts, "on_event": on_event}
            engine = ScriptedEngine(self.scripted.letter, self.scripted._logprobs, **how)
            settings = plan.settings
            if settings.model == str(self.teacher):
                engine.location, self.engine, self.settings = settings.model, engine, settings
                engine.on_request = functools.partial(on_request, engine)
            return engine

        options = (*DISTILL, "--teacher.path", str(self.teacher), *overrides)
        prepared = prepare(load_config(self.run_file, options))
        train(prepared, self.scripted.folder, make_view("none"), make_engine=make_engine)
        return read_metrics(self.scripted.folder)


@pytest.fixture
def pair(scripted, run_file, teacher):
    return Pair(scripted, run_file, teacher)


def test_a_run_learns_from_its_teacher_alone(pair):
    rows = pair.run("--training.steps", "4", "--algorithm.group_size", "1")
    assert [row["teacher/kl_k3"] > 0 and row["train/grad_norm"] > 0 for row in rows[1:]] == [True] * 4
    assert all(row["teacher/logprob"] < 0 for row in rows[1:])
    assert pair.settings.version.digest == pair.scripted.events("teacher")[0]["digest"]


def test_a_reward_may_have_its_say_as_well(pair):
    rows = pair.run("--algorithm.kind", "grpo", "--teacher.coef", "0.1", "--training.staleness", "1")
    assert all("teacher/kl" in row and "reward/signal_fraction" in row for row in rows[1:])


def test_a_teacher_that_dies_comes_back(pair):
    def die_once(teacher, request):
        if teacher.num_requests == 5 and not teacher.num_restarts:
            teacher.is_alive = False

    rows = pair.run(on_request=die_once)
    assert len(rows) == 4
    assert len(pair.scripted.events("teacher_restart")) == 1
    assert not pair.scripted.events("engine_restart")


@pytest.mark.parametrize(
    ("option", "fails", "said"),
    [
        ("--inference.max_restarts=0", lambda t: setattr(t, "is_alive", t.num_requests < 5), "the engine died, and"),
        ("--inference.request_timeout_s=1", lambda t: setattr(t, "is_hanging", True), "the engine did not answer"),
    ],
)
def test_one_that_may_not_come_back_or_hangs_ends_the_run(pair, option, fails, said):
    with pytest.raises(Exception, match=f"the teacher's engine: {said}"):
        pair.run(*option.split("="), on_request=lambda teacher, request: fails(teacher))


def test_the_model_itself_can_teach_nothing(pair, model, tmp_path):
    pair.teacher = shutil.copytree(model, tmp_path / "copy")
    with pytest.raises(ConfigError, match="exactly the weights that the run starts from"):
        pair.run()


def test_a_teacher_with_nothing_more_to_teach_is_told_of_once():
    told = []
    listen = agreement_warning(SimpleNamespace(warning=lambda message, **fields: told.append(message)))
    listen(0, {"probe/abs_logprob_diff": 1e-3})
    listen(1, {"probe/abs_logprob_diff": 1e-3, "teacher/abs_difference": 0.3})
    assert not told
    for step in (2, 3):
        listen(step, {"probe/abs_logprob_diff": 1e-3, "teacher/abs_difference": 1.5e-3})
    assert len(told) == 1
    assert "nothing more to teach" in told[0]


def test_another_vocabulary_is_refused_before_anything_starts(run_file, teacher, tmp_path):
    other = shutil.copytree(teacher, tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"a ":', 1))
    with refuses("teacher.path"):
        prepare(load_config(run_file, (*DISTILL, "--teacher.path", str(other))))
    with refuses("teacher.path"):
        prepare(load_config(run_file, (*DISTILL, "--teacher.path", str(tmp_path / "none"))))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--teacher.path", "x", "--teacher.url", "http://h/v1"), "are both given"),
        (("--teacher.coef", "2.0"), "are neither given"),
        ((), "learns from a teacher only"),
        (("--teacher.url", "host:8000"), "is no address"),
        (("--teacher.url", "http://h/v1", "--sampling.temperature", "0.7"), "which is always 1"),
        (("--teacher.path", "x", "--teacher.key_variable", "KEY"), "has no effect without teacher.url"),
        (("--algorithm.kind", "sft", "--teacher.path", "x"), "not to sft"),
    ],
)
def test_contradictions_are_said_before_the_start(run_file, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(run_file, (*DISTILL, *options))


def test_the_model_as_its_own_teacher_is_refused(run_file, model):
    with pytest.raises(ConfigError, match="the model itself"):
        load_config(run_file, (*DISTILL, "--teacher.path", str(model)))


@pytest.fixture(scope="module")
def taught(model, teacher, tmp_path_factory):
    """A student and a teacher that imitated for longer."""
    folder = tmp_path_factory.mktemp("taught")
    sft_file = write_run_file(model, folder).with_name("sft.toml")
    sft_file.write_text(sft_file.read_text().replace("[weights]\nprobe_tasks = 2\n", ""))
    found = []
    for name, start, steps in (("student", model, 20), ("taught", teacher, 60)):
        options = ("--training.steps", steps, "--training.learning_rate", 3e-3, "--evaluation", "false")
        Command("sft", sft_file, "--model.path", start, "--run.folder", folder / name, *options).ok()
        found.append(next((folder / name / "checkpoints").glob(f"step-{steps:06}/weights")))
    return found


@pytest.mark.full
@pytest.mark.engine
def test_a_tiny_student_comes_nearer_to_a_trained_teacher(command, run_file, taught, tmp_path):
    """Two engines and a trainer. Rewards are measured and not trained on."""
    options = ("--model.path", taught[0], "--teacher.path", taught[1], "--run.folder", tmp_path / "run",
               "--training.steps", 30, "--training.learning_rate", 3e-3, "--sampling.temperature", 0.8,
               "--training.prompts_per_batch", 16, "--algorithm.kind", "distill")  # fmt: skip
    run = command("train", run_file, *options)
    run.ok(400)
    assert not run.left_behind()
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 31
    assert all(row["probe/abs_logprob_diff"] < 0.001 for row in rows)
    first, last = ([row["teacher/kl"] for row in part] for part in (rows[1:4], rows[-3:]))
    assert sum(last) < 0.5 * sum(first)
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"]
    # Two unbiased estimators of one number, on real scores at the sampling temperature.
    means = [sum(row[name] for row in rows[1:]) / 30 for name in ("teacher/kl", "teacher/kl_k3")]
    assert means[0] == pytest.approx(means[1], rel=0.2)
    event = next(event for event in read_events(tmp_path / "run") if event["kind"] == "teacher")
    assert "scores_at_temperature" in event["patches"]


def exact_divergence(run, step, student, teacher, temperature, beta):
    """Of the sampled tokens of a kept batch, over the whole vocabulary, by transformers in float32."""
    batch, _ = read_batch(run, step)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (student, teacher)]
    values = []
    for sequence in (sequence for rollout in batch.rollouts for sequence in rollout.sequences):
        with torch.no_grad():
            logits = [model(torch.tensor([sequence.token_ids])).logits[0, :-1].double() for model in models]
        own, other = ((each / temperature).log_softmax(-1) for each in logits)
        values.append(divergence(own, other, beta)[torch.tensor(sequence.mask[1:])])
    return torch.cat(values).mean().item()


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.quick("all")
@pytest.mark.parametrize(
    ("top_k", "beta", "further"),
    [
        (None, 1.0, ()),
        (8, 0.0, ("--run.streams", "files")),
        (8, 0.5, ("--training.ranks", "2", "--training.staleness", "1")),
    ],
    ids=["all", "forward, by files", "between, on two ranks"],
)
def test_a_student_learns_from_the_likeliest_tokens(top_k, beta, further, command, run_file, taught, tmp_path):
    """With all tokens the loss is the whole divergence."""
    size = json.loads((taught[0] / "config.json").read_text())["vocab_size"]
    options = ("--model.path", taught[0], "--teacher.path", taught[1], "--run.folder", tmp_path / "run",
               "--teacher.top_k", top_k or size, "--teacher.jsd_beta", beta, "--evaluation", "false",
               "--training.steps", 12, "--training.learning_rate", 3e-3, "--sampling.temperature", 0.8,
               "--training.prompts_per_batch", 8, "--algorithm.kind", "distill", "--run.keep_batches", 12)  # fmt: skip
    run = command("train", run_file, *options, *further)
    run.ok(400)
    assert not run.left_behind()
    rows = read_metrics(tmp_path / "run")[1:]
    first, last = ([row["teacher/divergence"] for row in part] for part in (rows[:3], rows[-3:]))
    assert sum(last) < 0.7 * sum(first)
    batch, _ = read_batch(tmp_path / "run", 0)
    widths = {sequence.streams["teacher_top_ids"].width for r in batch.rollouts for sequence in r.sequences}
    assert widths == {top_k or size}
    exact = exact_divergence(tmp_path / "run", 0, *taught, 0.8, beta)
    if top_k is None:
        assert rows[0]["teacher/tail"] < 1e-5
        assert rows[0]["teacher/divergence"] == pytest.approx(exact, rel=1e-4)
        # Importance weights between engine and trainer are 1 up to rounding.
        assert rows[0]["train/loss"] == pytest.approx(exact, rel=1e-3)
    else:
        assert 0.0 < rows[0]["teacher/tail"] < 1.0
        assert 0.0 < rows[0]["teacher/divergence"] <= exact, "joining outcomes makes no divergence larger"


def test_the_example_is_planned(tmp_path):
    student, teacher = (
        new_model(tmp_path / name, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=context)
        for name, context in (("student", 256), ("teacher", 512))
    )
    options = ("--model.path", str(student), "--teacher.path", str(teacher), "--run.folder", str(tmp_path / "run"))
    plan = prepare(load_config(EXAMPLE, options)).plan
    assert plan.config.teacher.top_k == 8
    assert "the teacher's likeliest tokens in a batch" in {note.name for note in plan.notes}


def test_a_replay_asks_no_teacher(pair, scripted):
    """Its scores are in the batch."""
    pair.run("--run.checkpoint_every", "2", "--run.keep_checkpoints", "2")
    pair.teacher = None
    found = replay(scripted.folder, 2)
    assert (found.begins, found.batches, found.is_exact, found.tolerance) == ("step-000002", (2,), True, 0.0)
    assert {each.name: each for each in found.metrics}["teacher/kl"].difference == 0.0
