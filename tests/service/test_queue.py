"""Real small runs through the queue: submitted, killed, followed, cancelled."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from slipstream.cli import main
from slipstream.errors import ConfigError
from slipstream.runlog import read_events, read_exit
from slipstream.service.ending import confirmed, ended_attempt, exit_since, heartbeat_since
from slipstream.service.index import Index
from slipstream.service.records import Attempt
from slipstream.service.runs import LocalRuns
from slipstream.service.store import OUTPUT, update
from slipstream.service.submission import with_earlier
from tests.waiting import ends, until

from .made import ESTIMATE, record

pytestmark = pytest.mark.real_start


@pytest.fixture
def slipstream(capsys):
    """Runs a command here; (exit code, output)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return ended.value.code, capsys.readouterr().out

    return run


def test_a_run_survives_its_supervisor_and_the_next_follows(place, slipstream):
    code, out = slipstream("submit", place.run_file(600), "--to", "local", "--json")
    first = json.loads(out)
    assert (code, first["state"]) == (0, "preparing")
    assert first["estimate"]["memory_gib"] > 0
    second, third = place.submit("second", 3), place.submit("third", 3)
    assert place.record(second).reason.startswith("waits for the CPU")
    slipstream("cancel", third)
    assert place.record(third).state == "cancelled"

    running = place.until(first["id"], "running")
    os.kill(running.handle.pid, signal.SIGKILL)
    assert ends(running.worker.pid), "a run ends with its supervisor"
    # From here on nobody looks at the queue but the supervisors.
    place.until(first["id"], "queued")
    place.until(second, "done", ticks=False)
    code, out = slipstream("logs", "-f", first["id"], "--json")
    *pieces, last = map(json.loads, out.splitlines())
    assert (code, last["state"]) == (0, "done")
    assert "made all 600 steps" in "".join(piece["output"] for piece in pieces)
    assert "made all 600 steps" in slipstream("logs", first["folder"])[1]
    found = place.record(first["id"])
    assert [attempt.kind for attempt in found.attempts] == ["infrastructure", "finished"]
    assert found.attempts[0].decision.startswith("retry 1 of 3")
    assert found.actual.steps == 600
    assert found.actual.seconds > found.actual.rest_s > 0
    assert (found.handle, found.worker, found.leases) == (None, None, ())
    assert read_exit(Path(first["folder"])).status == "finished"

    actual = place.record(second).actual
    expected = with_earlier(place.store, ESTIMATE)  # the first one has another shape
    assert (expected.step_s, expected.rest_s) == (actual.step_s, actual.rest_s)
    assert expected.how == f"as measured in {second}"
    rows = json.loads(slipstream("status", "--json")[1])
    assert [(row["id"], row["state"]) for row in rows] == [
        (first["id"], "done"),
        (second, "done"),
        (third, "cancelled"),
    ]
    (cpu,) = json.loads(slipstream("gpus", "--json")[1])
    assert (cpu["place"], cpu["runs"]) == ("cpu", [])


def test_what_is_wrong_with_the_settings_leaves_nothing_behind(place, slipstream):
    code, out = slipstream("submit", place.run_file(5), "--to", "local", "--json", "--model.path", "nowhere/model")
    assert (code, json.loads(out)["error"]) == (2, "ConfigError")
    code, _ = slipstream("submit", place.run_file(5), "--to", "local", "--environment.name", "reasoning_gym/gcd",
                         "--environment.settings", '{api_key = "sk-abcdefgh12345678"}')  # fmt: skip
    assert code == 2
    assert slipstream("submit", place.run_file(5), "--to", "local", "--time", "1:00")[0] == 2
    assert place.store.all() == {}
    assert not [*place.folder.glob("runs/*")]
    assert not any("sk-abcdefgh" in path.read_text(errors="ignore") for path in place.folder.rglob("*.*")
                   if path.is_file())  # fmt: skip


