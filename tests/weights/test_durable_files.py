"""What is on the disk when a folder or a file is said to be there, and what an earlier attempt left; no real fsync."""

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch

from slipstream.weights import model_files
from slipstream.weights.model_files import (
    links_to_one_model,
    read_tensors,
    stored_parameters,
    stream_tensors,
    sync,
    whole_folder,
    write_model_folder,
    write_tensors,
)


@pytest.fixture
def synced(monkeypatch):
    """Names of what was forced to the disk, in order."""
    found = []

    def note(descriptor):
        found.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "fdatasync", note)
    return found


def test_a_durable_folder_is_forced_to_the_disk_with_all_that_is_in_it(tmp_path, synced):
    for durable in (False, True):
        with whole_folder(tmp_path / "weights/0.1", durable=durable) as temporary:
            (temporary / "sub").mkdir()
            (temporary / "sub/inner").touch()
            (temporary / "file").touch()
        assert bool(synced) == durable
    assert sorted(synced[:3]) == ["file", "inner", "sub"]
    assert synced[3:] == [temporary.name, "weights"], "its new name last"


def test_a_durable_file_is_forced_to_the_disk_piece_by_piece(tmp_path, synced, monkeypatch):
    monkeypatch.setattr(model_files, "_CHUNK_BYTES", 100)
    tensors = {"a": torch.ones(60), "b": torch.ones(3)}
    stream_tensors(tmp_path / "fleeting", tensors)
    assert synced == []
    stream_tensors(tmp_path / "lasting", tensors, durable=True)
    assert synced == ["lasting"] * 3, "two full pieces, and what is left"
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text("{}")
    write_model_folder(tmp_path / "0.1", tensors.items(), tmp_path / "source", durable=True)
    assert synced.count("model.safetensors") == 3 + 1
    del synced[:]
    write_model_folder(tmp_path / "0.2", tensors.items(), tmp_path / "source")
    assert synced == []


def test_what_is_forced_to_the_disk_has_left_this_process(tmp_path, monkeypatch):
    sizes = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(model_files, "_CHUNK_BYTES", 100)
    stream_tensors(tmp_path / "lasting", {"a": torch.ones(60), "b": torch.ones(3)}, durable=True)
    whole = (tmp_path / "lasting").stat().st_size
    assert sizes == [whole - 152, whole - 52, whole]


def test_no_descriptor_stays_open(tmp_path, synced):
    for _ in range(3):
        sync(tmp_path)
    assert synced == [tmp_path.name] * 3
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has closed it
            found.append(each.readlink())
    assert found
    assert tmp_path not in found


def test_what_an_attempt_that_was_killed_left_is_in_no_folder(tmp_path):
    with whole_folder(tmp_path / "a", durable=False) as temporary:
        pass
    temporary.mkdir()
    (temporary / "stale").touch()
    with whole_folder(tmp_path / "a", durable=False) as temporary:
        (temporary / "new").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["a", "a/new"]


def test_the_configuration_is_for_people_too_and_has_the_dtype_of_most_numbers(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text('{"who": "Zoë", "sizes": {"a": 1}}', encoding="utf-8")
    weights = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(5, dtype=torch.float16)}
    write_model_folder(tmp_path / "0.1", weights.items(), tmp_path / "source")
    text = (tmp_path / "0.1/config.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"who": "Zoë", "sizes": {"a": 1}, "dtype": "float32"}
    assert len(text.splitlines()) == 7
    assert json.dumps(json.loads(text), indent=2) in (text, text.encode().decode("unicode_escape")), (
        "as others write it"
    )


def test_dots_and_weights_of_any_format_are_no_companions(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "additional_chat_templates").touch()  # a file of that name
    for suffix in ("safetensors", "bin", "pt", "pth", "ckpt", "gguf", "h5", "msgpack", "onnx", "bin.index.json"):
        (source / f"model.{suffix}").touch()
    write_model_folder(tmp_path / "0.1", [("a", torch.ones(1))], source)
    names = {path.name for path in (tmp_path / "0.1").iterdir()}
    assert names == {"config.json", "additional_chat_templates", "model.safetensors"}


def test_a_file_that_ends_where_its_header_does_has_no_numbers(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"empty": torch.empty(0, 3)})
    assert {name: tuple(tensor.shape) for name, tensor in read_tensors(path).items()} == {"empty": (0, 3)}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="publish it again"):
        read_tensors(path)


@pytest.mark.parametrize("num_lost", [1, 16])
@pytest.mark.parametrize("while_it_is_read", [False, True])
def test_a_tensor_that_ends_after_its_file_is_named(tmp_path, monkeypatch, while_it_is_read, num_lost):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.ones(4), "b": torch.ones(4)})
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-num_lost])
    if while_it_is_read:
        monkeypatch.setattr(Path, "stat", lambda self: before)
    with pytest.raises(ValueError, match="ends before b does"):
        read_tensors(path)


def test_links_are_to_the_files_themselves(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_text(name)
        (model / name).symlink_to(f"../{name}")  # as a hub's cache has them
    folder = links_to_one_model(model, tmp_path / "links")
    assert [path.readlink() for path in folder.iterdir()] == [(tmp_path / "model.safetensors").resolve()]


def test_stored_parameters_have_no_fingerprint_and_the_dtype_that_was_asked_for(tmp_path):
    tensors = {"a": torch.ones(2, 3, dtype=torch.float16), "scalar": torch.tensor(1.0), "n": torch.ones(1).int()}
    write_tensors(tmp_path / "model.safetensors", tensors)
    found = stored_parameters(tmp_path, "float32")
    assert {(each.name, each.shape, each.dtype, each.fingerprint) for each in found} == {
        ("a", (2, 3), "float32", ""),
        ("scalar", (), "float32", ""),
    }
