"""What a run's trainer took of its GPU is kept in its folder, and found by the plans of the runs beside it."""

import pytest
import torch

from slipstream.launch.plan.facts import Peak
from slipstream.launch.plan.memory.peaks import as_fields, find_peaks, note_peak
from slipstream.launch.plan.memory.sizes import GIB
from slipstream.runlog import RunLog, read_events
from slipstream.trainer.learner import memory_metrics

SETTINGS = {"card": "A card", "training.ranks": 1, "training.packing": True}


def rows(*sizes):
    """Rows of metrics of (peak, held, tokens); None: one that has none of them."""
    names = [f"memory/trainer_{name}" for name in ("peak_gib", "held_gib", "row_tokens")]
    planned = {"memory/trainer_planned_gib": 8.5}
    return [{} if size is None else dict(zip(names, size, strict=True)) | planned for size in sizes]


def run(folder, *sizes, resume=False, **start):
    """A run in `folder` that noted these rows."""
    with RunLog.create(folder, resume=resume) as log:
        if start:
            log.event("start", **start)
        log.listen(note_peak(log, SETTINGS))
        for step, row in enumerate(rows(*sizes)):
            log.metrics(step, row)
    return folder


def peak(folder, allocated, held, tokens):
    return Peak(str(folder), int(allocated * GIB), int(held * GIB), tokens, SETTINGS)


def test_whatever_grows_is_an_event(tmp_path):
    folder = run(
        tmp_path / "run",
        None,
        (5.0, 6.0, 800),
        (5.01, 6.05, 805),
        (5.01, 7.0, 805),
        (5.01, 7.0, 1000),
        (7.25, 7.5, 1000),
    )
    events = [event for event in read_events(folder) if event["kind"] == "memory"]
    assert [tuple(event[name] for name in ("step", "peak_gib", "held_gib", "row_tokens")) for event in events] == [
        (1, 5.0, 6.0, 800),
        (3, 5.01, 7.0, 805),
        (4, 5.01, 7.0, 1000),
        (5, 7.25, 7.5, 1000),
    ]
    assert all((event["planned_gib"], event["settings"]) == (8.5, SETTINGS) for event in events)
    # The last says all.
    assert find_peaks(tmp_path / "new") == ((peak(folder, 7.25, 7.5, 1000),), ())


def test_each_process_of_a_run_and_each_run_is_found_in_the_order_of_time(tmp_path):
    root = tmp_path / "runs"
    later, run_of_two = root / "a", root / "b"
    run(run_of_two, (5.0, 6.0, 800))
    run(run_of_two, (4.0, 5.0, 700), resume=True)
    run(later, (3.0, 4.0, 500))
    (root / "empty").mkdir()
    (root / "file").touch()
    expected = (peak(run_of_two, 5.0, 6.0, 800), peak(run_of_two, 4.0, 5.0, 700), peak(later, 3.0, 4.0, 500))
    assert find_peaks(None, root) == find_peaks(root / "new") == (expected, ())
    assert find_peaks(None, tmp_path / "none") == ((), ())


@pytest.mark.parametrize("peaks", [None, (), (Peak("runs/before", 1 * GIB, 2 * GIB, 300, SETTINGS),)])
def test_a_folder_that_holds_a_run_gives_what_that_began_with(tmp_path, peaks):
    """An older version wrote nothing of it."""
    folder = run(
        tmp_path / "mine", (5.0, 6.0, 800), **({"dropped": {}} if peaks is None else {"peaks": as_fields(peaks)})
    )
    run(tmp_path / "other", (9.0, 9.0, 900))
    found, told = find_peaks(folder)
    assert found == (peaks or ())
    assert told == (
        f"{folder} holds a run: it goes on with the plan that it began with; its trainer took 6.00 GiB of the GPU",
    )


def test_where_none_was_noted_nothing_is_told(tmp_path):
    run(tmp_path / "old")
    assert find_peaks(tmp_path / "new") == ((), ())
    assert memory_metrics(torch.device("cpu"), 1, 1) == {}
