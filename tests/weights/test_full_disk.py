"""A disk without room: one sentence, nothing left, and what was there before is whole."""

import resource
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors import SafetensorError

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import SlipstreamError
from slipstream.weights.model_files import WEIGHTS_FILE, whole_folder, write_model_folder, write_tensors


@contextmanager
def room_for(num_bytes: int):
    """No file may be larger, as on a disk that is nearly full."""
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, free[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, free)


def test_a_version_without_room(tmp_path):
    source = new_model(tmp_path / "model", hidden_size=32, num_layers=1)
    folder = tmp_path / "weights/0.1"
    write_model_folder(folder, [("a", torch.ones(10))], source)
    with room_for(20_000), pytest.raises(SlipstreamError, match=r"0\.1 cannot be written \(.*too large.*make room"):
        write_model_folder(folder, [("a", torch.ones(100_000))], source)
    assert (folder / WEIGHTS_FILE).stat().st_size < 1000
    assert [path.name for path in folder.parent.iterdir()] == ["0.1"]


@pytest.mark.parametrize(
    "write",
    [torch.save, lambda tensor, path: write_tensors(path, {"a": tensor})],
    ids=["a training state, in torch's own format", "an adapter, as the bridge lora writes it"],
)
def test_a_folder_without_room(tmp_path, write):
    with (
        room_for(20_000),
        pytest.raises(SlipstreamError, match="make room on its disk"),
        whole_folder(tmp_path / "made", durable=False) as temporary,
    ):
        write(torch.ones(100_000), temporary / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_begun(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SlipstreamError, match="Not a directory"), whole_folder(tmp_path / "file" / "a", durable=False):
        raise AssertionError("there is nothing to write into")


FAILURES = [ZeroDivisionError("zero"), RuntimeError("CUDA is gone"), ValueError("iostream error"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_another_failure_is_not_the_disks(error, tmp_path):
    with pytest.raises(type(error)) as raised, whole_folder(tmp_path / "made", durable=False):
        raise error
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(5, "Input/output error", "/a/file"), "Input/output error"),
        (OSError("it is away"), "it is away"),
        (shutil.Error([("a", "b", "no room for b"), ("c", "d", "no room for d")]), "no room for b"),
        (SafetensorError("no room\nfor it"), "no room"),
        (RuntimeError("PytorchStreamWriter failed writing file"), "torch could not write all of it"),
    ],
)
def test_a_failure_of_the_disk_is_told_in_a_few_words(error, reason, tmp_path):
    with pytest.raises(SlipstreamError) as raised, whole_folder(tmp_path / "made", durable=False):
        raise error
    assert str(raised.value).startswith(f"{tmp_path / 'made'} cannot be written ({reason})")
    assert raised.value.__cause__ is error
    assert list(tmp_path.iterdir()) == []
