"""The training loop beside its steps: probes of the engine, evaluations, the held-out loss, the best checkpoint."""

import math

import pytest
from tests.trainer.loops import batch_of, finished, make_run, planned, sequence

from slipstream.errors import MismatchError, TrainingError


def probed(folder, *differs, config=None, **fields):
    """A run whose probe finds these differences at version 0; the loop's metrics of it."""
    run = make_run(folder, config=config or planned(), **fields)
    run.engine.differs = differs
    return run, run.loop.synchronise(evaluate=False, is_last=False)


def test_the_probes_mean_and_largest_difference_are_recorded(tmp_path):
    run, metrics = probed(tmp_path, 0.125, -0.25, 0.25, 0.25)
    assert metrics == {"probe/abs_logprob_diff": 0.21875, "probe/max_logprob_diff": 0.25}
    assert run.log.warnings == []
    assert run.learner.rows == [None]
    engines = planned(inference={"replicas": 2})
    _, metrics = probed(tmp_path, 0.0, -0.125, 0.25, 0.25, config=engines)
    assert metrics["probe/abs_logprob_diff"] == 0.25, "of the engine that is worst"
    run = make_run(tmp_path, config=planned(inference={"replicas": 3}))
    run.engine.differs, run.engine.prompts = [0.0, 0.25, 0.0, 0.25], [(1,), (9,), (1,), (9,)]
    assert run.loop.synchronise(evaluate=False, is_last=False)["probe/abs_logprob_diff"] == 0.125, "one is not probed"


def test_a_large_difference_is_told_and_a_larger_one_ends_the_run(tmp_path):
    run, _ = probed(tmp_path, 0.25)
    assert run.log.warnings == [], "at the limit"
    run, metrics = probed(tmp_path, 0.5)
    ((text, fields),) = run.log.warnings
    assert text.startswith("engine and trainer differ by 0.500 in log-probability per token at version 0, above ")
    assert "above weights.probe_warn = 0.25; " in text
    assert "without top_p" not in text
    assert fields == {"step": 0}
    assert metrics["probe/abs_logprob_diff"] == 0.5
    probed(tmp_path, 1.0)
    for much in (1.5, math.nan):
        with pytest.raises(MismatchError, match=r"at version 0, above weights.probe_stop = 1; "):
            probed(tmp_path, much)


def test_a_difference_that_has_grown_is_compared_with_the_first_and_the_last_probe(tmp_path):
    run, _ = probed(tmp_path, 0.125)
    for differs in (0.25, 0.5):
        run.engine.differs = [differs]
        run.loop.synchronise(evaluate=False, is_last=False)
    ((text, _),) = run.log.warnings
    assert "it has grown from 0.125 at first" in text
    run.engine.differs = [0.125]
    run.loop.synchronise(evaluate=False, is_last=False)
    run.engine.differs = [0.75]
    run.loop.synchronise(evaluate=False, is_last=False)
    assert "it was 0.125 at the version before" in run.log.warnings[-1][0]


@pytest.mark.parametrize(("shared", "differs", "is_told"), [(True, 0.25, 1), (True, 0.5, 0), (False, 0.25, 0)])
def test_with_shared_kernels_a_small_difference_is_no_rounding(tmp_path, shared, differs, is_told):
    config = planned(model={"shared_kernels": shared}, weights={"probe_warn": 0.125})
    run, _ = probed(tmp_path, differs, config=config)
    assert ("under model.shared_kernels there should be none" in run.log.warnings[0][0]) == bool(is_told)


def test_an_exact_run_takes_no_difference_at_all(tmp_path):
    config = planned(run={"exact": True})
    _, metrics = probed(tmp_path, 0.0, config=config)
    assert metrics["probe/abs_logprob_diff"] == 0.0
    with pytest.raises(MismatchError, match=r"at version 0, and run\.exact"):
        probed(tmp_path, 1e-6, config=config)


def test_under_sleep_mode_one_sequence_at_a_time_is_computed(tmp_path):
    config = planned("sft", inference={"sleep": True}, evaluation={"every": 9, "at_start": True})
    held_out = [sequence(size=3), sequence(size=6)]
    run = make_run(tmp_path, config=config, held_out=held_out)
    run.engine.differs = [0.5, 0.5]
    run.loop.synchronise(evaluate=False, is_last=False)
    assert run.learner.rows
    assert set(run.learner.rows) == {3}
    run.learner.rows.clear()
    run.loop.measure_held_out()
    assert run.learner.rows == [7]


