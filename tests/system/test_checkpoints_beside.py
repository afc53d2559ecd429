"""Whole runs whose checkpoints are written beside training, with a scripted engine."""

import os
import time
from pathlib import Path

import pytest

from slipstream.runlog import read_events, read_metrics
from slipstream.trainer.checkpoints.snapshot import Snapshot

from .conftest import Scripted, has_row, kill_when

SIX = ("--training.steps", "6", "--run.checkpoint_every", "2", "--evaluation", "false")


def end_of(folder: Path) -> dict[str, bytes]:
    """What the last checkpoint would deploy, and resume from."""
    last = folder / "checkpoints/step-000006"
    return {name: (last / name).read_bytes() for name in ("weights/model.safetensors", "state/learner.safetensors")}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_a_checkpoint_is_written_a_run_ends_with_the_same_bytes(scripted, model, run_file, tmp_path):
    assert scripted.run(*SIX).status == "finished"
    events = {event["step"]: event["beside"] for event in scripted.events("checkpoint")}
    assert events == {2: True, 4: True, 6: False}, "for the last nobody trains"
    killed = Scripted(model, run_file, tmp_path / "killed")

    def work():
        Snapshot.save = until_killed(Snapshot.save, "000004")
        killed.run(*SIX)

    # Training goes on while step 4 is written, and the checkpoint that is due next waits for it.
    kill_when(lambda: has_row(killed.folder, 5), work)
    there = sorted(path.name for path in (killed.folder / "checkpoints").iterdir())
    assert there[0].startswith(".unfinished-000004")
    assert there[1:] == ["step-000002"]
    report = killed.run(*SIX, resume=True)
    assert (report.status, report.step, report.lineage) == ("finished", 6, 1)
    assert end_of(killed.folder) == end_of(scripted.folder)
    assert [path.name for path in (killed.folder / "checkpoints").glob(".unfinished*")] == []


def until_killed(save, step):
    """`save`, which never ends for this step."""

    def slow(snapshot, folder):
        if step in folder.parent.name:
            time.sleep(600)
        save(snapshot, folder)

    return slow


def test_a_disk_that_fills_up_ends_the_run_as_ever(scripted, monkeypatch):
    def full(snapshot, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Snapshot, "save", full)
    report = scripted.run(*SIX)
    assert (report.error, report.exit_code, report.status) == ("SlipstreamError", 1, "failed")
    assert "checkpoints/step-000002 cannot be written (No space left on device)" in report.message
    assert report.step < 6
    assert list((scripted.folder / "checkpoints").iterdir()) == []


LORA = ("--lora.rank", "4", "--weights.bridge", "disk")


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(LORA, id="lora"),
        pytest.param(("--algorithm.kind", "ppo"), id="ppo"),
    ],
)
def test_beside_training_or_not_it_is_the_same(scripted, model, run_file, tmp_path, more):
    """The step before the last: of the last nothing is written beside."""
    kept = (*SIX, "--run.keep_checkpoints", "2", *more)
    waits = Scripted(model, run_file, tmp_path / "waits")
    assert scripted.run(*kept).status == waits.run(*kept, "--run.async_checkpoints", "false").status == "finished"
    folders = [each.folder / "checkpoints/step-000004" for each in (scripted, waits)]
    files = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    ]
    assert files[0] == files[1]
    assert [event["beside"] for event in read_events(waits.folder) if event["kind"] == "checkpoint"] == [False] * 3
    assert [row["step"] for row in read_metrics(waits.folder)] == [0, 1, 2, 3, 4, 5, 6]
