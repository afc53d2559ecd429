"""Run folders, queues and ledgers that somebody else made or changed: nothing is written elsewhere, nothing hangs, and
what is damaged is named."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from slipstream.errors import ConfigError, DataError, SlipstreamError
from slipstream.launch.provenance.record import read_attempts
from slipstream.processes.files import open_own
from slipstream.processes.heartbeat import read_heartbeat
from slipstream.runlog import RunLog
from slipstream.runlog.evaluations import read_evaluation
from slipstream.runlog.files import refuse_in_use
from slipstream.runlog.ledger import Ledger, balance, end_whole
from slipstream.runlog.reader import find_runs, read_events, read_exit, read_metrics, read_settings, summarize
from slipstream.runlog.record import read_run
from slipstream.runlog.samples import read_tickets
from slipstream.transport import FileStreams, open_transport
from tests.other_user import as_other_user, needs_root
from tests.other_user import shared_folder as shared_folder  # a fixture

WRITTEN = ("run.lock", "events.jsonl", "metrics.jsonl", "samples.jsonl", "exit.json.partial", "resolved.toml.partial")


@pytest.fixture
def run(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        log.metrics(1, {"reward/mean": 0.5})
    return tmp_path / "run"


def work(folder):
    with RunLog.create(folder, resume=True) as log:
        log.resolved("[run]\n")
        log.metrics(2, {"reward/mean": 0.5})
        log.sample({"step": 1})


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_is_written_but_into_files_of_the_folder(name, kind, run, tmp_path):
    target, path = tmp_path / "precious", run / name
    if path.exists():
        shutil.copy(path, target)
        path.unlink()
    else:
        target.write_text("mine")
    before = target.read_bytes()
    {"link": lambda: path.symlink_to(target), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(SlipstreamError):
        work(run)
    assert target.read_bytes() == before


@needs_root
def test_a_folder_of_another_user_is_refused(shared_folder):
    as_other_user("mkdir -m 777 run old; touch old/events.jsonl; chmod 666 old/events.jsonl", shared_folder)
    for name in ("run", "old"):
        with pytest.raises(ConfigError, match="another user"):
            RunLog.create(shared_folder / name, resume=name == "old")
    assert not (shared_folder / "run/run.lock").exists()


@needs_root
def test_a_file_of_another_user_in_our_folder_is_refused(run):
    os.chown(run / "samples.jsonl", 65534, 65534)
    with pytest.raises(SlipstreamError, match="another user"):
        work(run)


def test_a_folder_that_others_could_write_is_closed_and_said(run):
    run.chmod(0o777)
    work(run)
    assert run.stat().st_mode & 0o777 == 0o700
    assert [event["kind"] for event in read_events(run, kinds=["warning"])] == ["warning"]


READERS = {
    "events.jsonl": read_events,
    "metrics.jsonl": read_metrics,
    "exit.json": read_exit,
    "resolved.toml": read_settings,
    "provenance.json": read_attempts,
    "tickets/0.1.json": read_tickets,
    "evaluations/a.json": lambda run: read_evaluation(run / "evaluations/a.json"),
}
GARBAGE = {
    "no JSON": b"\xff{\n",
    "a list": b"[]\n",
    "an empty object": b"{}\n",
    "a number": b"7\n",
    "deep": b'{"a":' * 5000 + b"[" * 100_000 + b"\n",
    "a long integer": b'{"time": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("kind", [*GARBAGE, "fifo", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_a_run_that_is_none_is_named(name, kind, run):
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(GARBAGE[kind])
    with pytest.raises(DataError, match=Path(name).name):
        READERS[name](run)
    find_runs([run.parent])
    if name != "events.jsonl" or kind not in ("fifo", "folder"):
        read_run(run)


def test_settings_of_another_type_are_named_by_their_file(run):
    (run / "resolved.toml").write_text("model = 5\n")
    assert "resolved.toml" in summarize(run).message


def test_a_heartbeat_that_is_none(run):
    for content in GARBAGE.values():
        (run / "heartbeat.json").write_bytes(content)
        assert read_heartbeat(run) is None


def test_what_is_no_record_in_a_queue_is_left_alone(tmp_path):
    queue = open_transport(FileStreams(tmp_path), "batches", dict, capacity=2)
    folder = tmp_path / "0/batches"
    for name in ("foo.msg", ".nfs0001.msg", "x.taken", "1.msg.partial", "é.msg"):
        (folder / name).write_bytes(b"junk")
    queue.put({"a": 1}, 1.0)
    receipt, record = queue.take(1.0)
    assert (record, len(queue)) == ({"a": 1}, 1)
    assert queue.ack(receipt)
    assert (folder / "foo.msg").exists()


def test_a_record_that_is_no_file_is_an_error_of_the_queue(tmp_path):
    queue = open_transport(FileStreams(tmp_path), "batches", dict, capacity=2)
    os.mkfifo(tmp_path / "0/batches/0000000000000001.msg")
    with pytest.raises(SlipstreamError, match="FIFO"):
        queue.take(1.0)


def opened(folder, lineage):
    return Ledger(folder, lineage, 0, staleness=1, shape={})


@pytest.mark.parametrize("kind", ["random", "no table", "folder", "link"])
def test_a_ledger_that_is_none_has_the_right_remedy(kind, tmp_path):
    path = tmp_path / "ledger.sqlite"
    if kind == "random":
        path.write_bytes(bytes(range(256)) * 64)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "other")
    else:
        opened(tmp_path, 0).close(0)
        with sqlite3.connect(path) as data:
            data.execute("DROP TABLE groups")
    with pytest.raises(SlipstreamError, match="ledger") as raised:
        opened(tmp_path, 1)
    assert ("make room" in str(raised.value)) == (kind in ("folder", "link"))
    assert not (tmp_path / "other").exists()


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"


@pytest.mark.parametrize(
    "statement",
    [
        f"CREATE VIEW more AS {ENDLESS}",
        f"CREATE TRIGGER more AFTER UPDATE ON groups BEGIN SELECT count(*) FROM ({ENDLESS}); END",
    ],
)
def test_a_ledger_that_would_compute_for_ever_is_refused(statement, tmp_path):
    opened(tmp_path, 0).close(0)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as data:
        data.execute(statement)
    for reads in (lambda: opened(tmp_path, 1), lambda: balance(tmp_path), lambda: end_whole(tmp_path, 1)):
        with pytest.raises(SlipstreamError, match="more"):
            reads()


@pytest.mark.parametrize("content", [b"\xc1junk", b"", "text", 7, b"\x90" * 3])
def test_a_damaged_group_is_dropped_and_counted(content, tmp_path):
    dropped = []
    ledger = opened(tmp_path, 0)
    ledger.begin("0.0")
    ledger.finish("0.0", [])
    ledger.close(0)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as data:
        data.execute("UPDATE rollouts SET data = ?", (content,))
    again = Ledger(tmp_path, 1, 0, staleness=1, shape={}, on_drop=lambda reason, tokens: dropped.append(reason))
    assert again.kept("0.0", 0) is None
    assert dropped == ["damaged"]
    again.close(0)


def test_a_file_that_is_cut_is_cut_after_the_checks(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"):
        open_own(tmp_path / "link", os.O_WRONLY | os.O_TRUNC)
    assert (tmp_path / "target").read_text() == "mine"


def test_a_folder_at_work_is_in_use_for_everybody(tmp_path):
    """Whether a run is to begin in it or to go on, and before anything is read."""
    with RunLog.create(tmp_path / "run"):
        for resume in (False, True):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                RunLog.create(tmp_path / "run", resume=resume)
        with pytest.raises(ConfigError, match="in use"):
            refuse_in_use(tmp_path / "run")
    refuse_in_use(tmp_path / "run")
    refuse_in_use(tmp_path / "none")
