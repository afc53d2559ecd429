"""`slipstream replay` on what real training loops leave: the recorded loss, bit for bit, or one sentence."""

import contextlib
import json
import math
import os
import signal
import stat
import time

import msgspec
import pytest

from slipstream import records
from slipstream.cli import main
from slipstream.commands import replay as tool
from slipstream.config import load_config
from slipstream.config.traits import planned_config
from slipstream.launch.prepare import prepare
from slipstream.processes.files import cannot_write
from slipstream.runlog import batches, read_metrics
from slipstream.runlog.batches import kept_steps, read_batch

from .conftest import Scripted

SIX = ("--training.steps", "6", "--run.checkpoint_every", "2", "--evaluation", "false", "--run.keep_checkpoints", "2")
PPO = ("--algorithm.kind", "ppo", "--training.updates_per_batch", "2", "--algorithm.kl_coef", "0.01")
LORA = ("--lora.rank", "4", "--weights.bridge", "disk", "--training.updates_per_batch", "2")
SCHEDULED = ("--training.schedule", "cosine", "--training.warmup_steps", "1", "--training.epochs_per_batch", "2")


@pytest.fixture
def slipstream(capsys):
    """Runs a command here; (exit code, output, error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


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


def one_sentence(text):
    return text.startswith("error: ") and text.count("\n") == 1


@pytest.mark.parametrize("more", [(), PPO, LORA, SCHEDULED], ids=["grpo", "ppo", "lora", "schedule"])
def test_the_loss_is_the_recorded_one(scripted, replayed, more):
    assert scripted.run(*SIX, *more, "--run.keep_batches", "2").status == "finished"
    # 0 follows the start model, 4 a checkpoint that can be resumed from; that of step 6 is followed by nothing.
    assert kept_steps(scripted.folder) == [0, 4, 5]
    assert all(row["train/loss"] != 0 for row in scripted.metrics[1:])
    found = [replayed(scripted.folder, step) for step in (0, 4, 5)]
    begins = [(each["begins"], each["batches"]) for each in found]
    assert begins == [(tool.START, [0]), ("step-000004", [4]), ("step-000004", [4, 5])]


def test_also_from_the_start_model_through_all_batches(scripted, replayed):
    assert scripted.run("--evaluation", "false").status == "finished"
    found = replayed(scripted.folder, 2)
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
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            killed.run(*options, change=hangs_at(5))
        os._exit(1)
    try:
        deadline = time.monotonic() + 120
        # A thread of its own writes the batches.
        while (
            not (killed.folder / "metrics.jsonl").is_file()
            or not any(row["step"] == 5 for row in killed.metrics)
            or len(kept_steps(killed.folder)) < 5
        ):
            assert time.monotonic() < deadline
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run has ended"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    assert kept_steps(killed.folder) == [0, 1, 2, 3, 4]
    before = replayed(killed.folder, 4)
    assert (before["begins"], before["batches"]) == ("step-000003", [3, 4])
    scripted.folder = killed.folder
    report = scripted.run(
        *options,
        "--run.folder",
        str(killed.folder),
        resume=True,
        script=lambda ids, seed: scripted.say("ba"[seed // 2 % 2]),
    )
    assert (report.status, report.lineage) == ("finished", 1), scripted.error
    assert kept_steps(killed.folder) == [0, 1, 2, 3, 4, 5]
    found = [replayed(killed.folder, step) for step in (1, 3, 4, 5)]
    assert [each["batches"] for each in found] == [[0, 1], [3], [3, 4], [3, 4, 5]]
    assert found[2]["metrics"]["train/loss"] != before["metrics"]["train/loss"]
    assert [each["changed"] for each in found] == [[], [], [], []]


def hangs_at(step):
    """An engine that never answers for the batch of `step`."""

    def change(engine):
        def on_request(request):
            if engine.version is not None and engine.version.step == step and not request.id.startswith("probe"):
                engine.is_hanging = True

        engine.on_request = on_request

    return change


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


def test_what_is_printed(scripted, slipstream):
    assert scripted.run("--evaluation", "false").status == "finished"
    code, out, err = slipstream("replay", scripted.folder, 1)
    assert (code, err) == (0, "")
    assert "batch 1, the update from version 1 to 2\n" in out
    assert "trained again on batches 0 to 1, from the start model, by slipstream " in out
    assert repr(scripted.metrics[2]["train/loss"]) in out
    assert out.endswith("the loss is the recorded one, bit for bit\n")


def test_a_step_that_ended_the_run_ends_its_replay(scripted, slipstream):
    """Whoever stands in the debugger is where the run was."""

    def change(engine):
        def on_request(request):
            is_rollout = engine.version.step == 1 and not request.id.startswith("probe")
            engine.logprob_offset = math.nan if is_rollout else 0.0

        engine.on_request = on_request

    report = scripted.run("--evaluation", "false", change=change)
    assert (report.error, report.exit_code, report.step) == ("TrainingError", 7, 1)
    assert kept_steps(scripted.folder) == [0, 1]
    code, _, err = slipstream("replay", scripted.folder, 1)
    assert (code, err) == (7, f"error: {report.message}\n")
    assert slipstream("replay", scripted.folder, 0)[0] == 0


def test_a_step_without_metrics(scripted, slipstream):
    """Killed before its row was written, or resumed before it."""
    assert scripted.run("--evaluation", "false").status == "finished"
    file = scripted.folder / "metrics.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-1]))
    code, out, err = slipstream("replay", scripted.folder, 2)
    assert code == 3
    assert "train/loss" in out
    assert one_sentence(err)
    assert "the run recorded no metrics of step 3, which batch 2 leads to, so there is nothing to compare with" in err


class TestRefused:
    """One sentence each."""

    def test_a_loss_that_is_not_the_recorded_one(self, scripted, slipstream):
        assert scripted.run("--evaluation", "false").status == "finished"
        loss = change_loss(scripted.folder, 1, lambda loss: math.nextafter(loss, 1.0))
        code, out, err = slipstream("replay", scripted.folder, 1, "--json")
        assert code == 7
        assert json.loads(out)["is_exact"] is False
        assert one_sentence(err)
        assert f"is {loss!r}), on the same machine: look for what has changed" in err
        assert slipstream("replay", scripted.folder, 0)[0] == 0

    def test_elsewhere_it_may_be_rounded_otherwise(self, scripted, slipstream, monkeypatch):
        assert scripted.run("--evaluation", "false").status == "finished"
        monkeypatch.setattr(tool, "made_by", lambda device: "slipstream 0, another machine")
        change_loss(scripted.folder, 0, lambda loss: loss + 5e-5)
        code, out, _ = slipstream("replay", scripted.folder, 0)
        assert code == 0
        assert "the run was made by slipstream " in out
        assert out.endswith("the loss is the recorded one, to 0.0001\n")
        change_loss(scripted.folder, 0, lambda loss: loss + 5e-4)
        code, _, err = slipstream("replay", scripted.folder, 0)
        assert code == 7
        assert one_sentence(err)
        assert "by more than 0.0001: the run was made by slipstream " in err

    def test_settings_that_were_changed_since_are_named(self, scripted, slipstream):
        assert scripted.run(*SIX, "--training.steps", "2").status == "finished"
        changed = ("--training.steps", "4", "--algorithm.normalize", "sequence", "--training.learning_rate", "1e-2")
        assert scripted.run(*SIX, *changed, "--run.folder", str(scripted.folder), resume=True).status == "finished"
        code, _, err = slipstream("replay", scripted.folder, 1)
        assert code == 7
        assert one_sentence(err)
        assert "resumed with other settings since: " in err
        assert "training.learning_rate was 0.001 and is 0.01" in err
        assert slipstream("replay", scripted.folder, 3)[0] == 0

    def test_batches_that_are_missing_on_the_way(self, scripted, slipstream):
        assert scripted.run(*SIX, "--run.keep_checkpoints", "1", "--run.keep_batches", "2").status == "finished"
        assert kept_steps(scripted.folder) == [0, 4, 5]
        code, _, err = slipstream("replay", scripted.folder, 5)
        assert code == 3
        assert one_sentence(err)
        assert "begins with the start model, the nearest before it that can be resumed from, and batches 1, 2, 3" in err
        assert "run.keep_batches = 6" in err
        code, _, err = slipstream("replay", scripted.folder, 3)
        assert code == 3
        assert "has not kept batch 3, the update from version 3 to 4 (it has 0, 4, 5; run.keep_batches = 2)" in err

    def test_none_are_kept(self, scripted, slipstream):
        assert scripted.run("--evaluation", "false", "--run.keep_batches", "0").status == "finished"
        assert not (scripted.folder / "batches").exists()
        code, _, err = slipstream("replay", scripted.folder, 0)
        assert code == 3
        assert "(it has none; run.keep_batches = 0): run with --run.keep_batches 3" in err

    def test_a_changed_byte_and_another_schema(self, scripted, slipstream):
        assert scripted.run("--evaluation", "false").status == "finished"
        path = scripted.folder / "batches" / "000001.msg"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        whole = path.read_bytes()
        path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
        code, _, err = slipstream("replay", scripted.folder, 2)
        assert code == 3
        assert one_sentence(err)
        assert "batches/000001.msg" in err
        path.write_bytes(whole)
        other = records.encode(msgspec.structs.replace(read_batch(scripted.folder, 1)[0], schema=7))
        maker = batches.made_by("cpu")
        kept = batches._Kept(batches._digest(maker, other), maker, msgspec.Raw(other))
        path.write_bytes(msgspec.msgpack.encode(kept))
        code, _, err = slipstream("replay", scripted.folder, 1)
        assert code == 3
        assert one_sentence(err)
        assert "a batch of schema 7, and this Slipstream reads 1): use the version of Slipstream that wrote it" in err

    @pytest.mark.parametrize("line", ["", "shared_kernels = true\n"])
    def test_a_run_that_does_not_say_or_whose_kernels_are_not_here(self, scripted, slipstream, line):
        """A folder of before the setting, and that of a run on a GPU."""
        assert scripted.run("--evaluation", "false", "--run.keep_batches", "3").status == "finished"
        file = scripted.folder / "resolved.toml"
        lines = [each for each in file.read_text().split("\n") if not each.startswith("shared_kernels")]
        file.write_text("\n".join(lines).replace("[model]\n", f"[model]\n{line}"))
        code, out, err = slipstream("replay", scripted.folder, 2)
        assert code == 0, out + err

    def test_what_has_no_replay(self, scripted, slipstream, tmp_path):
        code, _, err = slipstream("replay", tmp_path, 0)
        assert code == 2
        assert "holds no run" in err
        assert scripted.run("--evaluation", "false").status == "finished"
        file = scripted.folder / "resolved.toml"
        text = file.read_text()
        file.write_text(text.replace("\nranks = 1 ", "\nranks = 2 "))
        code, _, err = slipstream("replay", scripted.folder, 0)
        assert code == 2
        assert one_sentence(err)
        assert "training.ranks = 2, and a replay is one process: repeat the run with --training.ranks 1" in err
        file.write_text(text.replace("\nmax_model_len = ", '\nmax_model_len = "auto" # '))
        code, _, err = slipstream("replay", scripted.folder, 0)
        assert (code, one_sentence(err)) == (2, True)
        assert "does not say what inference.max_model_len was planned to be" in err

    def test_sft(self, scripted, run_file, slipstream):
        text = run_file.with_name("sft.toml").read_text().replace("[weights]\nprobe_tasks = 2\n", "")
        run_file.write_text(text)
        assert scripted.run("--evaluation", "false").status == "finished", scripted.error
        assert not (scripted.folder / "batches").exists()
        code, _, err = slipstream("replay", scripted.folder, 0)
        assert code == 2
        assert one_sentence(err)
        assert "is a run of SFT, which keeps no batches" in err


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
    code, _, err = command("train", run_file, *coin, *more).wait()
    assert code == 0, err
    for step, taken in ((0, [0]), (2, [2])):
        code, out, err = command("replay", run, step, "--json").wait()
        assert code == 0, err
        found = json.loads(out)
        assert (found["batches"], found["is_exact"]) == (taken, True)
