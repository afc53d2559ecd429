"""`slipstream replay` on what real training loops leave: the recorded loss, bit for bit, or one sentence."""

import json
import math
import os
import stat

import msgspec
import pytest

from slipstream import records
from slipstream.commands import replay as tool
from slipstream.config import load_config
from slipstream.launch.prepare import prepare
from slipstream.plan.decided import planned_config
from slipstream.processes.files import cannot_write
from slipstream.runlog import batches, read_metrics
from slipstream.runlog.batches import kept_steps, read_batch

from .conftest import Left, Scripted, has_row, kill_when

SIX = ("--training.steps", "6", "--run.checkpoint_every", "2", "--evaluation", "false", "--run.keep_checkpoints", "2")
PPO = ("--algorithm.kind", "ppo", "--training.updates_per_batch", "2", "--algorithm.kl_coef", "0.01")
LORA = ("--lora.rank", "4", "--weights.bridge", "disk", "--training.updates_per_batch", "2")
SCHEDULED = ("--training.schedule", "cosine", "--training.warmup_steps", "1", "--training.epochs_per_batch", "2")


@pytest.fixture(scope="module")
def left(model, tmp_path_factory):
    return Left(model, tmp_path_factory.mktemp("left"), "--evaluation", "false")


@pytest.fixture
def run(left):
    """A finished run of three steps."""
    return left.again()


@pytest.fixture
def refused(slipstream):
    """Replays a step, which must end with this code in one sentence: that."""

    def replay(folder, step, code):
        found, _, err = slipstream("replay", folder, step)
        assert (found, err[:7], err.count("\n")) == (code, "error: ", 1)
        return err

    return replay


@pytest.fixture
def replayed(slipstream):
    """Replays a step, which must give the recorded loss bit for bit; what the command prints as JSON."""

    def run(folder, step):
        before = files_of(folder)
        code, out, err = slipstream("replay", folder, step, "--json")
        assert code == 0, err
        assert files_of(folder) == before
        found = json.loads(out)
        assert found["is_exact"]
        assert found["tolerance"] == 0
        row = next(row for row in read_metrics(folder) if row["step"] == step + 1)
        for name, metric in found["metrics"].items():
            assert metric == {"name": name, "recorded": row[name], "replayed": row[name], "difference": 0}, name
        trained = {name for name in row if name.startswith(("train/", "value/"))}
        assert trained <= found["metrics"].keys()
        return found

    return run


def files_of(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    # Processes of a run that was killed take their heartbeats and empty files of stacks with them, a moment later.
    return {path: path.read_bytes() for path in found if path.parent.name not in ("stacks", "heartbeats")}


def change_loss(folder, step, change):
    """Have the run have recorded another loss of batch `step`; returns the true one."""
    file, lines = folder / "metrics.jsonl", []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row["step"] == step + 1:
            before = row["train/loss"]
            row["train/loss"] = change(before)
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))
    return before


@pytest.mark.quick("grpo")
@pytest.mark.parametrize("more", [(), PPO, LORA, SCHEDULED], ids=["grpo", "ppo", "lora", "schedule"])
def test_the_loss_is_the_recorded_one(scripted, replayed, more):
    assert scripted.run(*SIX, *more, "--run.keep_batches", "2").status == "finished"
    # 0 follows the start model, 4 a checkpoint that can be resumed from; that of step 6 is followed by nothing.
    assert kept_steps(scripted.folder) == [0, 4, 5]
    assert all(row["train/loss"] != 0 for row in scripted.metrics[1:])
    found = [replayed(scripted.folder, step) for step in (0, 4, 5)]
    begins = [(each["begins"], each["batches"]) for each in found]
    assert begins == [(tool.START, [0]), ("step-000004", [4]), ("step-000004", [4, 5])]


def test_also_from_the_start_model_through_all_batches(run, replayed):
    found = replayed(run, 2)
    assert (found["begins"], found["batches"]) == (tool.START, [0, 1, 2])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("more", [(), pytest.param(PPO, marks=pytest.mark.full, id="ppo")])