def test_the_held_out_loss_is_measured_with_every_evaluation(tmp_path):
    config = planned("sft", training={"steps": 5}, evaluation={"every": 2, "at_start": True})
    held_out = [sequence(size=2), sequence(size=4)]
    run = finished(tmp_path, config=config, with_engine=False, held_out=held_out)
    rows = {step: row for step, row in run.log.rows.items() if "eval/loss" in row}
    assert list(rows) == [0, 2, 4, 5]
    assert rows[0] == {"eval/loss": 0.5, "eval/perplexity": math.exp(0.5)}
    assert run.loop.held_out_loss == rows[0]
    assert run.learner.rows == [10] * 4
    assert run.progress.advanced == 8
    assert run.progress.phases[0] == ("evaluate", 2)
    assert run.log.phases[:2] == ["held_out_loss", "batch"]
    assert run.loop.evaluations.done_step == 5
    both = finished(tmp_path / "both", config=config, held_out=held_out)
    assert both.log.rows[2].keys() >= {"eval/loss", "eval/accuracy", "probe/abs_logprob_diff"}
    assert both.log.rows[1].keys().isdisjoint({"eval/loss", "eval/accuracy"})
    assert [call for call in both.calls if call.startswith("evaluate")] == [f"evaluate {step}" for step in (0, 2, 4, 5)]


def test_held_out_sequences_are_computed_some_rows_at_once(tmp_path):
    """16 rows of 10 tokens for each rank."""
    config = planned("sft", training={"ranks": 2}, evaluation={"every": 2})
    run = make_run(tmp_path, config=config, with_engine=False, held_out=[sequence(size=9)] * 33)
    run.loop.measure_held_out()
    assert run.learner.rows == [10, 10]


def test_a_resume_makes_up_for_the_evaluation_that_was_cut_off(tmp_path):
    config = planned(evaluation={"every": 2, "at_start": False})
    run = make_run(tmp_path, config=config)
    run.loop.step = 2
    run.loop.run()
    assert run.calls[:4] == ["update 2", "evaluate 2", "release 2", "take 2"]
    assert run.log.rows[2]["eval/accuracy"] == 0.0
    done = make_run(tmp_path / "done", config=config)
    done.loop.step, done.loop.evaluations.done_step = 2, 2
    done.loop.run()
    assert done.calls[:3] == ["update 2", "release 2", "take 2"]


def test_the_last_version_is_evaluated_by_all_engines_on_resume_too(tmp_path):
    settings = {"every": 2, "at_start": False, "beside": True}
    for steps, call in ((4, "begin 2"), (2, "evaluate 2")):
        run = make_run(tmp_path / str(steps), config=planned(training={"steps": steps}, evaluation=settings))
        run.loop.step, run.loop._trained_steps = 2, 1
        run.loop.run()
        assert run.calls[:3] == ["update 2", call, "release 2"]


def test_an_evaluation_that_ends_at_once_marks_the_checkpoint_that_was_just_written(tmp_path):
    settings = {"every": 2, "at_start": False, "patience": 9, "beside": True}
    run = make_run(tmp_path, config=planned(training={"steps": 3}, evaluation=settings), accuracies={2: 0.5})
    take = run.engine.take_evaluation
    run.engine.take_evaluation = lambda *, waits: take(waits=True)
    run.loop.run()
    assert [told["step"] for told in run.log.of("checkpoint")] == [2, 3]
    assert run.log.of("best") == [{"step": 2, "accuracy": 0.5}]
    assert run.log.rows[2]["eval/steps_later"] == 0.0
    assert run.loop.writer.store.best() == tmp_path / "checkpoints/step-000002"


def test_reaching_stop_at_ends_the_run_after_that_step(tmp_path):
    config = planned(training={"steps": 9}, evaluation={"every": 2, "at_start": False, "stop_at": 0.5})
    run = finished(tmp_path, config=config, accuracies={2: 0.25, 4: 0.5})
    assert run.loop.step == run.loop.writer.saved_step == 4
    reason = "accuracy 0.5 reached evaluation.stop_at = 0.5"
    assert run.log.of("early_stop") == [{"step": 4, "reason": reason}]
    assert run.progress.messages[-1] == f"the run ends at step 4: {reason}"
    assert run.log.of("best") == []


