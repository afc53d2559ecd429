"""The ledger: every group ends once, and what an attempt has finished is used by the next where it may be."""

import os
import sqlite3
import stat

import pytest

from slipstream.errors import ConfigError, DataError, SlipstreamError
from slipstream.records import Batch, Rollout, Sequence, Version, VersionSpan, encode, encode_kept
from slipstream.runlog.ledger import FILE, Ledger, balance

SHAPE = {"prompts_per_batch": 2}


def ledger(folder, lineage=0, first=0, **options):
    return Ledger(folder, lineage, first, **{"staleness": 1, "shape": SHAPE, **options})


def rollouts(group, *versions):
    spans = [VersionSpan(1 + place, version) for place, version in enumerate(versions)]
    sequence = Sequence([1] * (1 + len(versions)), [False] + [True] * len(versions), versions=spans)
    return [Rollout(f"{group}.{n}", "task", group, [sequence], reward=0.5, outcome="done") for n in range(2)]


def states(folder):
    return {(e.state, e.reason): (e.num_groups, e.num_tokens) for e in balance(folder).entries}


def test_a_group_ends_once_and_the_balance_says_how(tmp_path):
    made = ledger(tmp_path)
    for number in range(5):
        made.begin(f"0.{number}")
    for number in range(4):
        made.finish(f"0.{number}", rollouts(f"0.{number}", "0.0"))
    made.drop("0.2", "no_signal")
    made.batch(0, ["0.0", "0.1"])
    assert states(tmp_path) == {
        ("batched", ""): (2, 4), ("dropped", "no_signal"): (1, 2), ("ready", ""): (1, 2), ("running", ""): (1, 0),
    }  # fmt: skip
    made.close(1)
    assert states(tmp_path) == {
        ("trained", ""): (2, 4), ("dropped", "no_signal"): (1, 2), ("ready", ""): (1, 2),
        ("cancelled", "run ended"): (1, 0),
    }  # fmt: skip
    assert balance(tmp_path).num_begun == 5
    assert balance(tmp_path).num_open == 1
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_the_last_attempt_says_at_which_step_it_ended_and_why(tmp_path):
    made = ledger(tmp_path)
    assert balance(tmp_path).ended == ""
    made.close(3, reason="DeadlineError: too late")
    assert balance(tmp_path).ended == "at step 3: DeadlineError: too late"
    again = ledger(tmp_path, 1, 3)
    assert balance(tmp_path).ended == "", "it goes on, or was killed"
    again.close(4, is_whole=True, reason="all 4 steps are made")
    assert balance(tmp_path).ended == "at step 4: all 4 steps are made"


def test_what_is_written_later_is_written_in_order_and_with_what_is_written_before(tmp_path):
    timers = []
    made = ledger(tmp_path, later=lambda seconds, write: timers.append(write))
    for name in ("a", "b", "c"):
        made.begin(name)
    made.finish("a", rollouts("a", "0.0"))
    assert states(tmp_path) == {}
    assert len(timers) == 1, "one for all of them"
    timers.pop()()
    assert states(tmp_path) == {("ready", ""): (1, 2), ("running", ""): (2, 0)}
    made.finish("b", rollouts("b", "0.0"))
    made.batch(0, ["a", "b"])
    assert states(tmp_path) == {("batched", ""): (2, 4), ("running", ""): (1, 0)}
    made.finish("c", rollouts("c", "0.0"))
    made.close(1)
    for write in timers:
        write()
    assert states(tmp_path) == {("trained", ""): (2, 4), ("ready", ""): (1, 2)}


def test_what_cannot_be_written_later_is_an_error_of_the_next_call_and_not_lost(tmp_path):
    timers = []
    made = ledger(tmp_path, later=lambda seconds, write: timers.append(write))
    made._data.execute("PRAGMA max_page_count = 1")
    made.begin("0." + "1" * 10_000)
    timers.pop()()
    with pytest.raises(SlipstreamError, match=r"ledger\.sqlite.*full"):
        made.batch(0, [])
    made._data.execute("PRAGMA max_page_count = 1000")
    made.batch(0, [])
    assert balance(tmp_path).num_begun == 1


def test_a_crash_finds_what_was_not_written_as_it_was_before(tmp_path):
    made = ledger(tmp_path, later=lambda seconds, write: None)
    made.begin("a")
    made.batch(0, [])
    made.begin("b")
    made.finish("a", rollouts("a", "0.0"))
    again = ledger(tmp_path, 1, 0)
    assert states(tmp_path) == {("cancelled", "process died"): (1, 0)}
    again.begin("a")
    again.begin("b")
    again.close(0)
    assert balance(tmp_path).num_open == 0


def crashed(folder, **groups):
    """An attempt that was killed: groups that had finished, with their versions, and one that had not."""
    made = ledger(folder)
    made.begin("running")
    for name, versions in groups.items():
        made.begin(name)
        made.finish(name, rollouts(name, *versions))
    return made


def test_what_was_finished_is_used_by_the_next_attempt(tmp_path):
    crashed(tmp_path, ready=["0.0", "0.1"])
    again = ledger(tmp_path, 1, 1)
    assert states(tmp_path) == {("kept", ""): (1, 4), ("cancelled", "process died"): (1, 0)}
    oldest, found = again.kept("ready", 1)
    assert oldest == 0
    assert found == rollouts("ready", "0.0", "0.1")
    assert again.kept("ready", 1) is None
    assert again.kept("running", 1) is None
    again.begin("running")
    again.finish("running", rollouts("running", "1.1"))
    again.batch(1, ["ready", "running"])
    again.trained(2)
    again.close(2)
    assert states(tmp_path) == {("trained", ""): (2, 6), ("cancelled", "process died"): (1, 0)}
    assert balance(tmp_path).num_open == 0


