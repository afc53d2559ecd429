"""Which checkpoints a store keeps, finds and names, of a learner of some bytes; `test_checkpoint.py` has real ones."""

import json
import os

import pytest
from tests.trainer.loops import Learner

from slipstream.errors import DataError, TrainingError
from slipstream.trainer.checkpoints import checkpoint
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore, damage, has_state


class Critic:
    def save(self, folder):
        folder.mkdir()
        (folder / "critic").write_text("c")


def save(store, step, **options):
    return store.save(step, Learner([]), "start", {"step": step}, **options)


def kept(store):
    """The steps that are there, and of which the state is."""
    steps = sorted(int(path.name.removeprefix("step-")) for path in store.folder.glob("step-*"))
    assert all(damage(store.folder / f"step-{step:06d}") is None for step in steps)
    return steps, store.resumable_steps()


@pytest.mark.parametrize(
    ("options", "steps", "resumable"),
    [
        ({}, [5, 6], [5, 6]),
        ({"keep": 1}, [6], [6]),
        ({"keep": 1, "keep_weights": 2}, [5, 6], [6]),
        ({"keep": 2, "keep_weights": 4}, [3, 4, 5, 6], [5, 6]),
        ({"keep": 3, "keep_weights": 2}, [4, 5, 6], [4, 5, 6]),
        ({"keep": 9}, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_so_many_are_kept(options, steps, resumable, tmp_path):
    store = CheckpointStore(tmp_path / "a" / "checkpoints", **options)
    for step in range(1, 7):
        save(store, step)
    assert kept(store) == (steps, resumable)


def test_a_step_that_may_turn_out_the_best_is_kept_and_its_critic_goes_with_its_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.candidate_step = 2
    for step in range(1, 5):
        save(store, step, critic=Critic(), best=step == 1)
    assert kept(store) == ([1, 2, 4], [4])
    assert [file.name for file in (tmp_path / "step-000002/state").iterdir()] == ["state.json"]
    assert (tmp_path / "step-000004/state/critic/critic").read_text() == "c"
    assert store.why_none() == "step-000004: only its weights are kept"
    store.candidate_step = None
    store.link_best(2)
    assert (store.best_step, store.best()) == (2, tmp_path / "step-000002")
    save(store, 5)
    assert kept(store) == ([2, 5], [5])
    assert os.readlink(tmp_path / "best") == "step-000002"
    (tmp_path / "step-000002/weights/weights").unlink()
    assert store.best() is None
    assert CheckpointStore(tmp_path / "none").best() is None


def test_links_and_files_under_the_names_of_checkpoints_do_not_stop_a_save(tmp_path):
    """A link is removed and not what it names; a file is no checkpoint."""
    store, elsewhere = CheckpointStore(tmp_path / "checkpoints", keep=1), tmp_path / "elsewhere"
    save(store, 1)
    (store.folder / "step-000001").rename(elsewhere)
    (store.folder / "step-000001").symlink_to(elsewhere)
    (store.folder / "step-000002").symlink_to("step-000002")
    (store.folder / "step-000003").write_text("not a checkpoint")
    assert store.latest() == store.folder / "step-000001"
    for step in (2, 3, 4):
        save(store, step)
    assert {path.name for path in store.folder.iterdir()} == {"step-000004"}
    assert damage(elsewhere) is None


def test_the_newest_until_a_step_is_found(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_weights=4)
    assert (store.why_none(), store.resumable_steps()) == ("", [])
    for step in (7, 999_999, 1_000_000, 1_000_001):
        save(store, step)
    assert store.latest() == tmp_path / "step-1000001"
    assert store.latest(until=1_000_000) == tmp_path / "step-1000000"
    assert store.latest(until=999_999) is None
    assert store.latest(until=999_999, resumable=False) == tmp_path / "step-999999"
    assert store.latest(until=999_998, resumable=False) == tmp_path / "step-000007"
    assert store.latest(until=6, resumable=False) is None
    (tmp_path / "step-1000000/manifest.json").write_text("{")
    assert store.resumable_steps() == [1_000_001]
    for name in ("step-abc", "step-3.new", "other"):
        (tmp_path / name).mkdir()
    assert store.latest() == tmp_path / "step-1000001"


def test_the_manifest_names_every_file_and_hashes_the_small_ones(tmp_path):
    store = CheckpointStore(tmp_path)
    learner = Learner([])

    def write_weights(folder, source):
        folder.mkdir(parents=True)
        (folder / "most").write_bytes(b"\0" * (1 << 20))
        (folder / "more").write_bytes(b"\0" * ((1 << 20) + 1))
        return ()

    learner.write_weights = write_weights
    path = store.save(3, learner, "start", {"step": 3})
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 3)
    files = manifest["files"]
    assert files.keys() == {
        "fingerprints.json", "state/learner", "state/state.json", "weights/more", "weights/most",
    }  # fmt: skip
    assert [name for name, facts in files.items() if "sha256" not in facts] == ["weights/more"]
    assert files["weights/more"].keys() == {"size_bytes", "checksum"}
    assert files["weights/more"]["size_bytes"] == (1 << 20) + 1
    (path / "weights/most").write_bytes(b"\1" * (1 << 20))
    assert damage(path).startswith("weights/most has other contents than when it was written")
    os.truncate(path / "weights/more", 5)
    os.truncate(path / "weights/most", 5)
    assert damage(path) == "weights/more has 5 bytes, not 1048577"
    assert store.why_none() == "step-000003: weights/more has 5 bytes, not 1048577"


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(checkpoint, "sync", lambda path: synced.append(path.relative_to(tmp_path).parts[:3]))
    store = CheckpointStore(tmp_path)
    save(store, 1, best=True)
    (temporary,) = {parts[0] for parts in synced if parts}
    assert temporary.startswith(".unfinished-000001-")
    below = {parts[1:] for parts in synced if parts}
    assert below == {(), ("weights",), ("weights", "weights"), ("fingerprints.json",), ("state",),
                     ("state", "learner"), ("state", "state.json")}  # fmt: skip
    assert synced[-2:] == [(), ()], "the folder's own entries: the name, and the link"
    assert synced.count(()) == 2


def test_a_write_that_fails_leaves_nothing_and_leftovers_are_measured_and_removed(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.unfinished_bytes() == 0
    learner = Learner([])
    learner.save = lambda folder: 1 / 0
    with pytest.raises(ZeroDivisionError):
        store.save(1, learner, "start", {})
    assert list(store.folder.iterdir()) == []
    leftover = store.folder / ".unfinished-000009-1"
    (leftover / "weights").mkdir(parents=True)
    (leftover / "weights" / "some").write_bytes(b"12345")
    (store.folder / ".unfinished-best-1").symlink_to("nowhere")
    assert store.unfinished_bytes() == 5 + (leftover / "weights").stat().st_size
    save(store, 1)
    assert [path.name for path in store.folder.iterdir()] == ["step-000001"]


def test_one_made_again_replaces_also_what_a_kill_left_of_the_old_one(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 4)
    (tmp_path / "step-000004.old").mkdir()
    (tmp_path / "step-000004.old/left").write_text("x")
    assert save(store, 4) == path
    (path / "weights/weights").write_text("damaged")
    assert damage(path)
    save(store, 4)
    assert damage(path) is None
    save(store, 5)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000004", "step-000005"]
    assert has_state(path)


def test_a_complete_one_under_its_old_name_is_taken_where_the_new_is_not_whole(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    path = save(store, 4)
    path.rename(tmp_path / "step-000004.old")
    save(CheckpointStore(tmp_path / "other"), 4).rename(path)
    assert store.latest() == path
    (path / "manifest.json").unlink()
    assert store.latest() == tmp_path / "step-000004.old"
    assert store.resumable_steps() == [4]


def test_fingerprints_are_read_back_or_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    assert store.read_fingerprints(path).parameters == ()
    assert store.read_extra(path) == {"step": 1}
    for content in (b"{", b"\xff", b'{"digest": 3}'):
        (path / "fingerprints.json").write_bytes(content)
        with pytest.raises(DataError, match=r"fingerprints\.json is damaged .*: use another checkpoint"):
            store.read_fingerprints(path)
    (path / "fingerprints.json").unlink()
    with pytest.raises(DataError, match="is damaged"):
        store.read_fingerprints(path)
    with pytest.raises(TrainingError, match=r"is damaged: fingerprints\.json is missing"):
        store.load(path, Learner([]))


def test_a_state_that_was_given_up_is_not_loaded_and_a_removal_cut_short_is_made_good(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_weights=3)
    first = save(store, 1)
    files = json.loads((first / "manifest.json").read_bytes())["files"]
    save(store, 2)
    with pytest.raises(TrainingError, match="has only its weights"):
        store.load(first, Learner([]))
    assert store.read_extra(first)["step"] == 1
    (first / "state/learner").write_text("left")
    assert damage(first) is None
    save(store, 3)
    assert [file.name for file in (first / "state").iterdir()] == ["state.json"]
    assert len(files) > len(json.loads((first / "manifest.json").read_bytes())["files"])
