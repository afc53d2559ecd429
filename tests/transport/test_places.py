"""What is special to a place where queues are kept, and to the records in it."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.records import Batch, Rollout, Sequence, Version, VersionSpan, encode_rollouts
from slipstream.transport import FileStreams, RecordError, TransportLost, open_transport

from ..other_user import NOBODY, needs_root
from .conftest import open_in

BATCH = Batch(
    1,
    Version(0, 1, "digest"),
    [Rollout("r", "t", "g", [Sequence([1, 2], [False, True], [0.0, -0.1], [VersionSpan(1, "0.1")])], 1.0, "done")],
)


def test_importing_the_package_imports_no_client():
    program = "import sys, slipstream.transport; sys.exit(bool({'redis', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("topic", ["", "../batches", "a/b", ".hidden"])
def test_a_topic_is_one_plain_name(make, topic):
    with pytest.raises(ValueError, match="names no queue"):
        open_transport(make.new_streams(), topic, int, capacity=1)


def test_a_batch_comes_back_as_it_was(make_shared):
    transport = open_in(make_shared.new_streams(), 1, Batch)
    transport.put(BATCH, 0)
    assert transport.take(0)[1] == BATCH


def test_a_batch_whose_rollouts_keep_their_bytes_comes_back_as_it_was(make_shared):
    transport = open_in(make_shared.new_streams(), 1, Batch)
    batch = msgspec.structs.replace(BATCH, rollouts=[msgspec.structs.replace(BATCH.rollouts[0], reward=0.5)])
    encode_rollouts(batch.rollouts, keep=True)
    transport.put(batch, 0)
    assert transport.take(0)[1] == batch != BATCH


def test_a_record_of_another_type_or_schema_stays_and_is_refused(make_shared):
    streams = make_shared.new_streams()
    numbers, batches = open_in(streams, 2), open_in(streams, 2, Batch)
    numbers.put(1, 0)
    batches.put(msgspec.structs.replace(BATCH, schema=99), 0)
    for _ in range(3):
        with pytest.raises(RecordError, match=r"no Batch of this Slipstream.*same version"):
            batches.take(0)
    numbers.ack(numbers.take(0)[0])
    with pytest.raises(RecordError, match="a batch of schema 99"):
        batches.take(0)
    assert len(batches) == 1


async def test_a_coroutine_is_told_the_same(make_shared):
    streams = make_shared.new_streams()
    open_in(streams, 2).put("text", 0)
    with pytest.raises(RecordError, match="no Batch"):
        await open_in(streams, 2, Batch).take_async(5)
    assert open_in(streams, 2).take(0)[1] == "text"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-1], "no int"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "damaged"),
        (lambda data: b"", "no int"),
        (lambda data: msgspec.msgpack.encode([2, 0, b"", "more"]), "has schema 2, and this Slipstream reads 1"),
    ],
)
def test_a_damaged_or_newer_record_is_one_error(tmp_path, change, expected):
    transport = open_in(FileStreams(tmp_path), 1, int)
    transport.put(1, 0)
    (path,) = tmp_path.rglob("*.msg")
    path.write_bytes(change(path.read_bytes()))
    for _ in range(2):
        with pytest.raises(RecordError, match=expected):
            transport.take(0)
    assert path.exists()


def test_files_are_private(tmp_path):
    old = os.umask(0)
    try:
        transport = open_in(FileStreams(tmp_path / "streams"), 3)
        transport.put(1, 0)
        transport.put(2, 0)
        transport.take(0)
        transport.close("over")
    finally:
        os.umask(old)
    paths = [tmp_path / "streams", *(tmp_path / "streams").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}
    assert sorted(path.suffix for path in paths if path.is_file()) == ["", "", ".msg", ".taken"]


def test_attempts_and_topics_are_apart(make_shared):
    streams = make_shared.new_streams()
    first = open_in(streams, 1)
    first.put("old", 0)
    later = replace(streams, lineage=streams.lineage + 1)
    assert len(open_in(later, 1)) == 0
    assert len(open_transport(streams, "evaluations", int, capacity=1)) == 0
    assert len(open_in(streams, 1)) == 1


def test_a_removed_folder_is_noticed(tmp_path):
    transport = open_in(FileStreams(tmp_path / "streams"), 1)
    transport.put(1, 0)
    (tmp_path / "streams").rename(tmp_path / "elsewhere")
    for call in (lambda: transport.put(1, 5), lambda: transport.take(5)):
        with pytest.raises(TransportLost, match="gone with its records"):
            call()


def test_what_a_killed_put_left_is_removed(tmp_path):
    transport = open_in(FileStreams(tmp_path), 1)
    left = tmp_path / "0" / "batches" / "0000000000000001.msg.partial"
    left.write_bytes(b"half")
    transport.put(1, 0)
    assert not left.exists()
    assert transport.take(0)[1] == 1


def test_receipts_are_no_paths(tmp_path):
    transport = open_in(FileStreams(tmp_path), 1)
    other = tmp_path / "x.taken"
    other.write_text("")
    assert not transport.ack("../../x")
    assert other.exists()


def test_a_clock_that_goes_back_changes_no_order(tmp_path, monkeypatch):
    transport = open_in(FileStreams(tmp_path), 3)
    for number, now in enumerate((3e18, 2e18, 1e18)):
        monkeypatch.setattr(time, "time_ns", lambda now=now: int(now))
        transport.put(number, 0)
    assert [transport.take(0)[1] for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["0", "0/batches"])
def test_a_folder_that_is_a_link_is_refused(name, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "streams" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SlipstreamError, match="link"):
        open_in(FileStreams(tmp_path / "streams"), 1)
    assert not list((tmp_path / "elsewhere").iterdir())


@needs_root
@pytest.mark.parametrize("name", ["0", "0/batches"])
def test_a_folder_of_another_user_is_refused(name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    os.chown(tmp_path / name, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="another user"):
        open_in(FileStreams(tmp_path), 1)
