"""Rollout matching with real vLLM: channel A alone, both channels, a resume, and what is refused."""

import json
import runpy
from pathlib import Path

import pytest

from slipstream.runlog import read_events, read_exit, read_metrics

from .conftest import Command

EXAMPLES = Path(__file__).parents[2] / "examples" / "detection"
BRIEF = ("--sampling.max_tokens", "80")
"""An untrained detector's answers have no end."""


@pytest.fixture(scope="module")
def draws(tmp_path_factory):
    """The folder of a new detector, and drawn rows beside it."""
    folder = tmp_path_factory.mktemp("draws")
    shape = ("--hidden-size", "64", "--num-layers", "2", "--num-heads", "2", "--num-kv-heads", "1")
    assert Command("model", "new", folder / "model", "--vision", "--coordinates", *shape).wait()[0] == 0
    runpy.run_path(str(EXAMPLES / "rectangles.py"))["write"](folder / "boxes", 40)
    return folder / "model"


def options_of(model, folder, *more, steps=4, rows="rows.jsonl"):
    rows = model.parent / "boxes" / rows
    where = ("--model.path", model, "--environment.settings.path", rows, "--run.folder", folder)
    size = ("--training.prompts_per_batch", "6", "--training.steps", str(steps), "--training.warmup_steps", "0")
    return (*where, *size, "--run.threads", "1", *more)


def test_channel_a_alone_starts_no_engine(command, draws, tmp_path):
    folder = tmp_path / "a"
    more = ("--no-evaluation", "--matching.softctx_iterations", "2", "--training.learning_rate", "2e-3")
    more += ("--training.schedule", "constant")
    command("sft", EXAMPLES / "a.toml", *options_of(draws, folder, *more, steps=12)).ok(200)
    assert read_exit(folder).status == "finished"
    assert not {"engine", "apply"} & {event["kind"] for event in read_events(folder)}
    assert not list(folder.glob("logs/*engine*"))
    rows = read_metrics(folder)
    assert {row["stage2/channel_a"] for row in rows} == {1.0}
    assert {row["stage2/num_forwards"] for row in rows} == {2.0}
    assert rows[-1]["loss/ce"] < 0.8 * rows[0]["loss/ce"]
    values = [value for row in rows for value in row.values()]
    assert all(value == value for value in values)


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.usefixtures("sees")
def test_both_channels_and_a_resume(command, draws, tmp_path):
    folder = tmp_path / "ab"
    pattern = ("--matching.pattern", '["A", "A", "B"]', "--evaluation.num_tasks", "4", "--run.checkpoint_every", "2")
    command("sft", EXAMPLES / "ab.toml", *options_of(draws, folder, *pattern, *BRIEF, steps=6)).ok(400)
    rows = read_metrics(folder)
    trained = [row for row in rows if "stage2/channel_a" in row]
    assert [row["stage2/channel_b"] for row in trained] == [0, 0, 1, 0, 0, 1]
    assert all(row["stage2/channel_a"] + row["stage2/channel_b"] == 1 for row in trained)
    seeds = [row["rollout/seed_base"] for row in trained if row["stage2/channel_b"]]
    assert seeds == [2 * 1_000_003, 5 * 1_000_003]
    applied = [int(event["version"].split(".")[1]) for event in read_events(folder) if event["kind"] == "apply"]
    assert applied == [0, 2, 5, 6], "steps of channel A send nothing; the last is for the evaluation"
    assert max(row["probe/abs_logprob_diff"] for row in rows if "probe/abs_logprob_diff" in row) < 1e-3
    assert [row["step"] for row in rows if "eval/f1" in row] == [0, 6]
    assert "rollout/f1" in trained[2]
    losses = [row["train/loss"] for row in trained]
    assert max(losses) < 3 * min(losses), "both channels have losses of one order"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {2, 5} <= {sample["step"] for sample in samples}

    longer = options_of(draws, folder, *pattern, *BRIEF, steps=9)
    command("sft", EXAMPLES / "ab.toml", *longer, "--resume").ok(400)
    more = [row for row in read_metrics(folder) if "stage2/channel_a" in row][6:]
    assert [row["stage2/channel_b"] for row in more] == [0, 0, 1]


def test_a_broken_row_ends_the_command_before_anything_starts(command, draws, tmp_path):
    folder = draws.parent / "boxes"
    rows = (folder / "rows.jsonl").read_text().splitlines()
    rows[7] = json.dumps(json.loads(rows[7]) | {"objects": [{"desc": "red", "bbox_2d": [9, 9, 1, 1]}]})
    (folder / "broken.jsonl").write_text("\n".join(rows))
    given = options_of(draws, tmp_path / "run", "--no-evaluation", rows="broken.jsonl")
    code, _, err = command("sft", EXAMPLES / "a.toml", *given).wait(100)
    assert code != 0
    assert "corners in the wrong order" in err
    assert "8" in err
    assert "Traceback" not in err


@pytest.mark.engine
@pytest.mark.usefixtures("sees")
@pytest.mark.full
def test_smoke_sees_that_an_untrained_model_is_not_healthy(command, draws, tmp_path):
    rows = ("--environment.settings.path", draws.parent / "boxes/rows.jsonl", "--model.path", draws)
    size = ("--training.prompts_per_batch", "4", "--steps", "2", "--folder", tmp_path / "smoke")
    more = ("--run.threads", "1", "--channels", "a_only", "ab", "--json")
    code, out, err = command("smoke", EXAMPLES / "ab.toml", *rows, *size, *more).wait(300)
    assert code == 7, err
    found = json.loads(out.splitlines()[0] if out.count("\n") == 1 else out)
    assert [run["channels"] for run in found["runs"]] == ["a_only", "ab"]
    assert found["runs"][0]["problems"] == []
    assert found["runs"][1]["invalid_rate"] == 1.0
    assert not found["healthy"]
    assert "no rollout matches any true object" in err
