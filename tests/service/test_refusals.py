"""Refusals of the queue's commands: one sentence, in JSON too, and nothing is left behind."""

import json

import pytest

from slipstream.cli import main
from slipstream.service.deployments.registry import Registry

from .conftest import GRPO
from .made import deployment
from .test_api import paused


@pytest.fixture
def ask(place, capsys):
    """Runs a command with JSON; (exit code, answer)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize("port", [99999, -1])
def test_a_service_with_a_number_that_is_no_port(ask, port):
    code, answer = ask("serve", "--port", port)
    assert (code, answer["message"]) == (2, f"--port {port} is no port: use 1 to 65535, or 0 for a free one")


def test_undeploy_with_an_unknown_name_ends_nothing(ask, place):
    registry = Registry(place.store)
    with registry.locked():
        for name in ("a-step-1", "b-step-1"):
            registry.put(deployment(name))
    code, answer = ask("undeploy", "a-step-1", "nothing")
    assert (code, "'nothing'" in answer["message"]) == (2, True)
    assert [each.state for each in registry.all()] == ["deploying", "deploying"]
    code, rows = ask("undeploy", "a-step-1", "b-step-1", "a-step-1")
    assert (code, [row["name"] for row in rows]) == (0, ["a-step-1", "b-step-1"])
    assert registry.all() == []


def test_cancel_takes_several_runs_and_with_an_unknown_one_cancels_none(ask, place):
    first, second, third = (paused(place, name) for name in ("first", "second", "third"))
    code, answer = ask("cancel", first, "nothing")
    assert (code, "'nothing'" in answer["message"]) == (2, True)
    assert place.record(first).state == "queued"
    code, row = ask("cancel", first)
    assert (code, row["id"], row["cancelled"]) == (0, first, True)
    code, rows = ask("cancel", first, place.folder_of(second), third)
    assert (code, [(row["id"], row["cancelled"]) for row in rows]) == (
        0,
        [(first, False), (second, True), (third, True)],
    )
    assert {place.record(name).state for name in (first, second, third)} == {"cancelled"}


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
@pytest.mark.parametrize("to", ["local", "slurm", "ray"])
def test_a_secret_is_refused_by_its_setting_also_in_a_dry_run(ask, place, to, options):
    place.template = GRPO
    setting = ("--environment.settings", '{inner = {api_key = "hunter2-x"}}')
    code, answer = ask("submit", place.run_file(), "--to", to, *options, *setting)
    assert (code, answer["message"].partition(":")[0]) == (2, "environment.settings.inner.api_key")
    assert "hunter2" not in str(answer)


def test_a_state_folder_without_room_for_the_database_is_named(ask, place, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_DATABASE", raising=False)
    (place.folder / "state/index.sqlite").mkdir()
    code, answer = ask("serve", "--port", 0)
    assert (code, str(place.folder / "state") in answer["message"]) == (2, True)
    assert "SLIPSTREAM_DATABASE" not in answer["message"]
    monkeypatch.setenv("SLIPSTREAM_DATABASE", "sqlite:////nowhere/index.sqlite")
    code, answer = ask("serve", "--port", 0)
    assert (code, answer["message"].rpartition(": ")[2]) == (2, "look at SLIPSTREAM_DATABASE")
