"""An engine that cannot share its weights: where nobody asked for one copy the run goes on by files, and says so."""

import pytest

from slipstream.plan import bridge, derive
from slipstream.runlog import read_settings
from slipstream.shared_kernels import CannotShareKernels
from slipstream.trainer.model import policy

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


@pytest.fixture
def kernels_fail(monkeypatch):
    """Kernels are planned to be shared, and the trial of attention fails, as it could on a GPU."""

    def fails(network):
        raise CannotShareKernels("its output is 0.3 of its norm off")

    monkeypatch.setattr(derive, "_against_shared_kernels", lambda builder: "")
    monkeypatch.setattr(derive, "_against_sharing_unasked", lambda builder: "")
    monkeypatch.setattr(bridge, "_choice", lambda draft: ("disk", "files"))
    monkeypatch.setattr(policy, "pin_products", lambda: None)
    monkeypatch.setattr(policy, "share_kernels", fails)


def test_kernels_that_the_plan_chose_to_share_are_planned_again(scripted, kernels_fail):
    report = scripted.run(*SHORT)
    assert (report.status, report.step) == ("finished", 1), report.message
    assert read_settings(scripted.folder)["model.shared_kernels"] is False
    (warning,) = scripted.events("warning")
    assert warning["message"].startswith("model.shared_kernels = false, as its output is 0.3 of its norm off")


def test_kernels_that_a_person_asked_for_end_the_run(scripted, kernels_fail):
    report = scripted.run(*SHORT, "--model.shared_kernels", "true")
    assert (report.status, report.error) == ("failed", "CannotShareKernels")
    assert report.message.endswith("0.3 of its norm off): set it to false")