def test_after_kill_and_resume(scripted, model, run_file, tmp_path, replayed, more):
    """Killed in batch 5, the checkpoint is that of step 3: batch 4 is made again, with other letters."""
    options = (
        *SIX,
        "--run.checkpoint_every",
        "3",
        "--run.keep_batches",
        "6",
        "--run.async_checkpoints",
        "false",
        *more,
    )
    killed = Scripted(model, run_file, tmp_path / "killed")
    # A thread of its own writes the batches.
    kill_when(
        lambda: has_row(killed.folder, 5) and len(kept_steps(killed.folder)) >= 5,
        lambda: killed.run(*options, on_request=hangs_at(5)),
    )
    assert kept_steps(killed.folder) == [0, 1, 2, 3, 4]
    before = replayed(killed.folder, 4)
    assert (before["begins"], before["batches"]) == ("step-000003", [3, 4])
    scripted.folder = killed.folder
    other = {"script": lambda ids, seed: scripted.say("ba"[seed // 2 % 2])}
    report = scripted.run(*options, "--run.folder", str(killed.folder), resume=True, **other)
    assert (report.status, report.lineage) == ("finished", 1), scripted.error
    assert kept_steps(killed.folder) == [0, 1, 2, 3, 4, 5]
    found = [replayed(killed.folder, step) for step in (1, 3, 4, 5)]
    assert [each["batches"] for each in found] == [[0, 1], [3], [3, 4], [3, 4, 5]]
    assert found[2]["metrics"]["train/loss"] != before["metrics"]["train/loss"]
    assert [each["changed"] for each in found] == [[], [], [], []]


def hangs_at(step):
    """An engine that never answers for the batch of `step`."""

    def on_request(engine, request):
        if engine.version is not None and engine.version.step == step and not request.id.startswith("probe"):
            engine.is_hanging = True

    return on_request


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--model.dtype", "bfloat16", "--training.optimizer", "adamw_bf16"), id="rounded"),
        pytest.param((*PPO, "--critic.warmup_steps", "3"), id="warm-up"),
        pytest.param(
            ("--training.staleness", "2", "--sampling.temperature", "0.7", "--sampling.top_k", "20"), id="stale"
        ),
        pytest.param(("--algorithm.kind", "rloo", "--algorithm.kl_coef", "0.1"), id="reward-kl"),
        pytest.param((*LORA, "--lora.dora", "true", "--algorithm.kl_coef", "0.1"), id="dora"),
        pytest.param(("--run.threads", "2", "--training.optimizer", "muon"), id="two-threads"),
    ],
)
@pytest.mark.full
def test_whatever_is_trained(scripted, replayed, more):
    limits = ("--weights.probe_stop", "5", "--weights.probe_warn", "4")
    assert scripted.run(*SIX, *more, *limits).status == "finished", scripted.error
    assert replayed(scripted.folder, 5)["batches"] == [4, 5]
    assert replayed(scripted.folder, 0)["begins"] == tool.START


def test_the_settings_are_those_of_the_run(scripted, run_file, replayed):
    """As many steps as there are in an epoch, and a loss of the user's that draws random numbers."""
    loss = run_file.with_name("noisy.py")
    loss.write_text(
        "import torch\n\ndef loss(given):\n"
        "    ratio = torch.exp(given.logprobs_N - given.old_logprobs_N)\n"
        "    return -ratio * given.advantages_N * (1 + torch.rand(()))\n"
    )
    run_file.write_text(run_file.read_text().replace("steps = 3", "epochs = 0.25"))
    options = ("--algorithm.loss", f"{loss}:loss", *SIX[2:])
    assert scripted.run(*options).status == "finished", scripted.error
    prepared = prepare(load_config(run_file, options))
    ours = planned_config(load_config(scripted.folder / "resolved.toml").config)
    assert prepared.config.training.steps == 4
    apart = {"run": {"folder"}, "training": {"epochs"}}
    assert ours.model_dump(exclude=apart) == prepared.config.model_dump(exclude=apart)
    assert [replayed(scripted.folder, step)["batches"] for step in (1, 3)] == [[0, 1], [2, 3]]


def test_a_batch_that_teaches_nothing(scripted, replayed, slipstream):
    wrong = lambda ids, seed: scripted.say("b" if scripted.engine.version.step == 1 else "ab"[seed % 2])  # noqa: E731
    assert scripted.run("--evaluation", "false", script=wrong).status == "finished"
    found = replayed(scripted.folder, 1)
    assert found["no_signal"] == "no group had any reward variance"
    assert found["metrics"]["train/skipped"]["replayed"] == 1.0
    assert "train/loss" not in found["metrics"]
    code, out, _ = slipstream("replay", scripted.folder, 1)
    assert code == 0
    assert "the batch teaches nothing: no group had any reward variance" in out


def test_what_is_printed(run, slipstream):
    code, out, err = slipstream("replay", run, 1)
    assert (code, err) == (0, "")
    assert "batch 1, the update from version 1 to 2\n" in out
    assert "trained again on batches 0 to 1, from the start model, by slipstream " in out
    assert repr(read_metrics(run)[2]["train/loss"]) in out
    assert out.endswith("the loss is the recorded one, bit for bit\n")


def test_a_step_that_ended_the_run_ends_its_replay(scripted, slipstream):
    """Whoever stands in the debugger is where the run was."""

    def on_request(engine, request):
        is_rollout = engine.version.step == 1 and not request.id.startswith("probe")
        engine.logprob_offset = math.nan if is_rollout else 0.0

    report = scripted.run("--evaluation", "false", on_request=on_request)
    assert (report.error, report.exit_code, report.step) == ("TrainingError", 7, 1)
    assert kept_steps(scripted.folder) == [0, 1]
    code, _, err = slipstream("replay", scripted.folder, 1)
    assert (code, err) == (7, f"error: {report.message}\n")
    assert slipstream("replay", scripted.folder, 0)[0] == 0


def test_a_step_without_metrics(run, refused):
    """Killed before its row was written, or resumed before it."""
    file = run / "metrics.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-1]))
    sentence = "the run recorded no metrics of step 3, which batch 2 leads to, so there is nothing to compare with"
    assert sentence in refused(run, 2, 3)


class TestRefused:
    """One sentence each."""

    def test_a_loss_that_is_not_the_recorded_one(self, run, slipstream, refused):
        loss = change_loss(run, 1, lambda loss: math.nextafter(loss, 1.0))
        assert f"is {loss!r}), on the same machine: look for what has changed" in refused(run, 1, 7)
        assert json.loads(slipstream("replay", run, 1, "--json")[1])["is_exact"] is False
        assert slipstream("replay", run, 0)[0] == 0

    def test_elsewhere_it_may_be_rounded_otherwise(self, run, slipstream, refused, monkeypatch):
        monkeypatch.setattr(tool, "made_by", lambda device: "slipstream 0, another machine")
        change_loss(run, 0, lambda loss: loss + 5e-5)
        code, out, _ = slipstream("replay", run, 0)
        assert code == 0
        assert "the run was made by slipstream " in out
        assert out.endswith("the loss is the recorded one, to 0.0001\n")
        change_loss(run, 0, lambda loss: loss + 5e-4)
        assert "by more than 0.0001: the run was made by slipstream " in refused(run, 0, 7)

    def test_settings_that_were_changed_since_are_named(self, scripted, slipstream, refused):
        assert scripted.run(*SIX, "--training.steps", "2").status == "finished"
        changed = ("--training.steps", "4", "--algorithm.normalize", "sequence", "--training.learning_rate", "1e-2")
        assert scripted.run(*SIX, *changed, "--run.folder", str(scripted.folder), resume=True).status == "finished"
        told = refused(scripted.folder, 1, 7)
        assert "resumed with other settings since: " in told
        assert "training.learning_rate was 0.001 and is 0.01" in told
        assert slipstream("replay", scripted.folder, 3)[0] == 0

    def test_batches_that_are_missing_on_the_way(self, scripted, refused):
        assert scripted.run(*SIX, "--run.keep_checkpoints", "1", "--run.keep_batches", "2").status == "finished"
        assert kept_steps(scripted.folder) == [0, 4, 5]
        told = refused(scripted.folder, 5, 3)
        assert "the start model, the nearest before it that can be resumed from, and batches 1, 2, 3" in told
        assert "run.keep_batches = 6" in told
        told = refused(scripted.folder, 3, 3)
        assert "has not kept batch 3, the update from version 3 to 4 (it has 0, 4, 5; run.keep_batches = 2)" in told

    def test_none_are_kept(self, scripted, refused):
        assert scripted.run("--evaluation", "false", "--run.keep_batches", "0").status == "finished"
        assert not (scripted.folder / "batches").exists()
        assert "(it has none; run.keep_batches = 0): run with --run.keep_batches 3" in refused(scripted.folder, 0, 3)

    def test_a_changed_byte_and_another_schema(self, run, refused):
        path = run / "batches" / "000001.msg"
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
        whole = path.read_bytes()
        path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
        assert "batches/000001.msg" in refused(run, 2, 3)
        path.write_bytes(whole)
        other = records.encode(msgspec.structs.replace(read_batch(run, 1)[0], schema=7))
        maker = batches.made_by("cpu")
        kept = batches._Kept(batches._digest(maker, other), maker, msgspec.Raw(other))
        path.write_bytes(msgspec.msgpack.encode(kept))
        assert "a batch of schema 7, and this Slipstream reads 1 to 3): use the version of Slip" in refused(run, 1, 3)

    @pytest.mark.parametrize("line", ["", "shared_kernels = true\n"])
    def test_a_run_that_does_not_say_or_whose_kernels_are_not_here(self, run, slipstream, line):
        """A folder of before the setting, and that of a run on a GPU."""
        file = run / "resolved.toml"
        lines = [each for each in file.read_text().split("\n") if not each.startswith("shared_kernels")]
        file.write_text("\n".join(lines).replace("[model]\n", f"[model]\n{line}"))
        code, out, err = slipstream("replay", run, 2)
        assert code == 0, out + err

    def test_what_has_no_replay(self, run, refused, tmp_path):
        assert "holds no run" in refused(tmp_path, 0, 2)
        file = run / "resolved.toml"
        text = file.read_text()
        file.write_text(text.replace("\nranks = 1 ", "\nranks = 2 "))
        assert "training.ranks = 2, and a replay is one process: repeat the run with" in refused(run, 0, 2)
        file.write_text(text.replace("\nmax_model_len = ", '\nmax_model_len = "auto" # '))
        assert "does not say what inference.max_model_len was planned to be" in refused(run, 0, 2)
        file.write_text("")
        assert "resolved.toml is empty: copy it from the run again" in refused(run, 0, 2)

    def test_sft(self, scripted, run_file, refused):
        text = run_file.with_name("sft.toml").read_text().replace("[weights]\nprobe_tasks = 2\n", "")
        run_file.write_text(text)
        assert scripted.run("--evaluation", "false").status == "finished", scripted.error
        assert not (scripted.folder / "batches").exists()
        assert "is a run of SFT, which keeps no batches" in refused(scripted.folder, 0, 2)


def test_a_full_disk_for_batches_does_not_end_the_run(scripted, monkeypatch):
    def full(path, data, *, durable=True):
        assert not durable
        raise cannot_write(path, "No space left on device")

    monkeypatch.setattr(batches, "write_whole", full)
    assert scripted.run("--evaluation", "false").status == "finished"
    told = [event["message"] for event in scripted.events("warning") if "slipstream replay" in event["message"]]
    assert len(told) == 1
    assert "the batch of step 0 is not kept for slipstream replay (" in told[0]
    assert kept_steps(scripted.folder) == []


@pytest.mark.engine
@pytest.mark.full
def test_of_a_real_run_that_shared_the_engines_weights(command, run_file, tmp_path):
    """The replay trains a copy of its own, and needs no engine."""
    run = tmp_path / "run"
    coin = ("--environment.settings", "{coin = true}", "--evaluation", "false", "--run.folder", run)
    more = ("--weights.bridge", "single_copy", "--run.checkpoint_every", 2, "--run.keep_checkpoints", 2)
    command("train", run_file, *coin, *more).ok()
    for step, taken in ((0, [0]), (2, [2])):
        out = command("replay", run, step, "--json").ok()
        found = json.loads(out)
        assert (found["batches"], found["is_exact"]) == (taken, True)
