"""A run's folder records the GPU memory that its trainer took, and the plans of runs beside it tell it."""

import os

import pytest
import torch

from slipstream.plan.memory.last_run import last_run_memory, record_memory
from slipstream.runlog import RunLog, read_events
from slipstream.trainer.learner import memory_metrics


def rows(*sizes):
    """Rows of metrics of (peak, held, tokens); None: one that has none of them."""
    names = [f"memory/trainer_{name}" for name in ("peak_gib", "held_gib", "row_tokens")]
    planned = {"memory/trainer_planned_gib": 8.5}
    return [{} if size is None else dict(zip(names, size, strict=True)) | planned for size in sizes]


def run(folder, *sizes, time, model="org/name", resume=False):
    """A run in `folder` that recorded these rows, the last at `time`."""
    with RunLog.create(folder, resume=resume) as log:
        log.listeners.append(record_memory(log, model))
        for step, row in enumerate(rows(*sizes)):
            log.metrics(step, row)
    os.utime(folder / "events.jsonl", (time, time))
    return folder


def line(folder, held):
    took = f"its trainer took {held} GiB of a GPU's memory where 8.50 GiB were estimated"
    return f"{folder} is the last run of this model: {took}"


def test_whatever_grows_is_an_event(tmp_path):
    sizes = [(5.0, 6.0, 800), (5.01, 6.05, 805), (5.01, 7.0, 805), (5.01, 7.0, 1000), (7.25, 7.5, 1000)]
    folder = run(tmp_path / "run", None, *sizes, time=1)
    events = [event for event in read_events(folder) if event["kind"] == "memory"]
    told = [tuple(event[name] for name in ("step", "peak_gib", "held_gib", "row_tokens")) for event in events]
    assert told == [(step, *sizes[step - 1]) for step in (1, 3, 4, 5)]
    assert all((event["planned_gib"], event["model"]) == (8.5, "org/name") for event in events)
    assert last_run_memory(tmp_path / "new", "org/name") == line(folder, "7.50")


def test_the_last_run_of_the_same_model_is_told(tmp_path):
    root = tmp_path / "runs"
    run(root / "z", (5.0, 6.0, 800), time=1)
    later = run(root / "a", (3.0, 4.0, 500), time=2)
    run(root / "b", (9.0, 9.0, 500), time=3, model="org/other")
    (root / "empty").mkdir()
    (root / "file").touch()
    assert last_run_memory(None, "org/name", root) == last_run_memory(root / "new", "org/name") == line(later, "4.00")
    # A run that goes on is told what it took itself, its last process first.
    run(root / "z", (4.0, 5.0, 700), time=4, resume=True)
    assert last_run_memory(root / "z", "org/name") == line(root / "z", "5.00")
    assert last_run_memory(root / "new", "org/third") == ""
    assert last_run_memory(None, "org/name", tmp_path / "none") == ""


@pytest.mark.parametrize(
    "text",
    [
        b'not json, but of memory: "memory"\n',
        b'["memory"]\n',
        b'{"kind": "memory", "model": "org/name", "planned_gib": 2.0}\n',
        b'{"kind": "memory", "model": "org/name", "held_gib": "much", "planned_gib": 2.0}\n',
        b'{"kind": "memory", "model": "org/name", "held_gib": 1e999, "planned_gib": 2.0}\n',
        None,
    ],
)
def test_what_cannot_be_read_is_skipped(tmp_path, text):
    events = tmp_path / "runs" / "newest" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.mkdir() if text is None else events.write_bytes(text)
    assert last_run_memory(tmp_path / "runs" / "new", "org/name") == ""
    folder = run(tmp_path / "runs" / "old", (5.0, 6.0, 800), time=1)
    assert last_run_memory(tmp_path / "runs" / "new", "org/name") == line(folder, "6.00")


def test_a_run_that_took_no_gpu_memory_records_nothing(tmp_path):
    run(tmp_path / "old", time=1)
    assert last_run_memory(tmp_path / "new", "org/name") == ""
    assert memory_metrics(torch.device("cpu"), 1, 1) == {}
