"""What a run's trainer took of its GPU is kept beside what was planned, and the next plan tells it."""

import torch

from slipstream.launch.peaks import earlier_peak, note_peak
from slipstream.runlog import RunLog, read_events
from slipstream.trainer.learner import memory_metrics


def rows(*peaks):
    held = {"memory/trainer_held_gib": 9.0, "memory/trainer_planned_gib": 8.5}
    return [{"memory/trainer_peak_gib": peak, **held} if peak else {} for peak in peaks]


def test_a_growing_peak_is_an_event_and_the_next_plan_tells_the_last(tmp_path):
    folder = tmp_path / "run-20260101-000000"
    with RunLog.create(folder) as log:
        log.listen(note_peak(log))
        for step, row in enumerate(rows(None, 5.0, 5.01, 7.25)):
            log.metrics(step, row)
    events = [event for event in read_events(folder) if event["kind"] == "memory"]
    assert [(event["step"], event["peak_gib"], event["planned_gib"]) for event in events] == [
        (1, 5.0, 8.5),
        (3, 7.25, 8.5),
    ]
    for found in (earlier_peak(folder, "other"), earlier_peak(None, "run", tmp_path)):
        assert found is not None
        assert found.startswith(f"an earlier run, {folder}: its trainer took 7.25 GiB of the GPU at most")
        assert found.endswith("planned were 8.50 GiB")


def test_where_none_was_noted_nothing_is_told(tmp_path):
    with RunLog.create(tmp_path / "run-1-1"):
        pass
    assert earlier_peak(None, "run", tmp_path) is None
    assert earlier_peak(tmp_path / "missing", "run") is None
    assert memory_metrics(torch.device("cpu"), 1) == {}