def test_a_start_model_that_is_good_enough_is_no_run_that_learned_nothing(tmp_path):
    config = planned(evaluation={"every": 2, "at_start": True, "stop_at": 0.5})
    run = finished(tmp_path, config=config, accuracies={0: 0.5})
    assert (run.loop.step, run.loop.writer.saved_step) == (0, 0)


def test_a_run_that_ends_early_without_having_learned_is_an_error(tmp_path):
    config = planned(training={"steps": 9}, evaluation={"every": 2, "at_start": False, "stop_at": 0.5})
    run = make_run(tmp_path, [batch_of(step, (1.0, 1.0)) for step in range(2)], config=config, accuracies={2: 0.5})
    with pytest.raises(TrainingError, match="nothing was trained in 2 steps"):
        run.loop.run()


def test_the_best_versions_checkpoint_is_kept_and_patience_ends_the_run(tmp_path):
    config = planned(training={"steps": 9}, evaluation={"every": 1, "at_start": False, "patience": 2})
    run = finished(tmp_path, config=config, accuracies={1: 0.25, 2: 0.5, 3: 0.5, 4: 0.25})
    assert run.loop.step == 4
    assert run.log.of("best") == [{"step": 1, "accuracy": 0.25}, {"step": 2, "accuracy": 0.5}]
    assert run.loop.writer.store.best() == (tmp_path / "checkpoints/step-000002").resolve()
    assert [told["step"] for told in run.log.of("checkpoint")] == [1, 2, 4]
    again = make_run(tmp_path, config=config, after=tmp_path / "checkpoints/step-000004")
    assert again.loop.writer.store.best_step == 2
    assert again.loop.evaluations.early_stop.best == 0.5
    plain = make_run(tmp_path, config=planned(evaluation={"every": 1}), after=tmp_path / "checkpoints/step-000004")
    assert plain.loop.writer.store.best_step is None


def test_an_evaluation_beside_training_is_recorded_later_and_its_step_is_kept(tmp_path):
    settings = {"every": 2, "at_start": False, "patience": 3, "beside": True}
    run = finished(
        tmp_path, config=planned(training={"steps": 5}, evaluation=settings), accuracies={2: 0.5, 4: 0.25, 5: 0.75}
    )
    assert [call for call in run.calls if call.partition(" ")[0] in ("begin", "evaluate")] == [
        "begin 2", "evaluate 2", "begin 4", "evaluate 4", "evaluate 5",
    ]  # fmt: skip
    assert [told["step"] for told in run.log.of("checkpoint")] == [2, 4, 5]
    assert run.log.of("best") == [{"step": 2, "accuracy": 0.5}, {"step": 5, "accuracy": 0.75}]
    assert run.log.of("evaluation_began") == [{"step": 2}, {"step": 4}]
    assert run.log.rows[2]["eval/accuracy"] == 0.5
    assert run.log.rows[2]["eval/steps_later"] == 2.0
    assert run.loop.writer.store.candidate_step is None


def test_where_an_evaluation_beside_training_ends_the_run_its_last_version_is_evaluated_too(tmp_path):
    settings = {"every": 2, "at_start": False, "stop_at": 0.5, "beside": True}
    run = make_run(tmp_path, config=planned(training={"steps": 9}, evaluation=settings), accuracies={2: 0.5, 3: 0.25})
    take = run.engine.take_evaluation
    run.engine.take_evaluation = lambda *, waits: take(waits=waits or run.loop.step == 3)
    run.loop.run()
    assert run.loop.step == 3
    assert run.calls[-2:] == ["evaluate 2", "evaluate 3"]
    assert run.log.rows[3]["eval/accuracy"] == 0.25


def test_metrics_that_show_nothing_left_to_learn_are_told(tmp_path):
    batches = [batch_of(0), *(batch_of(step, (0.5, 0.5)) for step in range(1, 5))]
    run = finished(tmp_path, batches, config=planned(training={"steps": 5}))
    told = [(text, fields) for text, fields in run.log.warnings if "hardly anything to learn" in text]
    assert [fields for _, fields in told] == [{"step": 4}]
