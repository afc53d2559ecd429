"""Runs of several trainer processes through the real command: resumed by other numbers of them, ended in every way, and
with real vLLM, which takes their weights and proves them."""

import itertools
import json
import signal
import tempfile
import time
from pathlib import Path

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.runlog import read_events, read_exit, read_metrics

from .test_real_runs import COIN, ENDLESS, check_run, num_steps, sft_file

PARITY = ("--environment.settings", "{parity = true}", "--evaluation", "false", "--training.steps", "1")
"""A step whose rewards follow from completions alone."""


def ranks(number, **settings):
    """On the command line."""
    chosen = {"training.ranks": number, "run.threads": 2, **settings}
    return [part for key, value in chosen.items() for part in (f"--{key}", str(value))]


def rank_processes(run):
    return run.running("slipstream.launch.ranks.child")


@pytest.fixture
def meetings(monkeypatch):
    """Where the ranks of this test's commands meet, and nobody else's."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield lambda: list(Path(folder).glob("slipstream-ranks-*"))


@pytest.mark.full
def test_a_run_that_is_resumed_by_other_numbers_of_ranks_has_the_same_losses(command, run_file, tmp_path):
    file = sft_file(run_file)
    every = ("--run.checkpoint_every", "2", "--run.keep_checkpoints", "2", "--training.steps")
    assert command("sft", file, *every, "6", *ranks(1), "--run.folder", tmp_path / "one").wait()[0] == 0
    for number, steps in ((2, 2), (4, 4), (1, 6)):
        again = ("--resume",) if steps > 2 else ()
        code, _, err = command(
            "sft", file, *again, *every, steps, *ranks(number), "--run.folder", tmp_path / "several"
        ).wait()
        assert code == 0, err
    rows = [read_metrics(tmp_path / folder) for folder in ("one", "several")]
    assert [row["step"] for row in rows[1]] == [row["step"] for row in rows[0]]
    for one, several in zip(*rows, strict=True):
        assert several["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4)
    changed = [event["changed"] for event in read_events(tmp_path / "several") if event["kind"] == "start"]
    assert "training.ranks was 2 and is 4" in changed[1]
    shards = tmp_path / "several/checkpoints/step-000004/state"
    assert len(list(shards.glob("shard-*.safetensors"))) == 4


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_rows_that_two_ranks_hold_together(kind, command, run_file, tmp_path):
    """All losses of a run of SFT; a step of RL, whose rollouts are the same."""
    model = new_model(tmp_path / "model", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, context_length=64)
    file, more = (sft_file(run_file), ("--training.steps", "20")) if kind == "sft" else (run_file, PARITY)
    rows = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        given = (*more, "--model.path", model, *ranks(number), "--run.folder", folder)
        given += ("--training.context_parallel", "2") * (number > 1)
        command("sft" if kind == "sft" else "train", file, *given).ok()
        rows.append([row for row in read_metrics(folder) if "train/loss" in row])
    assert len(rows[0]) == len(rows[1]) > 0
    for one, two in zip(*rows, strict=True):
        print(
            "REL",
            kind,
            [
                abs(two[n] / one[n] - 1) if one[n] else two[n]
                for n in ("train/loss", "train/grad_norm", "train/entropy")
            ],
        )
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert two[name] == pytest.approx(one[name], rel=2e-6, abs=1e-7)


@pytest.mark.full
def test_float16_and_sums_in_float32_over_ranks(command, run_file, tmp_path):
    """Each overflow halves the loss scale, on all ranks at once, and the scale is resumed."""
    file, rows = sft_file(run_file), []
    wide = ("--model.dtype", "float16", "--model.fp32_residual", "true", "--training.steps")
    for number in (1, 2):
        folder = tmp_path / str(number)
        for again, steps in ((), 2), (("--resume",), 4):
            command("sft", file, *again, *wide, steps, *ranks(number), "--run.folder", folder).ok()
        rows.append(read_metrics(folder))
    for one, several in zip(*rows, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert several[name] == pytest.approx(one[name], rel=2e-2)
    for own in rows:
        halved = itertools.accumulate(row["train/overflows"] for row in own)
        assert [row["train/loss_scale"] for row in own] == [2.0 ** (16 - number) for number in halved]


@pytest.mark.full
def test_the_loss_of_held_out_rows_is_that_of_one_rank(command, model, tmp_path):
    rows = [{"prompt": "a" * (n % 7 + 1), "completion": "b" * (n % 11 + 1) + str(n)} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "sft.toml"
    file.write_text(
        f'[model]\npath = "{model}"\n[data]\npath = "rows.jsonl"\neval_fraction = 0.4\n'
        '[algorithm]\nkind = "sft"\n[training]\nepochs = 1\nprompts_per_batch = 8\nlearning_rate = 1e-3\n'
    )
    found = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        command("sft", file, *ranks(number), "--run.folder", folder).ok()
        found.append([row["eval/loss"] for row in read_metrics(folder) if "eval/loss" in row])
    assert len(found[0]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def begun(command, run_file, folder):
    """A run of two ranks that has made two steps."""
    run = command("sft", sft_file(run_file), *ENDLESS, *ranks(2), "--run.folder", folder)
    run.until(lambda: num_steps(folder) >= 2)
    return run


@pytest.mark.full
@pytest.mark.real_start
def test_a_rank_that_is_killed_ends_the_run(command, run_file, meetings, tmp_path):
    folder = tmp_path / "run"
    run = begun(command, run_file, folder)
    (rank,) = rank_processes(run)
    assert len(meetings()) == 1
    rank.send_signal(signal.SIGKILL)
    code, _, err = run.wait(200)
    report = read_exit(folder)
    assert (code, report.exit_code, report.error) == (8, 8, "RankError")
    assert "error: trainer process 1 (of 0 to 1) was killed (SIGKILL): continue with --resume" in err
    assert run.left_behind() == []
    assert meetings() == []


@pytest.mark.real_start
@pytest.mark.full
def test_a_run_that_is_killed_leaves_no_rank(command, run_file, meetings, tmp_path):
    run = begun(command, run_file, tmp_path / "run")
    assert len(rank_processes(run)) == 1
    run.process.kill()
    run.process.wait(60)
    assert run.left_behind() == []
    deadline = time.monotonic() + 60
    while meetings():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("bridge", "steps"),
    [
        ("broadcast", 3),
        pytest.param("disk", 3, marks=pytest.mark.full),
        pytest.param("restart", 1, marks=pytest.mark.full),
    ],
)
def test_vllm_takes_the_weights_of_two_ranks(bridge, steps, command, run_file, tmp_path):
    """Under `restart` a new engine loads what they have gathered, as it would load an export."""
    folder = tmp_path / "run"
    options = ("--weights.bridge", bridge, "--algorithm.kl_coef", "0.01", "--run.folder", folder)
    options += ("--training.steps", str(steps))
    command("train", run_file, *COIN, *ranks(2, **{"run.threads": 1}), *options).ok(400)
    check_run(folder, steps=steps)
    assert "train/grad_norm" in read_metrics(folder)[-1]
