"""What passes before the first step is a list of stages, whoever makes them and however they overlap."""

import time
from types import SimpleNamespace

import pytest

from slipstream.inference.plugin import start_marks
from slipstream.launch.startup.stages import ENGINE, WAIT, Stages
from slipstream.report.sections import startup
from slipstream.runlog import RunLog, read_events, read_run
from slipstream.view import NullView
from tests.waiting import until


class Shown(NullView):
    def __init__(self):
        super().__init__()
        self.seen, self.messages = [], []

    def phase(self, name, total=None):
        self.seen.append(name)

    def message(self, text, level="info"):
        self.messages.append(text)


def told(folder, kind="stage"):
    return [event for event in read_events(folder) if event["kind"] == kind]


def test_stages_before_and_after_there_is_a_folder_and_those_of_the_first_rows(tmp_path):
    stages, shown = Stages(), Shown()
    with stages.stage("read model and data"):
        pass
    with RunLog.create(tmp_path / "run") as log:
        stages.attach(log, shown)
        log.listeners.append(stages.on_row)
        with stages.stage("load"):
            pass
        with pytest.raises(RuntimeError), stages.stage("fails"):
            raise RuntimeError
        with stages.stage(WAIT):  # of a trainer that loads the engine's weights
            time.sleep(0.05)
        stages.begin_steps(3)
        with stages.stage(WAIT):
            time.sleep(0.02)
        log.metrics(3, {"time/update_s": 500.0, "time/evaluate_s": 2.0})
        assert told(log.folder, "startup") == []
        log.metrics(4, {"reward/mean": 0.5, "time/batch_s": 3.0, "time/train_s": 4.0, "time/update_s": 0.1})
        log.metrics(5, {"time/batch_s": 9.0, "time/train_s": 9.0})
    found = {event["name"]: event["seconds"] for event in told(tmp_path / "run")}
    first = ("first update", "first evaluation", "first rollouts", "first training step")
    assert list(found) == ["read model and data", "load", WAIT, *first]
    # The wait for the engine is not told twice.
    assert found["first update"] == pytest.approx(500.0 - found[WAIT], abs=1e-3)
    assert (found["first evaluation"], found["first rollouts"], found["first training step"]) == (2.0, 3.0, 4.0)
    (end,) = told(tmp_path / "run", "startup")
    assert stages.summary()["seconds"] == end["seconds"] > 0
    assert {stage["name"] for stage in stages.summary()["stages"]} == set(found)
    assert len(shown.messages) == 1
    assert "first training step 4.0 s" in shown.messages[0]
    html = str(startup(read_run(tmp_path / "run")))
    assert "first training step" in html
    assert f"{end['seconds']:.1f} s" in html


def test_an_engines_phases_are_stages_as_they_end(tmp_path):
    engine = SimpleNamespace(phases=((("import vLLM", 5.0), ("load weights", 7.0)),))
    stages, shown = Stages(), Shown()
    with RunLog.create(tmp_path / "run") as log:
        stages.attach(log, shown)
        stages.watch(engine)
        until(lambda: told(log.folder))
        engine.phases = ((*engine.phases[0], (start_marks.READY, 8.5)),)
        until(lambda: len(told(log.folder)) == 3)
        stages.end()
    found = [(event["name"], event["seconds"]) for event in told(tmp_path / "run")]
    assert found == [(f"{ENGINE}: import vLLM", 2.0), (f"{ENGINE}: load weights", 1.5), (ENGINE, 3.5)]
    assert shown.seen[0] == f"{ENGINE}: load weights"


class Executor:
    """As vLLM's, of a version that has one method fewer."""

    def __init__(self, name):
        self.name = name

    def determine_available_memory(self):
        return self.name

    def initialize_from_config(self, configs):
        return configs


def test_an_executor_marks_what_it_begins(tmp_path, monkeypatch):
    path = tmp_path / "marks"
    path.write_text("1.0 import\n")
    monkeypatch.setenv(start_marks.VARIABLE, str(path))
    kept = {name: vars(Executor)[name] for name in vars(Executor)}
    monkeypatch.setattr(start_marks.importlib, "import_module", lambda name: SimpleNamespace(Executor=Executor))
    try:
        start_marks.follow_executor()
        start_marks.follow_executor()
        executor = Executor("one")
        assert (executor.determine_available_memory(), executor.initialize_from_config([1])) == ("one", [1])
        executor.determine_available_memory()
    finally:
        for name in ("__init__", "determine_available_memory", "initialize_from_config"):
            setattr(Executor, name, kept[name])
    start_marks.mark(start_marks.READY)
    assert len(path.read_text().splitlines()) == 6
    found = start_marks.read_marks(path)
    assert [name for name, _ in found] == ["import", "load", "profile", "cache", "ready"]
    assert [at for _, at in found] == sorted(at for _, at in found)


def test_marks_that_nobody_asks_for_or_that_are_damaged_are_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv(start_marks.VARIABLE, raising=False)
    start_marks.mark("load")
    monkeypatch.setenv(start_marks.VARIABLE, str(tmp_path / "none" / "marks"))
    start_marks.mark("load")
    assert start_marks.read_marks(tmp_path / "none" / "marks") == []
    (tmp_path / "marks").write_text("x load\n2.5 profile\nhalf")
    assert start_marks.read_marks(tmp_path / "marks") == [("profile", 2.5)]