@pytest.mark.quick("logs*")
@pytest.mark.parametrize("command", ["logs -f {name}", "submit {file} --to local --follow"])
def test_ctrl_c_while_following_leaves_the_run_alone(place, command):
    first = place.submit("first", ticks=False)
    later = time.time() + 1e5
    update(place.folder_of(first), lambda r: msgspec.structs.replace(r, not_before=later))
    output = place.folder_of(first) / OUTPUT
    output.write_text("so far\n")
    words = command.format(name=first, file=place.run_file(100_000)).split()
    command = [sys.executable, "-P", "-m", "slipstream.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline().startswith(("so far", "run:"))
            name = first if "logs" in words else until(lambda: next((n for n in place.store.all() if n != first), None))
            if name != first:
                place.until(name, "running", ticks=False)
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 130
            assert f"{name} continues: slipstream status {name}" in child.stderr.read()
        finally:
            child.kill()  # a shell's background job ignores Ctrl-C, and so do its children
    assert place.record(name).state == ("queued" if name == first else "running")
    assert not place.record(name).cancel_requested


def test_a_dry_run_shows_the_choice_and_why(place, slipstream):
    code, out = slipstream("submit", place.run_file(5), "--to", "local", "--dry-run", "--json")
    found = json.loads(out)
    assert (code, found["places"], found["why"]) == (0, ["cpu"], "no run has it")
    assert found["need"]["gpus"] == 0
    place.submit("first", ticks=False)
    name = place.submit("second", ticks=False)
    out = slipstream("submit", place.run_file(5), "--to", "local", "--dry-run")[1]
    assert "choice:   waits for the CPU; 1 before it" in out
    assert place.record(name).state == "queued"
    assert len(place.store.all()) == 2


@pytest.mark.parametrize("name", ["../state", "/etc", "..", ".", "", "a/b", "a\0b", "a" * 200, "-x"])
def test_a_name_is_no_path(place, name):
    assert place.store.folder_of(name) is None
    with pytest.raises(ConfigError):
        LocalRuns(place.store, is_service=True).one(name)
    with pytest.raises(ConfigError):
        place.store.add(place.folder / "x", record(name))


def test_files_of_an_earlier_attempt_do_not_count(tmp_path):
    begun = {"lineage": 0, "host": "h", "pid": 1, "step": 3, "phases": [], "progress_at": 10.0}
    (tmp_path / "heartbeat.json").write_bytes(msgspec.json.encode({"time": 10.0, **begun}))
    report = {"status": "finished", "exit_code": 0, "error": "", "message": "", "step": 3, "seconds": 1.0}
    report |= {"time": 10.0, "lineage": 0, "versions": {}}
    (tmp_path / "exit.json").write_bytes(msgspec.json.encode(report))
    assert exit_since(tmp_path, 9.0).step == heartbeat_since(tmp_path, 9.0).step == 3
    assert exit_since(tmp_path, 11.0) is heartbeat_since(tmp_path, 11.0) is None
    assert ended_attempt(tmp_path, Attempt(1, 9.0), None, 12.0).kind == "finished"
    assert ended_attempt(tmp_path, Attempt(2, 11.0), None, 12.0).kind == "infrastructure"
    assert (confirmed(tmp_path, 0), confirmed(tmp_path, 1), confirmed(tmp_path, None)) == (0, 1, None)
    (tmp_path / "exit.json").write_bytes(msgspec.json.encode(report | {"status": "interrupted"}))
    assert (confirmed(tmp_path, 0), confirmed(tmp_path, 1)) == (None, 1)
    (tmp_path / "exit.json").write_text("{")
    assert confirmed(tmp_path, 0) == 0
    assert ended_attempt(tmp_path, Attempt(2, 11.0), None, 12.0).kind == "infrastructure"


def test_a_deleted_database_is_filled_from_the_folders(place):
    names = [place.submit(f"r{i}", ticks=False) for i in range(3)]
    index = Index(place.store)
    before = index.records()
    assert [record.id for _, record in before] == names
    update(place.folder_of(names[1]), lambda r: msgspec.structs.replace(r, cancel_requested=1.0))
    changed = index.records()
    assert [record.state for _, record in changed] == ["queued", "cancelled", "queued"]
    index.close()
    (place.store.root / "index.sqlite").unlink()
    again = Index(place.store)
    assert again.records() == changed
    again.close()


def test_a_user_error_is_not_retried_and_a_lost_dispatcher_costs_no_attempt(place):
    name = place.submit("broken", ticks=False)
    run_file = place.folder_of(name) / "service/run.toml"
    run_file.write_text(run_file.read_text().replace('kind = "sft"', 'kind = "no such"'))
    decided = update(place.folder_of(name), lambda r: msgspec.structs.replace(
        r, state="preparing", launches=1, attempts=(Attempt(1, 0.0),)))  # fmt: skip
    assert decided.handle is None  # whoever decided this was killed before it had started anything
    found = place.until(name, "failed")
    assert [(each.exit_code, each.kind) for each in found.attempts] == [(2, "user")]
    assert found.launches == 2
    assert "algorithm" in place.output(name)


@pytest.mark.service
def test_the_events_of_one_run_are_never_those_of_two(place):
    """Passes at once over the queue start one supervisor."""
    name = place.submit("run", 5)
    for _ in range(3):
        place.runs.keep_going()
    place.until(name, "done")
    assert [event["kind"] for event in read_events(place.folder_of(name))].count("opened") == 1
    until(lambda: not place.provider.poll(place.folder_of(name), place.record(name)))
