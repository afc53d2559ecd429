"""An adapter of the hub at a revision, from a cache as the hub's library makes it."""

import hashlib

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.config.addresses import hub_reference
from slipstream.errors import ConfigError
from slipstream.plan.deployable import local_path, with_weights_folder
from tests.launch.test_saved_folders import RUN, saved

COMMIT = "1" * 40
TEXT = f"hub:org/adapter@{COMMIT}"


def put(repository, name, data, digest):
    blob, link = repository / "blobs" / digest, repository / "snapshots" / COMMIT / name
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(f"../../blobs/{digest}")
    return link


@pytest.fixture
def base(tmp_path):
    return new_model(tmp_path / "base", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)


@pytest.fixture
def hub(tmp_path, monkeypatch, base):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache/models--org--adapter"
    for path in saved(base, tmp_path, "adapter").iterdir():
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            put(repository, path.name, data, hashlib.sha256(data).hexdigest())
        else:
            put(repository, path.name, data, hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())
    (repository / "refs").mkdir()
    (repository / "refs/v1").write_text(COMMIT)
    return repository


def test_an_adapter_is_found_at_a_revision_and_verified(hub, tmp_path, base):
    folder = hub / "snapshots" / COMMIT
    assert local_path(TEXT) == local_path("hub:org/adapter@v1") == str(folder)
    (tmp_path / "run.toml").write_text(RUN.format(base))
    loaded = load_config(tmp_path / "run.toml", ["--lora.path", TEXT])
    assert loaded.config.lora.path == TEXT
    assert with_weights_folder(loaded).config.lora.path == str(folder)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        path = folder / name
        data = path.read_bytes()
        path.resolve().write_bytes(data + b" ")
        with pytest.raises(ConfigError, match=rf"{name} has other contents .* \(digest [0-9a-f]{{12}}, not"):
            local_path(TEXT)
        path.resolve().write_bytes(data)
    assert local_path(TEXT) == str(folder)
    copied = folder / "adapter_config.json"
    data = copied.read_bytes()
    copied.unlink()
    copied.write_bytes(data)
    with pytest.raises(ConfigError, match="no digest"):
        local_path(TEXT)
    with pytest.raises(ConfigError, match="lost"):
        local_path("hub:org/adapter@lost")


@pytest.mark.parametrize(
    "text", ["hub:", "hub:org/adapter", "hub:adapter@v1", "hub:org/adapter@../../x", "hub:a/b/c@v1", "hub:org/a@-x"]
)
def test_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="hub:OWNER/NAME@REVISION"):
        hub_reference(text)
