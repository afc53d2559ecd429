"""An engine that cannot share its weights: where nobody asked for one copy the run goes on by files, and says so."""

import pytest

from slipstream.launch.plan import bridge
from slipstream.runlog import read_settings

SHORT = ("--training.steps", "1", "--evaluation", "false")


@pytest.fixture(autouse=True)
def one_copy_is_planned(monkeypatch):
    monkeypatch.setattr(bridge, "_choice", lambda draft: ("single_copy", "nothing moves"))


def test_what_the_plan_chose_is_planned_again(scripted):
    report = scripted.run(*SHORT)
    assert (report.status, report.step) == ("finished", 1), report.message
    assert read_settings(scripted.folder)["weights.bridge"] == "disk"
    reason = "single_copy cannot be (the engine cannot share its weights (a scripted engine has no weights to share"
    assert reason in (scripted.folder / "resolved.toml").read_text()
    (warning,) = scripted.events("warning")
    assert "updates go through files, and the run is slower" in warning["message"]


def test_what_a_person_asked_for_ends_the_run(scripted):
    report = scripted.run(*SHORT, "--weights.bridge", "single_copy")
    assert (report.status, report.exit_code, report.error) == ("failed", 2, "CannotShare")
    assert report.message.endswith("use another weights.bridge, such as disk")


def test_an_engine_that_dies_while_it_is_asked_is_no_reason_to_do_without(scripted):
    report = scripted.run(*SHORT, change=lambda engine: setattr(engine, "share", engine_dies(engine)))
    assert (report.status, report.error) == ("failed", "EngineError")
    assert read_settings(scripted.folder)["weights.bridge"] == "single_copy"


def engine_dies(engine):
    async def share(parameters, timeout_s):
        engine.is_alive = False
        engine._check_alive()

    return share