def test_weights_that_were_lost_made_what_is_lost(tmp_path):
    crashed(tmp_path, old=["0.1"], lost=["0.1", "0.2"])
    told = []
    again = ledger(tmp_path, 1, 1, on_drop=lambda *drop: told.append(drop))
    assert told == [("undone by a resume", {"undone by a resume": 4})]
    assert again.survivors == {0: 1}
    assert again.kept("old", 1) is not None
    assert again.kept("lost", 1) is None
    assert states(tmp_path)["dropped", "undone by a resume"] == (1, 4)


def test_groups_of_tasks_that_a_resume_draws_anew_are_of_no_use(tmp_path):
    crashed(tmp_path, ready=["0.0"])
    told = []
    again = ledger(tmp_path, 1, 0, keeps=False, on_drop=lambda *drop: told.append(drop))
    assert (told, again.kept("ready", 0)) == ([("undone by a resume", {"undone by a resume": 2})], None)


def test_a_later_resume_counts_for_all_earlier_attempts(tmp_path):
    ledger(tmp_path, 0, 0)
    ledger(tmp_path, 1, 6)
    assert ledger(tmp_path, 2, 4).survivors == {0: 4, 1: 4}
    assert ledger(tmp_path, 3, 5).survivors == {0: 4, 1: 4, 2: 5}


def test_what_is_too_old_is_dropped(tmp_path):
    told = []
    crashed(tmp_path, old=["0.0"], young=["0.1"])
    again = ledger(tmp_path, 1, 1, on_drop=lambda *drop: told.append(drop))
    assert again.kept("old", 2) is None
    assert again.kept("young", 2) is not None
    assert states(tmp_path)["dropped", "stale"] == (1, 2)
    assert told == [("stale", {"stale": 2})]


def test_training_that_a_resume_undoes_is_made_again_from_the_same_rollouts(tmp_path):
    made = crashed(tmp_path, a=["0.0"], b=["0.0"])
    made.batch(0, ["a"])
    made.batch(1, ["b"])
    made.trained(1)
    made.trained(2)
    again = ledger(tmp_path, 1, 1)
    assert again.kept("a", 1) is None, "the checkpoint holds it"
    assert again.kept("b", 1) == (0, rollouts("b", "0.0"))


def test_rollouts_are_forgotten_once_no_crash_can_need_them(tmp_path):
    saved = [0]
    made = ledger(tmp_path, saved_step=lambda: saved[0])
    for step in range(4):
        made.begin(f"g{step}")
        made.finish(f"g{step}", rollouts(f"g{step}", f"0.{step}"))
        made.batch(step, [f"g{step}"])
        made.trained(step + 1)

    def whole():
        rows = made._data.execute("SELECT id FROM rollouts ORDER BY id").fetchall()
        return [row[0] for row in rows]

    assert whole() == ["g0"]
    saved[0] = 3
    made.trained(4)
    assert whole() == []


def test_other_settings_use_nothing_of_before(tmp_path):
    crashed(tmp_path, ready=["0.0"])
    again = ledger(tmp_path, 1, 0, shape={"prompts_per_batch": 3})
    assert again.kept("ready", 0) is None
    assert states(tmp_path)["dropped", "other settings"] == (1, 2)


def test_another_format_is_refused(tmp_path):
    made = ledger(tmp_path)
    made._data.execute("PRAGMA user_version = 9")
    made.close(0)
    with pytest.raises(ConfigError, match="has format 9, and this Slipstream reads 1: start a new run"):
        ledger(tmp_path, 1, 0)


def test_a_crash_before_the_first_line_leaves_nothing_in_the_way(tmp_path):
    (tmp_path / FILE).touch()
    with pytest.raises(DataError, match=r"ledger\.sqlite cannot be read \(no such table"):
        balance(tmp_path)
    made = ledger(tmp_path)
    made.begin("0.0")
    assert balance(tmp_path).num_open == 1


def test_a_ledger_in_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    made = ledger(tmp_path)
    made.begin("0.0")
    made.close(0)
    monkeypatch.setattr(os, "access", lambda *_: False)
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda place, **how: opened.append(place) or connect(place, **how))
    assert balance(tmp_path).num_begun == 1
    assert all("immutable=1" in place for place in opened)


def test_a_file_that_is_no_ledger_and_a_full_disk_are_one_sentence(tmp_path):
    made = ledger(tmp_path)
    made._data.execute("PRAGMA max_page_count = 1")
    with pytest.raises(SlipstreamError, match=r"ledger\.sqlite.*full"):
        made.begin("0." + "1" * 10_000)
    made._data.close()
    (tmp_path / FILE).write_text("no data base at all, but long enough to be taken for one" * 100)
    with pytest.raises(SlipstreamError, match=r"ledger\.sqlite.*not a database"):
        ledger(tmp_path, 1, 0)


def test_a_run_without_a_ledger_has_no_balance(tmp_path):
    assert balance(tmp_path) is None


@pytest.mark.parametrize("keep_bytes", [False, True])
def test_rollouts_are_encoded_once_where_their_batch_needs_bytes(tmp_path, keep_bytes):
    made, group = ledger(tmp_path, keep_bytes=keep_bytes), rollouts("a", "0.0")
    made.begin("a")
    made.finish("a", group)
    made.close(0)
    batch = Batch(0, Version(0, 0), group)
    assert encode_kept(batch) == encode(batch)
    before, group[0].reward = encode(batch), 0.25
    assert (encode_kept(batch) == before) is keep_bytes, "what is kept is used"
    assert ledger(tmp_path, 1).kept("a", 0)[1] == rollouts("a", "0.0")
