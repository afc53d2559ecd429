"""A run that was killed between its last checkpoint and `exit.json`: whether it is at its end."""

from pathlib import Path

import pytest

from slipstream.config import with_values
from slipstream.errors import Interrupted, SlipstreamError
from slipstream.launch.recovery.resume import end_unsaid
from slipstream.plan.derive import make_plan
from slipstream.runlog import RunLog, read_exit
from slipstream.runlog.ledger import Ledger, balance
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from tests.plan.test_plan import GRPO, facts

WATCH = {"last": 0.5, "best": 0.5, "best_step": 2, "num_worse": 0}
ENOUGH = WATCH | {"last": 1.0}
ENDS = {
    # of the checkpoint: step, evaluated step, early stopping; the time limit that was hit, how it ended; whether it is
    # the end, and also under --resume without auto
    "all steps": ((4, 4, WATCH), None, None, (True, True)),
    "after a step that was interrupted": ((4, 4, WATCH), None, Interrupted("stopped"), (True, True)),
    "after a sink that failed": ((4, 4, WATCH), None, SlipstreamError("no room"), (True, True)),
    "early": ((2, 2, ENOUGH), None, None, (True, True)),
    "early, without the last evaluation": ((3, 2, ENOUGH), None, None, (False, False)),
    "all steps, and no evaluation": ((4, 2, WATCH), None, None, (False, False)),
    "not all": ((3, 3, WATCH), None, None, (False, False)),
    "the time limit": ((3, 3, WATCH), 60.0, None, (True, False)),
    "another time limit": ((3, 3, WATCH), 30.0, None, (False, False)),
    "it said so": ((4, 4, WATCH), None, "finished", (False, False)),
    "no checkpoint": (None, None, None, (False, False)),
}


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("case", ENDS)
def test_a_run_that_was_killed_after_its_last_checkpoint_is_at_its_end(tmp_path, monkeypatch, case, auto):
    saved, limit, ended, expected = ENDS[case]
    evaluation = {"evaluation.stop_at": 0.9, "evaluation.patience": 3, "evaluation.num_tasks": 16}
    limits = {"training.steps": 4, "training.max_seconds": 60.0}
    config = make_plan(with_values(GRPO, limits | evaluation), facts()).config
    with RunLog.create(tmp_path / "run") as log:
        if limit is not None:
            log.event("time_limit", step=saved[0], max_seconds=limit)
        if ended is None:
            log.has_exit = True  # writes none at its close
        else:
            log.exit(None if ended == "finished" else ended, step=4)
        group_ledger = Ledger(log.folder, 0, 0, staleness=0, shape={})
        for name in ("running", "ready"):
            group_ledger.begin(name)
        group_ledger.finish("ready", [])
    monkeypatch.setattr(CheckpointStore, "latest", lambda self: saved and Path("step-000004"))
    monkeypatch.setattr(CheckpointStore, "check_format", lambda path: None)
    monkeypatch.setattr(CheckpointStore, "holds", lambda self, step: True)
    names = ("step", "evaluated_step", "early_stop")
    others = {"lineage": 0, "trained_steps": 0, "quiet_steps": 0, "num_items": 0, "identity": {}}
    monkeypatch.setattr(CheckpointStore, "read_loop_state", lambda path: others | dict(zip(names, saved, strict=True)))
    (log.folder / "checkpoints").mkdir()
    is_end = expected[not auto]
    assert end_unsaid(log.folder, config, with_time_limit=auto) is is_end
    report = read_exit(log.folder)
    assert is_end == (report is not None and report.status == "finished" and ended != "finished")
    if is_end:
        assert (report.step, report.lineage) == (saved[0], 0)
        assert (log.folder / "checkpoints" / "best").readlink().name == "step-000002"
        assert balance(log.folder).num_open == 0
        assert not end_unsaid(log.folder, config, with_time_limit=auto), "once"
