"""The Python API on real processes and a real engine: a run as a call, and a notebook."""

import json
import os
import threading
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import slipstream
from slipstream.errors import ConfigError
from slipstream.runlog import read_exit

pytestmark = pytest.mark.engine
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
SMALL = {
    "training": {"prompts_per_batch": 4, "learning_rate": 1e-3},
    "algorithm": {"kind": "grpo", "group_size": 4},
    "run": {"threads": 1},
}


@pytest.fixture(autouse=True)
def one_thread(request, monkeypatch):
    """As much as a process needs that is forked, not started."""
    if request.node.get_closest_marker("real_start") is None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")


def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {seed} {i}", "answer": "a"} for i in range(num_tasks)]


@pytest.mark.full
def test_a_run_is_a_call_that_can_be_stopped_and_resumed(command, model, tmp_path):
    seen, weight = [], 0.5

    def reward(task, completion):
        return {"reward": completion.count("a") + weight * len(set(completion)), "length": len(completion)}

    def on_step(step, metrics):
        seen.append((step, metrics.get("reward/length")))

    run = slipstream.train(
        model, tasks, reward, steps=500, folder=tmp_path / "run", evaluation=False, wait=False, on_step=on_step, **SMALL
    )
    until = time.monotonic() + 120
    while len(seen) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    assert run.is_running
    run.stop()
    run.wait(120)
    assert (run.status, run.is_running) == ("interrupted", False)
    last = run.step
    assert [step for step, _ in seen] == list(range(last + 1))
    assert seen[1][1] > 0
    assert run.metrics["step"].tolist() == list(range(last + 1))
    with pytest.raises(ConfigError, match="exists and is not empty"):
        slipstream.train(model, tasks, reward, steps=last + 1, folder=tmp_path / "run", evaluation=False, **SMALL)
    seen.clear()
    more = {"steps": last + 1, "folder": tmp_path / "run", "evaluation": False, "resume": True, **SMALL}
    again = slipstream.train(model, tasks, reward, on_step=on_step, **more)
    assert [step for step, _ in seen] == [last, last + 1], "the first is what it goes on from, with its probe"
    assert (again.status, again.step, again.summary["steps"]) == ("finished", last + 1, last + 1)
    assert again.weights == tmp_path / "run" / "checkpoints" / f"step-{last + 1:06}" / "weights"
    assert slipstream.load_run(tmp_path / "run").step == last + 1
    seen.clear()
    complete = slipstream.train(model, tasks, reward, on_step=on_step, **{**more, "resume": "auto"})
    assert (complete.status, complete.summary["steps"], seen) == ("finished", last + 1, [])
    code, _, err = command("train", tmp_path / "run" / "resolved.toml", "--resume").wait(120)
    assert code == 2
    assert "slipstream.train(" in err


def test_a_model_is_evaluated_without_a_run(model):
    settings = {"evaluation": {"num_tasks": 7}, "run": {"threads": 1}}
    found = slipstream.evaluate(model, tasks, lambda task, completion: 1.0, progress=False, **settings)
    assert (found.accuracy, found.num_tasks) == (1.0, 7)
    assert found.interval[0] < 1.0 == found.interval[1]
    assert found.metrics["eval/reward"] == 1.0
    assert [(sample["reward"], bool(sample["prompt"])) for sample in found.samples] == [(1.0, True)] * 7


@pytest.mark.full
def test_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    started = time.monotonic()
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    said = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "image/png" in said
    runs = {path.parent.name: read_exit(path.parent) for path in tmp_path.glob("runs/*/exit.json")}
    assert {name: found.status for name, found in runs.items()} == {"sft": "finished", "rl": "finished"}
    rl = slipstream.load_run(tmp_path / "runs" / "rl")
    accuracies = [row["eval/accuracy"] for row in rl.rows if row.get("eval/accuracy") is not None]
    assert accuracies[-1] > accuracies[0] + 0.1, f"{accuracies} after {time.monotonic() - started:.0f} s"
    assert sum(event["kind"] == "start" for event in rl.events) == 2, "it was stopped and resumed"
    assert threading.active_count() < 50
    assert os.getcwd() != str(tmp_path)
