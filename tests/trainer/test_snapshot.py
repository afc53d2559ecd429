"""Snapshots without a writer: when copies are read, and what becomes of their memory on a CPU and on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import SlipstreamError
from slipstream.trainer.checkpoints import snapshot
from slipstream.trainer.checkpoints.snapshot import Snapshot, Snapshots
from slipstream.trainer.model.policy import Form
from slipstream.weights.adapter_folder import AdapterConfig


def test_copies_are_complete_before_they_are_written(model_folder, tmp_path):
    name, waited = "model.embed_tokens.weight", []
    copy = torch.zeros(2, 3)
    taken = Snapshot([(name, copy)], (), Form(), {"a": copy}, 4, lambda: waited.append(copy.add_(1.0)))
    taken.save(tmp_path / "a" / "state")
    assert load_file(tmp_path / "a" / "state" / "learner.safetensors")["a"].tolist() == [[1.0] * 3] * 2
    assert taken.write_weights(tmp_path, model_folder) == ()
    assert load_file(tmp_path / "model.safetensors")[name].tolist() == [[2.0] * 3] * 2
    assert len(waited) == 2
    taken.save(tmp_path / "a" / "new")
    (tmp_path / "b").mkdir()
    taken.save(tmp_path / "b")


def test_an_adapters_configuration_is_in_its_snapshot(make_learner):
    learner = make_learner()
    assert Snapshots(learner).take().form.adapter is None
    config = AdapterConfig(4, 8.0, ("q_proj",), base="")
    learner.model.add_adapter(config)
    taken = Snapshots(learner).take()
    assert taken.form.adapter == learner.model.adapter.config
    assert dict(taken.weights).keys() == dict(learner.deployable()).keys()


def test_memory_is_kept_for_the_next_snapshot_and_free_after_the_last(make_learner):
    snapshots = Snapshots(make_learner())
    snapshots.preparation()()
    prepared = snapshots._buffer._bytes
    taken = snapshots.take()
    assert {tensor.untyped_storage().data_ptr() for tensor in taken.state.values() if tensor.numel()} == {
        prepared.untyped_storage().data_ptr()
    }
    snapshots.close()
    assert snapshots._buffer._bytes.untyped_storage().nbytes() == 0
    assert snapshots.take().state.keys() == taken.state.keys()


class Driver:
    """What a CUDA driver is told."""

    def __init__(self):
        self.locked, self.told, self.error = {}, [], 0

    def cudaHostRegister(self, address, size, flags):
        self.told.append((size, flags))
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address):
        del self.locked[address]


@pytest.fixture
def gpu(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 8192)
    return snapshot._HostBuffer(torch.device("cuda")), driver


def test_for_a_gpu_all_of_the_memory_is_locked_until_it_is_free(gpu):
    buffer, driver = gpu
    buffer.allocate(sizes := [0, 4096, 5, 4097, 0, 16385, 0])
    first = buffer._bytes.data_ptr()
    assert first % 4096 == 0
    assert driver.locked == {first: 8192, first + 8192: 8192, first + 16384: 20480}
    assert {flags for _, flags in driver.told} == {1}, "in every context"
    assert not buffer._bytes.any()
    buffer.allocate(sizes)
    assert len(driver.told) == 3, "once"
    buffer.allocate([4096])
    assert driver.locked == {buffer._bytes.data_ptr(): 4096}, "the old is free"
    buffer.close()
    assert driver.locked == {}
    buffer.allocate([4096])
    assert len(driver.told) == 5


def test_memory_that_cannot_be_locked_is_said(gpu):
    buffer, driver = gpu
    driver.error = 2
    with pytest.raises(SlipstreamError, match=r"3 MiB of memory .* \(CUDA error 2\): set run.async_checkpoints = f"):
        buffer.allocate([3 << 20])


def test_on_a_gpu_the_writer_waits_for_what_is_queued(gpu, monkeypatch):
    buffer, _ = gpu
    heard = []

    def event(blocking=False):
        return SimpleNamespace(
            record=lambda stream: heard.append(("recorded", stream, blocking)),
            synchronize=lambda: heard.append("waited"),
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    wait = buffer.wait_for_copies()
    assert heard == [("recorded", "stream of cuda", True)]
    wait()
    assert heard[1:] == ["waited"]
    assert snapshot._HostBuffer(torch.device("cpu")).wait_for_copies()() is None
