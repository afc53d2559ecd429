"""When evaluations end a run, those beside training, and what of it survives a checkpoint."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from slipstream.config import EvaluationConfig
from slipstream.trainer.evaluations import LATER, EarlyStop, Evaluations


def observe(watch, accuracies, first=0):
    return [watch.observe(first + n, {"eval/accuracy": value}) for n, value in enumerate(accuracies)]


@pytest.mark.parametrize("config", [None, EvaluationConfig()])
def test_without_settings_a_run_goes_on(config):
    watch = EarlyStop(config)
    observe(watch, [1.0, 0.0, 0.0, 0.0])
    assert (watch.reason, watch.keeps_best) == ("", False)


def test_stop_at():
    watch = EarlyStop(EvaluationConfig(every=1, stop_at=0.5))
    observe(watch, [0.2, 0.49])
    assert watch.reason == ""
    observe(watch, [0.5])
    assert watch.reason == "accuracy 0.5 reached evaluation.stop_at = 0.5"


def test_patience_counts_evaluations_without_a_better_one():
    watch = EarlyStop(EvaluationConfig(every=1, patience=2))
    assert observe(watch, [0.1, 0.3, 0.3, 0.4, 0.2]) == [True, True, False, True, False]
    assert watch.observe(5, {"train/loss": 1.0}) is False
    assert watch.reason == ""
    again = EarlyStop(EvaluationConfig(every=1, patience=2))
    again.load(json.loads(json.dumps(watch.state())))
    for each in (watch, again):
        observe(each, [0.4])
        assert "no better accuracy than 0.4 of step 3 (evaluation.patience = 2)" in each.reason
        assert each.best_step == 3


def test_what_has_ended_a_run_is_not_taken_back():
    watch = EarlyStop(EvaluationConfig(every=1, stop_at=0.5))
    observe(watch, [0.2, 0.6, 0.1])
    assert "accuracy 0.6 reached" in watch.reason


class Engine:
    """Evaluates when it is told to; accuracies are told beforehand."""

    def __init__(self, **accuracies):
        self.accuracies = {int(name[1:]): value for name, value in accuracies.items()}
        self.has_ended, self.calls, self.running = False, [], None

    def evaluate(self, step, meanwhile=None):
        assert self.running is None
        self.calls.append(("evaluate", step))
        return {"eval/accuracy": self.accuracies[step]}

    def begin_evaluation(self, step):
        assert self.running is None
        self.calls.append(("begin", step))
        self.running = step

    def take_evaluation(self, *, waits):
        if self.running is None or not (waits or self.has_ended):
            return None
        self.calls.append(("take", self.running))
        step, self.running = self.running, None
        return {"eval/accuracy": self.accuracies[step]}


class Run:
    """The evaluations of a run, and what was recorded of them."""

    def __init__(self, folder, engine=None, *, steps=10, **settings):
        self.engine, self.folder, self.rows, self.shown, self.best, self.warnings = engine, folder, [], [], [], []
        values = {"every": 2, "beside": True, **settings}
        config = SimpleNamespace(evaluation=EvaluationConfig(**values), training=SimpleNamespace(steps=steps))
        progress = SimpleNamespace(evaluated=lambda *row: self.shown.append(row), phase=lambda name: None)
        self.evaluations = Evaluations(config, self, progress, lambda *best: self.best.append(best))

    def make(self, *steps, is_last=False):
        """What the last of these brings at once."""
        for step in steps:
            found = self.evaluations.make(self.engine, step, is_last=is_last)
        return found

    def take(self, step, *, waits=True):
        self.evaluations.take(self.engine, step, waits=waits)

    def add_metrics(self, step, values):
        self.rows.append((step, dict(values)))

    def warning(self, text, **fields):
        self.warnings.append(text)
        self.warned = fields

    def event(self, kind, **fields):
        pass

    def phase(self, name):
        return contextlib.nullcontext()


def run_of(folder, settings=None, **accuracies):
    return Run(folder, Engine(**accuracies), **settings or {})


def test_one_beside_training_is_recorded_at_its_step_when_it_comes(tmp_path):
    run = run_of(tmp_path, _2=0.25)
    assert run.evaluations.is_due(2, is_last=False)
    assert run.make(2) == {}
    run.take(2, waits=False)
    assert (run.rows, run.evaluations.running, run.evaluations.done_step) == ([], 2, -1)
    run.engine.has_ended = True
    run.take(5, waits=False)
    assert run.rows == run.shown == [(2, {"eval/accuracy": 0.25, LATER: 3.0})]
    assert (run.evaluations.running, run.evaluations.done_step) == (None, 2)


def test_the_next_one_waits_for_it_and_the_last_is_made_by_all_engines(tmp_path):
    run = run_of(tmp_path, _2=0.25, _4=0.5, _10=0.75)
    for step in (2, 4):
        assert run.make(step) == {}
    assert run.make(10, is_last=True) == {"eval/accuracy": 0.75}
    assert run.engine.calls == [("begin", 2), ("take", 2), ("begin", 4), ("take", 4), ("evaluate", 10)]
    assert [step for step, _ in run.rows] == [2, 4]
    assert run.evaluations.done_step == 10


def test_one_that_ends_the_run_is_followed_by_that_of_the_last_version(tmp_path):
    run = run_of(tmp_path, {"stop_at": 0.5}, _2=0.25, _4=0.5, _6=0.0)
    run.make(2, 4)
    # The next is due when it is seen that the run ends: it is the last.
    assert run.make(6) == {"eval/accuracy": 0.0}
    assert "0.5 reached" in run.evaluations.early_stop.reason
    run.evaluations.make_last(run.engine, 6)
    assert run.engine.calls[-1] == ("evaluate", 6), "once"
    # Otherwise steps were made since, and their version is evaluated at the end.
    run = run_of(tmp_path, {"stop_at": 0.5}, _2=0.5, _3=0.25)
    run.make(2)
    run.take(3)
    run.evaluations.make_last(run.engine, 3)
    assert [(step, row["eval/accuracy"]) for step, row in run.rows] == [(2, 0.5), (3, 0.25)]


def test_the_best_is_told_with_its_own_step_where_it_is_kept(tmp_path):
    run = run_of(tmp_path, {"patience": 5}, _2=0.5, _4=0.25, _6=0.75)
    run.make(2, 4, 6)
    run.take(9)
    assert run.best == [(2, 0.5), (6, 0.75)]
    run = run_of(tmp_path, {"stop_at": 0.9}, _2=0.5)
    run.make(2)
    run.take(3)
    assert (run.evaluations.early_stop.best, run.best) == (0.5, []), "where it is kept"


def kept(run):
    return json.loads(json.dumps(run.evaluations.state()))


def test_one_that_had_not_ended_is_made_again_by_a_resume_from_its_step_and_missing_after_one_from_a_later(tmp_path):
    run = run_of(tmp_path, _2=0.5)
    run.make(2)
    state = kept(run)
    same = Run(tmp_path)
    same.evaluations.load(state, 2)
    assert (same.evaluations.is_due_at_start(2), same.warnings) == (True, [])
    later = Run(tmp_path)
    later.evaluations.load(state, 3)
    assert not later.evaluations.is_due_at_start(3)
    assert later.warnings == [
        "the evaluation of step 2 had not ended when the run did, and is missing: the run goes on from step 3, whose "
        "weights are others"
    ]
    assert later.warned == {"step": 2}


def resumed(run, *rows, **settings):
    """From a checkpoint of step 3; with these rows in the file of metrics."""
    lines = [json.dumps({"time": 0.0, "lineage": 0, **row}) for row in rows]
    (run.folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (run.folder / "events.jsonl").write_text("")
    again = Run(run.folder, **settings)
    again.evaluations.load(kept(run), 3)
    return again


def test_one_that_was_recorded_after_the_checkpoint_counts(tmp_path):
    run = run_of(tmp_path, {"patience": 1}, _2=0.0)
    run.make(2)
    again = resumed(run, {"step": 2}, {"step": 2, "eval/accuracy": 0.0}, patience=1)
    assert (again.warnings, again.evaluations.done_step, again.best) == ([], 2, [(2, 0.0)])


def test_a_checkpoint_of_an_earlier_version_has_none_beside_training(tmp_path):
    run = Run(tmp_path)
    state = kept(run)
    del state["evaluating_step"]
    run.evaluations.load(state, 3)
    assert run.warnings == []


def evaluations_of(tmp_path, **settings):
    return Run(tmp_path, **settings).evaluations


def test_which_versions_are_evaluated(tmp_path):
    each = evaluations_of(tmp_path, every=3)
    assert [step for step in range(1, 11) if each.is_due(step, is_last=step == 10)] == [3, 6, 9, 10]
    last = evaluations_of(tmp_path, every=0)
    assert [step for step in range(1, 11) if last.is_due(step, is_last=step == 10)] == [10]
    config = SimpleNamespace(evaluation=None, training=SimpleNamespace(steps=10))
    none = Evaluations(config, Run(tmp_path), SimpleNamespace(), lambda *best: None)
    assert not none.is_due(10, is_last=True)
    assert not none.is_due_at_start(0)
    assert not none.is_due_at_start(10)


def test_what_is_evaluated_before_the_first_step(tmp_path):
    for at_start in (True, False):
        assert evaluations_of(tmp_path, at_start=at_start).is_due_at_start(0) == at_start
    resumed = evaluations_of(tmp_path, every=2, at_start=True)
    assert [step for step in range(1, 11) if resumed.is_due_at_start(step)] == [2, 4, 6, 8, 10]
    odd = evaluations_of(tmp_path, every=2, steps=9)
    assert odd.is_due_at_start(9), "the last"
    odd.done_step = 9
    assert not odd.is_due_at_start(9)
    odd.done_step = 8
    assert not odd.is_due_at_start(8)


def test_who_waits_for_an_evaluation_says_so_and_where_it_ends_nothing_new_begins(tmp_path):
    run = run_of(tmp_path, {"stop_at": 0.5}, _2=0.5, _4=0.25)
    phases = []
    run.evaluations._progress.phase = phases.append
    run.make(2)
    assert phases == []
    assert run.make(4) == {"eval/accuracy": 0.25}
    assert phases == ["wait for the evaluation of step 2"]
    assert run.rows == [(2, {"eval/accuracy": 0.5, LATER: 2.0})]
    run.evaluations.make_last(run.engine, 4)
    assert run.engine.calls[-1] == ("evaluate", 4)
    assert len(run.engine.calls) == 3
    run.evaluations.make_last(Engine(_6=0.75), 6)
    assert phases == ["wait for the evaluation of step 2", "evaluate"]
    assert run.rows[-1] == (6, {"eval/accuracy": 0.75})
    assert run.evaluations.done_step == 6


def test_without_one_beside_training_the_last_is_made_when_it_is_due(tmp_path):
    run = run_of(tmp_path, {"beside": False}, _2=0.5)
    assert run.make(2) == {"eval/accuracy": 0.5}
    run.evaluations.make_last(run.engine, 5)
    run.take(5)
    assert run.engine.calls == [("evaluate", 2)]
    assert (run.rows, run.evaluations.done_step) == ([], 2)


def test_one_that_came_late_does_not_take_back_that_of_a_later_step(tmp_path):
    run = run_of(tmp_path, _2=0.5)
    run.make(2)
    run.evaluations.done_step = 4
    run.take(4)
    assert run.evaluations.done_step == 4


def test_rows_without_an_accuracy_are_no_evaluation(tmp_path):
    run = run_of(tmp_path, _2=0.5)
    run.make(2)
    again = resumed(run, {"step": 2, "eval/accuracy": None}, {"step": 1, "eval/accuracy": 1.0}, {"step": 2})
    assert [text[:26] for text in again.warnings] == ["the evaluation of step 2 h"]
    assert (again.evaluations.done_step, again.evaluations.running) == (-1, None)


def test_an_accuracy_of_zero_is_one():
    watch = EarlyStop(EvaluationConfig(every=1, patience=1))
    assert observe(watch, [0.0, 0.0]) == [True, False]
    assert (watch.best, watch.best_step) == (0.0, 0)
    assert watch.reason.startswith("1 evaluations in a row brought no better accuracy than 0 of step 0")
    assert watch.keeps_best
