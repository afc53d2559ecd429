"""A compiler that fails: where nobody asked for it the run goes on without, and says so."""

import pytest

from slipstream.plan.memory import split
from slipstream.runlog import read_settings
from slipstream.trainer.model import layers


@pytest.fixture(autouse=True)
def broken_compiler(monkeypatch):
    def compiler(_graph, _inputs):
        raise RuntimeError("no C compiler here")

    monkeypatch.setattr(layers, "COMPILER", compiler)
    monkeypatch.setattr(split, "_compiling_pays", lambda config, facts, steps: (True, "it pays"))


def test_what_the_plan_chose_is_planned_again(scripted):
    scripted.finish(1, "--training.steps", "1", "--evaluation", "false")
    assert read_settings(scripted.folder)["training.compile"] is False
    text = (scripted.folder / "resolved.toml").read_text()
    assert "the compiler failed (BackendCompilerFailed" in text
    assert any("no C compiler here" in event["message"] for event in scripted.events("warning"))


def test_what_a_person_asked_for_ends_the_run(scripted):
    report = scripted.run("--training.steps", "1", "--evaluation", "false", "--training.compile", "true")
    assert (report.status, report.exit_code) == ("failed", 2)
    assert "set training.compile = false" in report.message
