"""examples/vision with real vLLM: SFT on rows with images, tower included, then GRPO on drawn questions."""

import json
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.runlog import read_events, read_exit, read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sees")]

EXAMPLES = Path(__file__).parents[2] / "examples" / "vision"
SMALL = ("--evaluation.num_tasks", "24", "--training.warmup_steps", "0", "--run.threads", "1")
FEW = ("--environment.num_train_tasks", "100")


@pytest.fixture
def reads(tmp_path, command):
    """The folder of a new model that reads images, and demonstrations beside it."""
    shape = ("--vision", "--hidden-size", "64", "--num-layers", "2", "--num-heads", "2", "--num-kv-heads", "1")
    assert command("model", "new", tmp_path / "model", *shape).wait()[0] == 0
    runpy.run_path(str(EXAMPLES / "rectangles.py"))["write"](tmp_path / "rows", 40)
    return tmp_path / "model"


@pytest.mark.parametrize("streams", ["memory", pytest.param("files", marks=pytest.mark.full)])
def test_from_rows_with_images_to_grpo(command, reads, tmp_path, streams):
    folder = tmp_path / "sft"
    options = ("--model.path", reads, "--data.path", tmp_path / "rows/rows.jsonl", "--run.folder", folder)
    size = ("--training.steps", "18", "--training.prompts_per_batch", "16", "--training.learning_rate", "5e-3")
    more = ("--no-evaluation", *SMALL[2:], "--json")  # and no engine
    out = command("sft", EXAMPLES / "sft.toml", *options, *size, *more).ok(400)
    weights = json.loads(out)["weights"]
    rows = read_metrics(folder)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 0.6 * losses[0]
    before, after = (load_file(Path(path) / "model.safetensors") for path in (reads, weights))
    assert all(not tensor.equal(after[name]) for name, tensor in before.items()), "the tower is trained too"
    assert (Path(weights) / "processor_config.json").is_file()

    folder = tmp_path / "grpo"
    options = ("--model.path", weights, "--model.train_tower", "false", "--run.streams", streams)
    options += ("--run.folder", folder)
    size = ("--training.steps", "2", "--training.prompts_per_batch", "6", "--training.learning_rate", "1e-3")
    command("train", EXAMPLES / "grpo.toml", *options, *size, *SMALL, *FEW).ok(400)
    assert read_exit(folder).status == "finished"
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert max(row["probe/abs_logprob_diff"] for row in rows) < 1e-3
    assert not any(value for row in rows for name, value in row.items() if name.startswith("dropped/"))
    assert len({event["digest"] for event in read_events(folder) if event["kind"] == "apply"}) == 3
    trained = load_file(next(iter(sorted((folder / "checkpoints").glob("step-*"))[-1:])) / "weights/model.safetensors")
    for name, tensor in trained.items():
        assert tensor.equal(after[name]) == ("visual" in name), name
