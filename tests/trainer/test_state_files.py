"""The files of a resume state, whole and in shards; `tests/launch/test_ranks.py` has them of several ranks."""

import json
import os
import warnings

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.trainer.checkpoints.state_files import read_state, write_shards, write_state


@pytest.fixture
def mesh():
    """Of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_what_one_process_writes_it_reads(tmp_path):
    tensors = {"step": torch.tensor(3), "a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    write_state(tmp_path, tensors, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learner.json", "learner.safetensors"]
    assert json.loads((tmp_path / "learner.json").read_text()) == {"step": 3, "torch": torch.__version__}
    found = read_state(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    asked = []
    again = read_state(tmp_path, lambda name, shape, dtype: asked.append((name, tuple(shape), dtype)))
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert sorted(asked, key=str) == [
        ("a", (2, 3), torch.float32), ("b", (2,), torch.bfloat16), ("step", (), torch.int64),
    ]  # fmt: skip


def test_shards_are_files_of_their_own_and_each_is_read_where_it_belongs(mesh, tmp_path):
    write_state(tmp_path, {"alone": torch.tensor([5.0])}, 3)
    shards = {
        "a": distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]),
        "b": distribute_tensor(torch.ones(4, dtype=torch.bfloat16), mesh, [Shard(0)]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        write_shards(tmp_path, shards, rank=0)
        write_shards(tmp_path, {}, rank=1)
        assert [path.name[:11] for path in tmp_path.glob("shard-*")] == ["shard-00001"]
        whole = read_state(tmp_path)
        room = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
        placed = read_state(tmp_path, lambda name, shape, dtype: room if name == "a" else None)
    for found in (whole, placed):
        assert found.keys() == {"alone", "a", "b"}
        assert {type(tensor) for tensor in found.values()} == {torch.Tensor}
        assert torch.equal(found["a"], torch.arange(6.0).view(3, 2))
        assert torch.equal(found["b"], torch.ones(4, dtype=torch.bfloat16))
        assert found["alone"].tolist() == [5.0]
    assert placed["a"].data_ptr() == room.to_local().data_ptr(), "in the memory that it was given"
    write_shards(tmp_path, shards, rank=4)
    assert sorted(path.name[:11] for path in tmp_path.glob("shard-*")) == ["shard-00001", "shard-00005"]


def as_rank(rank, tensors, do):
    """`do` with this rank's halves of the tensors, in a group of two in which nobody answers."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        halves = {name: tensor.chunk(2)[rank].clone() for name, tensor in tensors.items()}
        return do({name: DTensor.from_local(half, mesh, [Shard(0)]) for name, half in halves.items()})
    finally:
        distributed.destroy_process_group()


def test_what_two_ranks_wrote_is_read_by_one_and_by_two_without_asking_each_other(tmp_path, monkeypatch):
    tensors = {"a": torch.arange(8.0).view(4, 2), "b": torch.arange(6).bfloat16()}
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name in ("gather_object", "scatter_object_list", "all_gather_object", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(distributed, name, None)
    write_state(tmp_path, {"alone": torch.tensor([5.0])}, 3)
    for rank in (0, 1):
        as_rank(rank, tensors, lambda shards, rank=rank: write_shards(tmp_path, shards, rank))
    whole = read_state(tmp_path)
    assert {name: (whole[name].dtype, whole[name].tolist()) for name in tensors} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()
    }
    for rank in (0, 1):
        found = as_rank(rank, blank, lambda room: read_state(tmp_path, lambda name, shape, dtype: room.get(name)))
        assert found["a"].tolist() == tensors["a"].chunk(2)[rank].tolist()
        assert found["b"].tolist() == tensors["b"].chunk(2)[rank].tolist()
        assert found["alone"].tolist() == [5.0]


def test_of_dcps_warnings_only_the_one_of_a_single_process_is_kept_back(mesh, tmp_path, monkeypatch):
    def save(tensors, **_):
        warnings.warn("torch.distributed is disabled", UserWarning, stacklevel=1)
        warnings.warn("the disk is nearly full", UserWarning, stacklevel=1)

    monkeypatch.setattr(distributed.checkpoint, "save", save)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        write_shards(tmp_path, {"a": distribute_tensor(torch.ones(2), mesh, [Shard(0)])}, rank=0)
    assert [str(each.message) for each in told] == ["the disk is nearly full"]


def test_a_state_is_on_the_disk_before_it_counts_as_written(tmp_path, monkeypatch):
    synced = {}
    monkeypatch.setattr(os, "fsync", lambda file: synced.update({os.fstat(file).st_ino: os.fstat(file).st_size}))
    write_state(tmp_path, {"a": torch.ones(3)}, 1)
    file = (tmp_path / "learner.safetensors").stat()
    assert synced[file.st_ino] == file.st_size
