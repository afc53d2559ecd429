import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.trainer.steps import advance
from tests.waiting import until
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.errors import ConfigError
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.weights.model_files import write_model_folder


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_folder_is_deployable(dtype, durable, make_learner, model_folder, tmp_path):
    learner = make_learner(dtype=dtype)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "stale.json").write_text("{}")
    size = write_model_folder(tmp_path / "weights", learner.named_weights(), model_folder, durable=durable)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert not (tmp_path / "weights" / "stale.json").exists()
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert network.dtype == getattr(torch, dtype)
    assert size == sum(p.numel() * p.element_size() for p in network.parameters())
    expected = dict(learner.named_weights())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in network.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "weights").chat_template
    assert network.generation_config.eos_token_id == 99


def test_save_load_and_keep(make_learner, make_batch, model_folder, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    learner = make_learner()
    for step in (1, 2, 3):
        advance(learner, make_batch(seed=step))
        path = store.save(step, learner, model_folder, {"position": step * 10, "lineage": 1})
        assert path.name == f"step-00000{step}"
    assert sorted(p.name for p in store.folder.iterdir()) == ["step-000002", "step-000003"]
    resumed = make_learner()
    latest = store.latest()
    assert latest is not None
    assert store.load(latest, resumed) == {"position": 30, "lineage": 1}
    advance(learner, make_batch(seed=9))
    advance(resumed, make_batch(seed=9))
    for (name, a), (_, b) in zip(learner.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), name
    assert not list(store.folder.rglob("*.pt"))
    assert not list(store.folder.rglob("*.pkl"))


def saves_until_killed(store: CheckpointStore, learner, source: Path) -> None:
    for step in range(1, 10_000):
        store.save(step, learner, source, {"step": step})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_any_moment_leaves_a_whole_checkpoint(make_learner, model_folder, tmp_path):
    store, learner = CheckpointStore(tmp_path, keep=1), make_learner()
    store.save(0, learner, model_folder, {"step": 0})
    rng = random.Random(0)
    last = 0
    for number in range(5):
        child = os.fork()
        if child == 0:
            try:
                saves_until_killed(store, learner, model_folder)
            finally:
                os._exit(1)
        if number == 0:  # at a moment after a first save, however long that takes here
            until(lambda: any(path.name > "step-000000" for path in tmp_path.glob("step-*")))
        time.sleep(rng.uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        latest = store.latest()
        assert latest is not None
        step = store.load(latest, make_learner())["step"]
        assert json.loads((latest / "manifest.json").read_text())["step"] == step
        last = max(last, step)
    assert last > 0
    store.save(20_000, learner, model_folder, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-020000"], "leftovers are cleaned up"


@pytest.mark.parametrize("format", [None, 99])
def test_state_of_another_version_is_refused_and_kept(format, make_learner, model_folder, tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, make_learner(), model_folder, {})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(
        json.dumps({**manifest, "format": format} if format else {"files": manifest["files"]})
    )
    with pytest.raises(
        ConfigError, match=r"format (none|99) and this Slipstream reads \d+: resume with the version that"
    ):
        store.load(path, make_learner())
    assert store.latest() == path


def test_keep_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)
