"""A model of the hub is asked for once: its commit is in the plan, and everything reads that snapshot."""

import json
import os
import shutil

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import ModelConfig, dump_resolved, load_config
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.launch.recovery.resume import same_commit
from slipstream.plan.preflight.model_folder import check_model, hub_id
from tests.other_user import NOBODY, needs_root
from tests.other_user import shared_folder as shared_folder  # a fixture

FIRST, SECOND = "1" * 40, "2" * 40
RUN = """
[model]
path = "org/tiny"
[data]
path = "rows.jsonl"
[algorithm]
kind = "sft"
[training]
steps = 2
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache as the hub's library lays it out, with two commits of one model and no network behind it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--org--tiny"
    for seed, commit in enumerate((FIRST, SECOND)):
        new_model(repository / "snapshots" / commit, hidden_size=32, num_layers=1, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SECOND)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}", "completion": "a"}) + "\n" for n in range(9))
    )
    (tmp_path / "run.toml").write_text(RUN)
    return repository


def test_the_commit_is_asked_for_once_and_written_down(hub, tmp_path):
    loaded = load_config(tmp_path / "run.toml")
    prepared = prepare(loaded)
    assert prepared.config.model.path == str(hub / "snapshots" / SECOND)
    assert prepared.tokenizer.path == prepared.config.model.path
    assert hub_id(prepared.config.model.path) == "org/tiny"
    text = dump_resolved(loaded, prepared.plan.derived)
    assert 'path = "org/tiny"' in " ".join(text.split())
    assert f'revision = "{SECOND}"' in " ".join(text.split())


def test_a_resumed_run_stays_with_its_commit(hub, tmp_path):
    loaded = load_config(tmp_path / "run.toml", ["--run.folder", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.toml").write_text(dump_resolved(loaded, prepare(loaded).plan.derived))
    (hub / "refs" / "main").write_text(FIRST)
    assert prepare(loaded).config.model.revision == FIRST
    assert prepare(same_commit(loaded)).config.model.path == str(hub / "snapshots" / SECOND)


def test_a_commit_may_be_named(hub, tmp_path):
    loaded = load_config(tmp_path / "run.toml", ["--model.revision", FIRST])
    assert prepare(loaded).config.model.path == str(hub / "snapshots" / FIRST)
    with pytest.raises(ConfigError, match=r"model.revision = 'lost'.* the hub did not give it"):
        prepare(load_config(tmp_path / "run.toml", ["--model.revision", "lost"]))


def test_a_folder_has_no_commit(hub, tmp_path):
    path = hub / "snapshots" / FIRST
    with pytest.raises(ConfigError, match="is a folder: remove it"):
        prepare(load_config(tmp_path / "run.toml", ["--model.path", str(path), "--model.revision", SECOND]))


def test_a_plan_needs_no_weights(hub, tmp_path):
    with_weights = prepare(load_config(tmp_path / "run.toml"), weights=False).plan
    for name in hub.rglob("*.safetensors"):
        name.unlink()
    without = prepare(load_config(tmp_path / "run.toml"), weights=False).plan
    assert without.notes == with_weights.notes, "as many parameters as there will be"
    with pytest.raises(ConfigError, match="has no weights"):
        prepare(load_config(tmp_path / "run.toml"))
    shutil.rmtree(hub)
    with pytest.raises(ConfigError, match="the hub did not give it"):
        prepare(load_config(tmp_path / "run.toml"))


@needs_root
def test_weights_of_another_user_are_not_said_to_be_damaged(shared_folder):
    folder = new_model(shared_folder / "model", hidden_size=32, num_layers=1)
    (folder / "model.safetensors").chmod(0o600)
    model = ModelConfig(path=str(folder))
    check_model(model, packing=False)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(PermissionError):
            check_model(model, packing=False)
    finally:
        os.seteuid(0)
