"""What `write_tensors` makes, the format's own reader reads, bit for bit; and `read_tensors` what others make. Durable
files are on the disk when they are said to be there (no real fsync), and an earlier attempt leaves nothing."""

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipstream.weights import model_files
from slipstream.weights.model_files import (
    HEAD,
    links_to_one_model,
    read_model_folder,
    read_tensors,
    stored_parameters,
    stream_tensors,
    sync,
    weight_files,
    whole_folder,
    write_model_folder,
    write_tensors,
)


def test_other_readers_read_it(tmp_path):
    torch.manual_seed(0)
    (tmp_path / "t.safetensors").write_bytes(bytes(100_000))  # a longer one, to be written over
    tensors = {
        "odd": torch.randn(3, 5, dtype=torch.bfloat16),
        "a.b.weight": torch.randn(7, 4),
        "turned": torch.randn(4, 6, dtype=torch.float64).t(),
        "half": torch.randn(9, dtype=torch.float16)[1:],
        "empty": torch.empty(0, 4),
        "number": torch.tensor(2.5),
        "learnt": torch.nn.Parameter(torch.ones(2, 2)),
    }
    write_tensors(tmp_path / "t.safetensors", tensors)
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach())
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    ours = read_tensors(tmp_path / "t.safetensors")
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[name], found[name]) and ours[name].dtype == found[name].dtype for name in found)
    assert len({tensor.untyped_storage().data_ptr() for tensor in ours.values()}) == 1, "views of one buffer"


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_streamed_other_readers_read(durable, tmp_path, monkeypatch):
    """Tensors of every type, larger than what is written at once."""
    monkeypatch.setattr(model_files, "_CHUNK_BYTES", 1000)
    types = (torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    tensors = {str(dtype): (torch.randn(40, 30) * 100).to(dtype).t() for dtype in types}
    tensors |= {"empty": torch.empty(0, 4), "number": torch.tensor(7), "learnt": torch.nn.Parameter(torch.ones(500))}
    stream_tensors(tmp_path / "t.safetensors", tensors, durable=durable)
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach())


def test_numbers_begin_at_a_multiple_of_their_size(tmp_path):
    """Whatever the names: readers map the file and take the tensors as they lie."""
    tensors = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(5), "c": torch.ones(1, dtype=torch.bfloat16)}
    tensors |= {"d": torch.ones(2, dtype=torch.float64)}
    for write, name in ((write_tensors, "written"), (stream_tensors, "streamed")):
        write(tmp_path / name, tensors)
        content = (tmp_path / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        starts = {key: 8 + length + header[key]["data_offsets"][0] for key in tensors}
        assert all(starts[key] % tensor.element_size() == 0 for key, tensor in tensors.items()), starts


def test_nothing_is_a_file_too(tmp_path):
    write_tensors(tmp_path / "t.safetensors", {})
    assert load_file(tmp_path / "t.safetensors") == {} == read_tensors(tmp_path / "t.safetensors")


def test_other_writers_files_are_read(tmp_path):
    """Also where a tensor does not begin at a multiple of its size; other types are for others."""
    path = tmp_path / "t.safetensors"
    tensors = {"a": torch.randn(3, dtype=torch.bfloat16), "b": torch.randn(4, 2), "c": torch.randn(5).half()}
    save_file(tensors, path)
    found = read_tensors(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    content = path.read_bytes()
    header = (
        b'{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"y":{"dtype":"F32","shape":[],"data_offsets":[2,6]}}'
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x80\x3f\x00\x00\x80\x3f")
    assert read_tensors(path) == {"x": torch.ones(1), "y": torch.tensor(1.0)}
    save_file({"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int32)}, path)
    assert read_tensors(path) is None
    for length in (4, 20, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="publish it again"):
            read_tensors(path)


def test_a_model_folder_has_all_but_the_weights_of_its_source(tmp_path):
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "other").mkdir()
    (source / "config.json").write_text('{"torch_dtype": "float64", "size": 3}')
    kept = ["tokenizer.json", "code.py", "additional_chat_templates/tools.jinja"]
    for name in [*kept, ".hidden", "old.safetensors", "old.bin", "model.safetensors.index.json", "other/file"]:
        (source / name).write_text(name)
    tensors = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(5)}
    folder = tmp_path / "weights/0.1"
    assert write_model_folder(folder, tensors.items(), source, durable=True) == 2 * 6 + 4 * 5
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {*kept, "config.json", "model.safetensors"}
    assert json.loads((folder / "config.json").read_text()) == {"size": 3, "dtype": "bfloat16"}
    assert folder.stat().st_mode & 0o777 == 0o700
    write_model_folder(folder, [("a", torch.zeros(1))], source)
    assert load_file(folder / "model.safetensors") == {"a": torch.zeros(1)}, "it replaces one of its name"
    assert [path.name for path in folder.parent.iterdir()] == ["0.1"]


def test_the_files_of_a_model_are_those_of_its_index_or_the_one_or_all(tmp_path):
    names = ["b.safetensors", "a.safetensors", "model.safetensors"]
    for number, name in enumerate(names):
        save_file({name: torch.zeros(number + 1), f"n{number}": torch.zeros(1, dtype=torch.int32)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    assert sorted(name for name, _ in read_model_folder(tmp_path)) == ["a.safetensors", "b.safetensors", "n0", "n1"]
    stored = stored_parameters(tmp_path, "bfloat16")
    assert [(each.name, each.shape, each.dtype) for each in stored] == [
        ("a.safetensors", (2,), "bfloat16"),
        ("b.safetensors", (1,), "bfloat16"),
    ]
    index.unlink()
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_files_with_other_names_for_the_tensors_are_left_out_of_the_links(tmp_path):
    model, links = tmp_path / "model", tmp_path / "links"
    model.mkdir()
    for name in ("model.safetensors", "config.json"):
        (model / name).write_text(name)
    assert links_to_one_model(model, links) == model
    assert links_to_one_model(tmp_path / "org/hub-id", links) == tmp_path / "org/hub-id"
    (model / "consolidated.safetensors").touch()
    for _ in range(2):  # the second time over what is there
        assert links_to_one_model(model, links) == links
        assert {path.name: path.read_text() for path in links.iterdir()} == {
            "model.safetensors": "model.safetensors",
            "config.json": "config.json",
        }
        (links / "stale").touch()


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


@pytest.mark.parametrize("inside", [True, False])
def test_a_stored_head_is_not_tied(tmp_path, inside):
    source, tensors = tmp_path / "source", {"model.embed_tokens.weight": torch.ones(2, 2)}
    source.mkdir()
    text = {"text_config": {"tie_word_embeddings": True}} if inside else {}
    (source / "config.json").write_text(json.dumps({"tie_word_embeddings": True} | text))
    for name, is_tied in (("tied", True), ("apart", False)):
        head = {} if is_tied else {HEAD: torch.zeros(2, 2)}
        write_model_folder(tmp_path / name, (tensors | head).items(), source)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is is_tied
        assert config.get("text_config", config)["tie_word_embeddings"] is is_tied
