"""Kept batches: which are kept, what a file proves, and that training waits for no disk."""

import stat
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import records
from slipstream.errors import DataError
from slipstream.processes.files import cannot_write
from slipstream.runlog import batches
from slipstream.runlog.batches import BatchKeeper, kept_steps, read_batch

from .waiting import WAIT_S, until


def batch_of(step, num_tokens=3, metrics=None):
    sequence = records.Sequence([*range(num_tokens)], [True] * num_tokens, [-0.1 * step] * num_tokens)
    rollout = records.Rollout("r", "t", "g", [sequence], 0.5, "done", metrics or {})
    return records.Batch(step, records.Version(0, step), [rollout])


class Kept:
    """A keeper and what it told; `starts` are the steps from which a replay starts."""

    def __init__(self, folder, number):
        self.folder, self.starts, self.warnings = folder, {0}, []
        self.keeper = BatchKeeper(folder, number, "cpu", lambda: self.starts, self.warnings.append)

    def keep(self, *steps):
        for step in steps:
            self.keeper.keep(batch_of(step))


@settings(max_examples=25)
@given(
    number=st.integers(1, 4),
    attempts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8), st.sets(st.integers(0, 12))), max_size=4),
)
def test_the_last_ones_and_those_that_follow_a_checkpoint(tmp_path_factory, number, attempts):
    """Attempts of a run: each resumes at one of the steps that were made, and has other checkpoints."""
    folder, made = tmp_path_factory.mktemp("run"), []
    for resumed, length, starts in attempts:
        begin = min(resumed, len(made))
        kept = Kept(folder, number)
        kept.starts |= starts
        there = set(kept_steps(folder))
        made = made[:begin]
        for _ in range(length):
            kept.keep(len(made))
            made.append(len(made))
        kept.keeper.close()
        # One that was removed before does not come back.
        wanted = {step for step in made if step >= len(made) - number or step in kept.starts}
        found = set(kept_steps(folder))
        assert found <= wanted
        assert found >= {step for step in wanted if step >= begin or step in there}
        assert not kept.warnings
        assert {path.suffix for path in (folder / "batches").iterdir()} == {".msg"}
        assert all(read_batch(folder, step)[0] == batch_of(step) for step in found)


def test_a_file_is_private_and_says_what_made_it(tmp_path):
    kept = Kept(tmp_path, 2)
    kept.keep(3)
    kept.keeper.close()
    assert stat.S_IMODE((tmp_path / "batches").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "batches/000003.msg").stat().st_mode) == 0o600
    found, maker = read_batch(tmp_path, 3)
    assert found == batch_of(3)
    assert maker == batches.made_by("cpu")
    assert ", torch " in maker


def test_what_training_changes_afterwards_is_not_kept(tmp_path):
    kept, batch = Kept(tmp_path, 2), batch_of(0)
    kept.keeper.keep(batch)
    batch.rollouts[0].sequences[0].put("advantages", [1.0] * 3)
    kept.keeper.close()
    assert read_batch(tmp_path, 0)[0] == batch_of(0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    kept = Kept(folder, 1)
    kept.keep(5)
    kept.keeper.close()
    return folder, (folder / "batches/000005.msg").read_bytes()


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_changed_bit_and_any_cut_is_told(whole, place, bit):
    folder, data = whole
    changed, place = bytearray(data), place % len(data)
    changed[place] ^= 1 << bit
    for content, problem in ((changed, " (is damaged|has other contents|is no batch)"), (data[:place], "")):
        (folder / "batches/000005.msg").write_bytes(content)
        with pytest.raises(DataError, match=rf"000005\.msg{problem}"):
            read_batch(folder, 5)


def test_none_there(tmp_path):
    assert kept_steps(tmp_path) == []
    with pytest.raises(DataError, match=r"000001\.msg cannot be read \(No such file or directory\)"):
        read_batch(tmp_path, 1)


def test_a_slow_disk_holds_up_nobody_and_the_queue_is_bounded(tmp_path, monkeypatch):
    may_go_on, begun, write = threading.Event(), threading.Event(), batches.write_whole

    def slow(path, data, *, durable=True):
        begun.set()
        assert may_go_on.wait(10 * WAIT_S)
        write(path, data, durable=durable)

    monkeypatch.setattr(batches, "write_whole", slow)
    kept = Kept(tmp_path, 3)
    kept.starts |= {4}
    kept.keep(0)
    assert begun.wait(WAIT_S)
    for step in range(1, 30):
        kept.keep(step)
        assert len(kept.keeper._waiting) <= 4
    assert sorted(kept.keeper._waiting) == [4, 27, 28, 29]
    began = time.monotonic()
    kept.keeper.close(0.1)
    assert time.monotonic() - began < WAIT_S
    (warning,) = kept.warnings
    assert "is not kept for slipstream replay (the disk took nothing for 0.1 s)" in warning
    may_go_on.set()


def test_an_error_is_told_once_and_a_later_batch_is_kept(tmp_path, monkeypatch):
    write, is_full, refused = batches.write_whole, True, []

    def full(path, data, *, durable=True):
        if is_full:
            path.with_name(f"{path.name}.partial").touch()
            refused.append(path.name)
            raise cannot_write(path, "No space left on device")
        write(path, data, durable=durable)

    monkeypatch.setattr(batches, "write_whole", full)
    kept = Kept(tmp_path, 2)
    for step in range(3):
        kept.keep(step)
        until(lambda: not kept.keeper._waiting)
    until(lambda: len(refused) == 3 and not [*(tmp_path / "batches").iterdir()])
    is_full = False
    kept.keep(3)
    kept.keeper.close()
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["000003.msg"]
    (warning,) = kept.warnings
    assert "the batch of step 0 is not kept for slipstream replay (" in warning
    assert "No space left on device" in warning


def test_what_cannot_be_encoded_is_a_warning(tmp_path):
    kept, batch = Kept(tmp_path, 2), batch_of(0)
    batch.rollouts[0].completion = "\ud800"
    kept.keeper.keep(batch)
    kept.keep(1)
    kept.keeper.close()
    assert kept_steps(tmp_path) == [1]
    (warning,) = kept.warnings
    assert "it cannot be encoded (" in warning


def test_a_run_without_batches_closes(tmp_path):
    Kept(tmp_path, 2).keeper.close()
    assert list(tmp_path.iterdir()) == []
