"""Damage to each file of a checkpoint: found before it is used, and told in one sentence."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.loops import Learner, planned

from slipstream.errors import DataError, SlipstreamError, TrainingError
from slipstream.launch.run import _resume
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore, DamagedCheckpoint, damage
from slipstream.trainer.checkpoints.manifest import HASHED_BYTES, Identity, facts_of
from slipstream.trainer.checkpoints.state_files import read_state, write_state
from slipstream.trainer.learner import restore_state

LOOP = {
    "step": 1, "lineage": 0, "trained_steps": 1, "quiet_steps": 0, "num_items": 3, "identity": {}, "evaluated_step": 0,
    "early_stop": {"last": None, "best": None, "best_step": 0, "num_worse": 0},
}  # fmt: skip
OTHERS = ({"step": "a"}, {"identity": []}, {"early_stop": {}})


class Large(Learner):
    """With a state of more than `HASHED_BYTES`."""

    def save(self, folder):
        folder.mkdir()
        (folder / "learner").write_bytes(bytes(HASHED_BYTES + 9))


@pytest.fixture
def saved(tmp_path):
    """A store and its one checkpoint."""
    store = CheckpointStore(tmp_path)
    return store, store.save(LOOP["step"], Learner([]), "start", LOOP)


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def written_again(path, name, text):
    """Replace a file, and write the manifest as if the checkpoint had been made with it."""
    (path / name).write_text(text)
    manifest = json.loads((path / "manifest.json").read_text())
    facts = facts_of(path / name)
    manifest["files"][name] = {"size_bytes": facts.size_bytes, "sha256": facts.sha256}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"files": []}', '{"files": {}}', '{"files": {"state/learner": {}}}', "[" * 99],
)
def test_a_manifest_of_another_shape_is_no_checkpoint(text, tmp_path):
    store = CheckpointStore(tmp_path)
    good, bad = store.save(1, Learner([]), "start", LOOP), store.save(2, Learner([]), "start", LOOP)
    (bad / "manifest.json").write_text(text)
    assert damage(bad)
    assert store.latest() == good
    assert store.resumable_steps()[0] == 1
    with pytest.raises(DamagedCheckpoint):
        store.load(bad, Learner([]))


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_manifest_that_names_a_file_outside_is_no_checkpoint(is_absolute, saved, tmp_path):
    _, path = saved
    outside = tmp_path / "outside"
    outside.write_text("whole, and named with its right size")
    manifest = json.loads((path / "manifest.json").read_text())
    facts = facts_of(outside)
    name = str(outside) if is_absolute else "weights/../../outside"
    manifest["files"][name] = {"size_bytes": facts.size_bytes, "sha256": facts.sha256}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert damage(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", *(json.dumps(LOOP | other) for other in OTHERS)])
def test_a_loop_goes_on_from_a_whole_state_alone(text, saved):
    store, path = saved
    assert store.read_loop_state(path) == LOOP
    written_again(path, "state/state.json", text)
    with pytest.raises(DataError, match=r"state\.json is damaged"):
        store.read_loop_state(path)


@pytest.mark.parametrize("text", ["[]", "{", '{"digest": "", "parameters": 3}'])
def test_fingerprints_of_another_shape_are_damage(text, saved):
    _, path = saved
    written_again(path, "fingerprints.json", text)
    assert "fingerprints.json" in damage(path)


def test_one_bit_of_a_large_file_is_found_where_it_is_loaded(tmp_path):
    store, learner = CheckpointStore(tmp_path), Large([])
    path = store.save(1, learner, "start", LOOP)
    assert damage(path, whole="") is None
    flip(path / "state/learner", HASHED_BYTES + 3)
    assert damage(path) is None, "a look reads small files only"
    assert damage(path, whole="weights/") is None
    assert damage(path, whole="state/").startswith("state/learner has other contents than when it was written")
    with pytest.raises(DamagedCheckpoint, match="state/learner"):
        store.load(path, learner)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["state/learner"]["checksum"]  # as older versions wrote it
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert damage(path, whole="") is None


class Log:
    """The events and warnings of a run."""

    def __init__(self, folder):
        self.folder, self.lineage, self.warnings, self.at = folder, 1, [], None

    def warning(self, text):
        self.warnings.append(text)

    def resumed(self, step, *, checkpoint):
        self.at = checkpoint


@pytest.mark.parametrize("with_another", [True, False])
def test_a_resume_goes_on_from_the_checkpoint_before_a_damaged_one(with_another, tmp_path):
    (tmp_path / "events.jsonl").touch()
    store, log, learner = CheckpointStore(tmp_path / "checkpoints"), Log(tmp_path), Large([])
    learner.load = lambda folder: None
    for step in (1, 2) if with_another else (2,):
        path = store.save(step, learner, "start", LOOP | {"step": step})
    flip(path / "state/learner", 0)
    trained, config = SimpleNamespace(learner=learner, critic=None), planned()

    def resume():
        return _resume(log, store, trained, Identity(3), None, config)

    if not with_another:
        with pytest.raises(TrainingError, match="is damaged"):
            resume()
        assert path.exists()
        return
    resume()
    assert (log.at, len(log.warnings)) == ("step-000001", 1)
    assert sorted(each.name for each in store.folder.iterdir()) == ["damaged-step-000002", "step-000001"]
    store.save(2, learner, "start", LOOP)
    assert store.resumable_steps() == [1, 2]


@pytest.mark.parametrize("hurt", ["cut", "gone", "words", "generator"])
def test_a_learners_file_that_is_none_is_one_sentence(hurt, tmp_path):
    optimizer = SimpleNamespace(load_state=lambda tensors: None)
    tensors = {"optimizer.step": torch.tensor(3), "rng.cpu": torch.get_rng_state()}
    if hurt == "generator":
        tensors["rng.cpu"] = torch.arange(7)
    write_state(tmp_path, tensors, 3)
    file = tmp_path / "learner.safetensors"
    if hurt in ("cut", "words"):
        file.write_bytes(file.read_bytes()[:-9] if hurt == "cut" else b"words" * 9)
    if hurt == "gone":
        file.unlink()
    with pytest.raises(SlipstreamError) as raised:
        restore_state(optimizer, read_state(tmp_path), torch.device("cpu"))
    assert raised.value.exit_code == TrainingError.exit_code


@pytest.mark.parametrize("name", ["manifest.json", "state/state.json"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_a_file_that_is_none_is_not_waited_for(name, kind, saved):
    store, path = saved
    (path / name).unlink()
    os.mkfifo(path / name) if kind == "fifo" else (path / name).symlink_to(kind)
    assert damage(path)
    with pytest.raises(DataError, match="damaged"):
        store.read_loop_state(path)


def test_the_state_of_another_step_is_refused(saved):
    store, path = saved
    written_again(path, "state/state.json", json.dumps(LOOP | {"step": LOOP["step"] + 1}))
    with pytest.raises(DataError, match="step"):
        store.read_loop_state(path)
