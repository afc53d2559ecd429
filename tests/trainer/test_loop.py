"""What the training loop does in which order, when it ends, what it refuses, and what of it a resume goes on with."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
from tests.trainer.loops import batch_of, finished, make_run, planned

from slipstream.data.draws import Draws
from slipstream.errors import ConfigError, Interrupted, TrainingError
from slipstream.trainer import loop as module
from slipstream.trainer import steps
from slipstream.trainer.batch_trainer import BatchResult, NoSignal
from slipstream.trainer.checkpoints.manifest import Identity


@pytest.fixture(autouse=True)
def collected(monkeypatch):
    """Freezing this process's objects is slow, and of no use here."""
    calls = []
    monkeypatch.setattr(module.garbage_collection, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(module.garbage_collection, "unfreeze", lambda: calls.append("unfreeze"))
    return calls


def test_rollouts_begin_before_the_trainer_compares_the_probe(tmp_path):
    run = make_run(tmp_path)
    release, compared = run.engine.release, []

    def noting(step, change=None):
        compared.append(len(run.learner.rows))
        release(step, change)

    run.engine.release = noting
    run.loop.run()
    assert compared == [1, 1, 2, 3], "the first one, with which a resume begins, is compared before"


def test_the_first_steps_are_prepared_while_the_start_model_is_evaluated(tmp_path):
    prepared = []
    config = planned(training={"steps": 4}, evaluation={"every": 2})
    run = make_run(tmp_path, config=config, prepare=lambda is_over: prepared.append((list(run.calls), is_over())))
    run.loop.run()
    assert prepared == [(["update 0"], False)]


def test_with_one_copy_of_the_weights_the_next_batch_begins_during_training(tmp_path):
    config = planned(
        training={"steps": 5}, weights={"bridge": "single_copy"}, evaluation={"every": 2, "at_start": False}
    )
    run = finished(tmp_path, config=config, begins_early=True)
    begun = [call for call in run.calls if call.startswith(("begin", "evaluate", "update"))]
    assert begun == [
        "update 0", "begin the batch of 1", "update 1", "update 2", "evaluate 2", "begin the batch of 3", "update 3",
        "update 4", "evaluate 4", "update 5", "evaluate 5",
    ], "none that an evaluation would come before"  # fmt: skip
    timed = planned(
        training={"steps": 5, "max_seconds": 1e6}, weights={"bridge": "single_copy"}, evaluation={"every": 2}
    )
    calls = finished(tmp_path / "timed", config=timed, begins_early=True).calls
    assert not any(call.startswith("begin") for call in calls), "nor one that the time limit would"
    assert run.calls.index("begin the batch of 1") == run.calls.index("take 0") + 1
    phases = run.log.phases
    first = ["update", "update", "probe", "batch", "train", "update", "batch", "probe", "batch"]
    assert phases[: len(first)] == first, "the probe comes with the batch"


def test_each_step_takes_a_batch_trains_updates_the_engine_and_releases_it(tmp_path, collected):
    run = finished(tmp_path)
    steps = [
        [f"take {step}", "prepare 0.5", "fence", "commit", f"update {step + 1}", f"release {step + 1}"]
        for step in range(3)
    ]
    assert run.calls == ["update 0", "release 0", *itertools.chain(*steps)]
    update = ["update", "update", "probe"]
    assert run.log.phases == [*update, *["batch", "train", *update] * 3, "checkpoint"]
    assert run.log.repeated == ["train"] * 3
    assert collected == ["freeze", "freeze", "unfreeze"], "at the start, and after the first step"
    assert list(run.log.rows) == [0, 1, 2, 3]
    row = run.log.rows[3]
    assert (row["probe/abs_logprob_diff"], row["train/loss"], row["reward/mean"]) == (0.0, 0.25, 0.5)
    assert row["time/after_batch_s"] >= 0.0
    assert [(step, "none" in row) for step, row in run.progress.steps] == [(step, False) for step in range(4)]
    assert run.progress.phases == [("update weights", None), *[("train", 1), ("update weights", None)] * 3]
    (told,) = run.log.of("checkpoint")
    assert (told["step"], told["path"], told["beside"]) == (3, "checkpoints/step-000003", False)
    assert run.loop.writer.saved_step == 3
    assert [told["verdict"] for told in run.log.of("readiness")] == ["ready for RL"], "of the first batch alone"
    assert run.progress.messages[0].startswith("first batch: ready for RL: ")
    assert run.log.warnings == []


def test_without_an_engine_only_batches_and_checkpoints_are_left(tmp_path, collected):
    config = planned("sft", training={"steps": 4}, run={"checkpoint_every": 2})
    run = finished(tmp_path, config=config, with_engine=False)
    assert run.calls == [call for step in range(4) for call in (f"take {step}", "prepare 0.5", "commit")]
    assert [told["step"] for told in run.log.of("checkpoint")] == [2, 4], "the last step's once"
    assert list(run.log.rows) == [1, 2, 3, 4]
    assert run.log.of("readiness") == []


def test_under_sft_the_engine_gets_the_weights_that_it_generates_or_evaluates_with(tmp_path):
    matching = {"pattern": ["A", "A", "B", "A"]}
    config = planned("sft", matching=matching, training={"steps": 6}, evaluation={"every": 4, "at_start": False})
    run = finished(tmp_path, config=config)
    assert [call for call in run.calls if call.partition(" ")[0] in ("update", "evaluate", "release")] == [
        "update 0", "release 0", "update 2", "release 2", "update 4", "evaluate 4", "release 4",
        "update 6", "evaluate 6", "release 6",
    ]  # fmt: skip


def test_samples_and_batches_are_kept_as_asked(tmp_path):
    groups = ((1.0, 0.0), (0.0, 1.0))
    batches = [batch_of(step, *groups) for step in range(3)]
    config = planned(run={"save_samples": 3, "keep_batches": 1})
    run = make_run(tmp_path, batches, config=config)
    close = run.loop._batches.close
    run.loop._batches.close = lambda: run.calls.append("kept") or close()
    run.loop.run()
    assert run.calls[-1] == "kept", "it waits for the disk"
    assert [record["id"] for record in run.log.samples[:3]] == ["0.0.0", "0.0.1", "0.1.0"]
    assert len(run.log.samples) == 9
    assert run.log.samples[0]["carries_loss"] is True
    assert run.log.samples[0]["advantage"] == -run.log.samples[1]["advantage"] > 0.0
    assert run.log.samples[3]["version"] == "0.1"
    kept = sorted(path.name for path in (tmp_path / "batches").iterdir())
    assert kept == ["000000.msg", "000002.msg"], "the newest, and that of the start model"
    assert not (make_run(tmp_path / "none", config=planned("sft", run={"keep_batches": 2})).loop._batches)


def test_a_run_ends_at_its_time_limit(tmp_path):
    run = make_run(tmp_path, config=planned(training={"max_seconds": 100.0}), trained_s=100.0)
    assert run.loop.trained_s == 100.0, "before it begins"
    run.loop.run()
    assert run.calls[-2:] == ["update 1", "release 1"]
    assert run.log.of("time_limit") == [{"step": 1, "max_seconds": 100.0}]
    assert "the run ends at step 1: training.max_seconds = 100" in run.progress.messages
    assert run.loop.trained_s > 100.0
    assert run.loop.writer.saved_step == 1
    rested = finished(tmp_path / "more", config=planned(training={"max_seconds": 1e6}), trained_s=100.0)
    assert (rested.loop.step, rested.log.of("time_limit")) == (3, [])


def test_times_are_since_the_batch_came_and_since_training_began(tmp_path, monkeypatch):
    ticks = itertools.count(5)
    for each in (module, steps):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    run = finished(tmp_path, trained_s=100.0)
    assert [row.get("time/after_batch_s") for row in run.log.rows.values()] == [None, 1.0, 1.0, 1.0]
    assert run.loop.trained_s == 107.0


class Writer:
    """Notes what is asked of a writer of checkpoints."""

    def __init__(self, calls):
        self.calls, self.saved_step = calls, 0

    def is_due(self, step):
        return step == 2

    def save(self, step, extra, *, best, last):
        self.calls.append(f"save {step} {best} {last}")

    def __getattr__(self, name):
        return lambda: self.calls.append(name)


def test_checkpoints_have_their_clock_and_the_last_is_waited_for(tmp_path):
    run = make_run(tmp_path)
    run.loop.writer = Writer(run.calls)
    run.loop.run()
    assert run.calls[:4] == ["update 0", "release 0", "begin", "take 0"], "it starts when training begins"
    assert run.calls[-3:] == ["save 3 None True", "wait", "close"]
    assert run.calls.count("save 2 None False") == run.calls.count("wait") == 1
    stopped = make_run(tmp_path, should_stop=lambda: True)
    stopped.loop.writer = Writer(stopped.calls)
    with pytest.raises(Interrupted):
        stopped.loop.run()
    assert stopped.calls[-3:] == ["save 0 None True", "wait", "close"]


def test_a_stop_ends_a_run_between_steps_with_a_checkpoint(tmp_path, collected):
    asked = iter([False, True])
    run = make_run(tmp_path, should_stop=lambda: next(asked))
    with pytest.raises(Interrupted, match=r"stopped at step 1 of 3: continue with --resume"):
        run.loop.run()
    assert run.loop.writer.saved_step == 1
    assert (tmp_path / "checkpoints/step-000001").is_dir()
    assert collected == ["freeze", "freeze", "unfreeze"], "at the start, and after the first step"


def test_a_stop_while_the_engine_is_awaited_keeps_the_step_and_its_row(tmp_path):
    run = make_run(tmp_path)
    update = run.engine.update

    def interrupted(step):
        if step == 2:
            raise Interrupted("now")
        return update(step)

    run.engine.update = interrupted
    with pytest.raises(Interrupted):
        run.loop.run()
    assert (run.loop.step, run.loop.writer.saved_step, list(run.log.rows)) == (2, 2, [0, 1, 2])
    assert "time/after_batch_s" not in run.log.rows[2]


@pytest.mark.parametrize(
    ("staleness", "version", "is_refused"), [(0, 2, 0), (0, 1, 1), (1, 1, 0), (1, 0, 1), (1, 3, 1)]
)
def test_batches_by_versions_that_staleness_does_not_allow_are_refused(tmp_path, staleness, version, is_refused):
    batches = [batch_of(0), batch_of(1), batch_of(2, version=version)]
    run = make_run(tmp_path, batches, config=planned(training={"staleness": staleness}))
    if not is_refused:
        run.loop.run()
        return
    with pytest.raises(TrainingError, match=rf"step 2 was begun by version 0\.{version}: .*staleness = {staleness}"):
        run.loop.run()
    finished(tmp_path / "sft", batches, config=planned("sft"), with_engine=False)


def test_batches_without_signal_are_skipped_told_once_and_too_many_end_the_run(tmp_path):
    quiet, loud = ((1.0, 1.0),), ((1.0, 0.0),)
    batches = [batch_of(step, *groups) for step, groups in enumerate([quiet, quiet, loud, quiet, quiet, quiet])]
    config = planned(training={"steps": 6}, run={"max_steps_without_signal": 3})
    run = make_run(tmp_path, batches, config=config)
    with pytest.raises(TrainingError, match=r"no group had any reward variance in 3 consecutive steps .* = 3\): make"):
        run.loop.run()
    skipped = [each for each in run.log.warnings if "teaches nothing" in each[0]]
    reason = "no group had any reward variance"
    assert skipped == [(f"step {step} teaches nothing: {reason}", {"step": step}) for step in (0, 3)]
    assert run.log.of("skipped") == [{"step": step, "reason": reason} for step in (1, 4, 5)]
    assert [run.log.rows[step].get("train/skipped") for step in (1, 2, 3, 4)] == [1.0, 1.0, None, 1.0]
    assert (run.log.rows[1]["tokens/trained"], run.log.rows[1]["dropped_tokens/skipped"]) == (0.0, 4.0)
    assert run.log.rows[3]["tokens/trained"] == 4.0
    assert run.learner.step == 1
    verdict = run.log.of("readiness")[0]["verdict"]
    assert verdict == "task too easy"
    assert run.log.warnings[0][0].startswith("first batch: task too easy: ")
    assert run.log.warnings[0][1] == {"step": 0}


def test_a_run_that_learned_nothing_is_an_error(tmp_path, collected):
    run = make_run(tmp_path, [batch_of(step, (0.0, 0.0)) for step in range(3)])
    with pytest.raises(TrainingError, match="nothing was trained in 3 steps: no group had any reward variance: make"):
        run.loop.run()
    assert not (tmp_path / "checkpoints").exists()
    assert collected == ["freeze", "unfreeze"], "nothing was warm"


def test_what_a_run_lacked_is_named(tmp_path):
    batches = [batch_of(step, outcome="truncated") for step in range(3)]
    run = make_run(tmp_path, batches, config=planned(algorithm={"arguments": {"train_on_truncated": False}}))
    with pytest.raises(TrainingError, match="trained in 3 steps: no completion ended before the limit, and"):
        run.loop.run()


def test_while_a_critic_warms_up_steps_without_signal_count_on(tmp_path):
    quiet, warm = BatchResult({}, no_signal=NoSignal.NO_VARIANCE), BatchResult({}, is_critic_only=True)
    run = make_run(tmp_path, config=planned(training={"steps": 9}, run={"max_steps_without_signal": 3}))
    results = iter([quiet, BatchResult({}), quiet, warm, quiet, warm, quiet])
    run.loop._trainer = SimpleNamespace(train=lambda batch, objective: next(results))
    with pytest.raises(TrainingError, match="in 3 consecutive steps"):
        run.loop.run()
    assert run.loop.step == 6
    assert run.log.repeated == ["train"] * 3


def test_draws_of_trained_and_skipped_batches_are_used_up(tmp_path):
    batches = [batch_of(0, draws=[1, 0]), batch_of(1, (0.0, 0.0), draws=[3]), batch_of(2, draws=[5, 2])]
    run = finished(tmp_path, batches, config=planned(training={"order": "ready"}))
    assert run.loop.resumed.draws == Draws(6, {4})
    again = make_run(tmp_path, config=planned(training={"order": "ready"}), after=tmp_path / "checkpoints/step-000003")
    assert again.loop.resumed.draws == Draws(6, {4})


class Curriculum:
    """Changes after the first step."""

    def __init__(self):
        self.asked, self.loaded = [], None

    def metrics(self, drawn):
        return {"task/a/probability": float(drawn)}

    def observe(self, batch, step, draws):
        self.asked.append((batch.step, step, draws.next))
        return (5, [1.0]) if step == 1 else None

    def state(self):
        return {"kept": True}

    def load(self, state):
        self.loaded = state


def test_a_curriculum_sees_every_batch_and_its_change_goes_out_with_the_release(tmp_path):
    batches = [batch_of(0, draws=[4, 9]), batch_of(1, draws=[3]), batch_of(2)]
    run = finished(tmp_path, batches, config=planned(training={"order": "ready"}), curriculum=Curriculum())
    assert [call for call in run.calls if call.startswith("release")] == [
        "release 0", "release 1 (5, [1.0])", "release 2", "release 3",
    ]  # fmt: skip
    assert run.loop.curriculum.asked == [(0, 1, 10), (1, 2, 10), (2, 3, 10)]
    assert [run.log.rows[step]["task/a/probability"] for step in (1, 2, 3)] == [4.0, 1.0, 2.0], "of the last draw"
    again = make_run(
        tmp_path,
        config=planned(training={"order": "ready"}),
        curriculum=Curriculum(),
        after=tmp_path / "checkpoints/step-000003",
    )
    assert again.loop.curriculum.loaded == {"kept": True}
    make_run(tmp_path, config=planned(training={"order": "ready"}), after=tmp_path / "checkpoints/step-000003")
    finished(tmp_path / "plain")
    new = make_run(tmp_path, curriculum=Curriculum(), after=tmp_path / "plain/checkpoints/step-000003")
    assert new.loop.curriculum.loaded is None


def test_a_resumed_run_goes_on_where_the_first_one_was(tmp_path):
    batches = [batch_of(0), batch_of(1, (1.0, 1.0)), *(batch_of(step) for step in range(2, 5))]
    finished(tmp_path, batches, config=planned(training={"steps": 2}), identity=Identity(5, {"tasks": "a"}))
    extra = json.loads((tmp_path / "checkpoints/step-000002/state/state.json").read_text())
    assert extra == extra | {
        "step": 2, "lineage": 7, "trained_steps": 1, "quiet_steps": 1, "num_items": 5, "identity": {"tasks": "a"},
    }  # fmt: skip
    assert not {"draws", "curriculum"} & extra.keys()
    assert (tmp_path / "checkpoints/step-000002/weights/weights").read_text() == "start 1"
    done = make_run(
        tmp_path,
        config=planned(training={"steps": 2}),
        identity=Identity(5),
        after=tmp_path / "checkpoints/step-000002",
    )
    assert (done.loop.step, done.learner.step, done.loop.writer.saved_step) == (2, 1, 2)
    assert done.loop.resumed.draws == Draws(4)
    done.loop.run()
    assert done.calls == ["update 2", "release 2"]
    assert done.log.of("checkpoint") == [], "it has that already"
    again = finished(
        tmp_path,
        batches,
        config=planned(training={"steps": 4}),
        identity=Identity(5),
        after=tmp_path / "checkpoints/step-000002",
    )
    assert [call for call in again.calls if call.startswith("take")] == ["take 2", "take 3"]
    assert (again.learner.step, again.loop.step, again.log.warnings) == (3, 4, [])


def test_quiet_steps_before_a_resume_count_on(tmp_path):
    batches = [batch_of(0), *(batch_of(step, (0.0, 0.0)) for step in range(1, 4))]
    finished(tmp_path, batches, config=planned(training={"steps": 2}))
    config = planned(training={"steps": 5}, run={"max_steps_without_signal": 3})
    again = make_run(tmp_path, batches, config=config, after=tmp_path / "checkpoints/step-000002")
    with pytest.raises(TrainingError, match="in 3 consecutive steps"):
        again.loop.run()
    assert again.loop.step == 3


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (Identity(6, {"tasks": "a", "model": "m"}), "with 5 training items, now there are 6"),
        (Identity(5, {"tasks": "b", "model": "m"}), "made with other tasks than there are now"),
        (Identity(5, {"model": "other"}), "made with other model"),
    ],
)
def test_a_resume_with_other_data_is_refused_unless_allowed(tmp_path, other, problem):
    finished(tmp_path, identity=Identity(5, {"tasks": "a", "model": "m"}))
    path = tmp_path / "checkpoints/step-000003"
    with pytest.raises(ConfigError, match=problem):
        make_run(tmp_path, identity=other, after=path)
    allowed = dataclasses.replace(other, may_differ=frozenset({"training items", "tasks", "model"}))
    for identity in (allowed, Identity(5, {"new": "n"})):
        run = make_run(tmp_path, identity=identity, after=path)
        assert run.loop.step == 3
