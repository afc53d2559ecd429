"""A queue with a damaged record: the run is named, and all others go on."""

import json

import pytest

from slipstream.cli import main
from slipstream.service.runs import LocalRuns, NoSuchRun

from .test_api import paused


@pytest.fixture
def ask(capsys):
    """Runs a command with JSON; (exit code, answer)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize("content", [b"", b'{"id": "bad"', b"[]", b"\x00\xff\x80", b'{"id": 5}'])
def test_one_damaged_record_stops_no_other_run(place, ask, content):
    good, bad = paused(place, "good", owner="me"), paused(place, "bad", owner="me")
    path = place.folder_of(bad) / "service/record.json"
    path.write_bytes(content)
    code, rows = ask("status")
    assert (code, [(row["id"], row["state"]) for row in rows]) == (0, [(good, "queued"), (bad, "damaged")])
    assert str(path) in rows[1]["reason"]
    assert "remove it, and the run leaves the queue" in rows[1]["reason"]
    assert ask("gpus")[0] == 0
    code, rows = ask("status", good)
    assert (code, rows[0]["state"]) == (0, "queued")
    assert ask("submit", place.run_file(5), "--to", "local", "--dry-run")[0] == 0
    assert place.store.find(place.submit("next"))[1].id != bad
    for command in ("status", "logs", "cancel", "checkpoints", "deploy"):
        code, answer = ask(command, bad)
        assert (code, str(path) in answer["message"]) == (3, True), (command, answer)
    with pytest.raises(NoSuchRun):
        LocalRuns(place.store, "alice", is_service=True).one(bad)
    assert bad not in [run.id for run in LocalRuns(place.store, "alice", is_service=True).all()]
    path.unlink()
    code, rows = ask("status")
    assert (code, bad in [row["id"] for row in rows]) == (0, False)
