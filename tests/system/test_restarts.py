"""A run whose engine dies with the only copy of the weights goes on by itself: the bound, and what ends it."""

from types import SimpleNamespace

import pytest

from slipstream.errors import EngineError, StartsAgain
from slipstream.launch.recovery import retry_policy
from slipstream.runlog import read_exit, read_settings

STEPS = ("--training.steps", "6", "--run.checkpoint_every", "2", "--evaluation", "false")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry_policy, "FIRST_WAIT_S", 0.01)


def dies_at(step, in_memory=True):
    """An engine that dies, by default with its weights, when it is asked for the batch of `step`."""

    def on_request(engine, request):
        if engine.version is not None and engine.version.step == step and not request.id.startswith("probe"):
            engine.is_in_memory_only, engine.is_alive = in_memory, False

    return on_request


def attempts(scripted, *deaths, options=()):
    """The run, attempt by attempt, as the command makes them; how many there were."""
    for number, step in enumerate(deaths):
        try:
            report = scripted.run(*STEPS, *options, resume=number > 0, on_request=dies_at(step))
        except StartsAgain:
            assert read_exit(scripted.folder) is None, "it has not ended"
            assert not scripted.engine.is_alive
        else:
            return report, number + 1
    return None, len(deaths)


def test_it_goes_on_from_the_last_checkpoint_and_counts(scripted):
    report, number = attempts(scripted, 1, 3, 5, None)
    assert (report.status, report.step, report.restarts, number) == ("finished", 6, 3, 4)
    told = scripted.events("restart")
    expected = [(1, 1, "step-000001"), (2, 3, "step-000003"), (3, 5, "step-000005")]
    assert [(each["number"], each["step"], each["checkpoint"]) for each in told] == expected
    assert all("no file holds the weights" in each["reason"] for each in told)
    assert [each["step"] for each in scripted.events("resume")] == [1, 3, 5]
    assert [each["previous"] for each in scripted.events("opened")] == ["none", "restart", "restart", "restart"]
    waits = [each["wait_s"] for each in told]
    assert waits == [waits[0], 2 * waits[0], 4 * waits[0]]
    assert [row["step"] for row in scripted.metrics] == list(range(7))


def test_none_where_it_is_switched_off(scripted):
    report, number = attempts(scripted, 1, 1, options=("--run.max_restarts", "0"))
    assert (report.status, number, report.restarts) == ("failed", 1, 0)
    assert not scripted.events("restart")


def test_no_progress_ends_it_with_the_last_error(scripted):
    report, number = attempts(scripted, 3, 3, 3)
    assert (report.status, report.error, number) == ("failed", "EngineError", 2)
    assert any("failed at step 3 before" in event["message"] for event in scripted.events("warning"))


def test_under_a_supervisor_whatever_is_retriable(scripted):
    """The engine dies once too often, while files hold its weights."""
    dies = {"on_request": dies_at(3, in_memory=False)}
    supervised = {"supervisor": SimpleNamespace(num_passed_on=lambda: 0), **dies}
    options = (*STEPS, "--inference.max_restarts", "0")
    report = scripted.run(*options, **dies)
    assert (report.error, report.failure_class, report.retriable) == ("EngineError", "engine", True)
    with pytest.raises(StartsAgain):
        scripted.run(*options, resume=True, **supervised)
    assert read_exit(scripted.folder) is None
    (told,) = scripted.events("restart")
    assert (told["number"], told["outside"]) == (1, False)
    report = scripted.run(*options, resume=True, **supervised)
    assert (report.status, report.error) == ("failed", "EngineError"), "twice at one step"
    assert scripted.run(*options, resume=True).status == "finished"


def test_what_would_fail_again_does_not_start_again(scripted):
    """The engine dies, and what ended the run was another thing."""

    def on_request(engine, request):
        engine.is_in_memory_only, engine.logprob_offset = True, 5.0

    report = scripted.run(*STEPS, on_request=on_request)
    assert (report.status, report.error) == ("failed", "MismatchError")
    assert not scripted.events("restart")


def test_an_engine_that_died_for_want_of_memory_starts_again_with_a_smaller_plan(scripted):
    def change(engine):
        async def revive():
            if not engine.is_alive:
                raise EngineError("the engine died, and no file holds its weights: CUDA out of memory")

        engine.revive = revive

    with pytest.raises(StartsAgain):
        scripted.run(*STEPS, change=change, on_request=dies_at(3))
    assert [event["who"] for event in scripted.events("out_of_memory")] == ["engine"]
    before = read_settings(scripted.folder)["inference.max_num_seqs"]
    report = scripted.run(*STEPS, "--run.folder", str(scripted.folder), resume=True)
    assert (report.status, report.restarts) == ("finished", 1)
    assert read_settings(scripted.folder)["inference.max_num_seqs"] == before // 2
