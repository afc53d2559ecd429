"""The halves of the bridge `single_copy` in one process: where tensors lie, what is refused, what is announced."""

import os
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from slipstream.errors import ConfigError, WeightsError
from slipstream.records import Version
from slipstream.weights.bridges.single_copy import (
    CannotShare,
    CudaHandle,
    Exporter,
    SharedPublisher,
    SharedStorage,
    SharedWeights,
    check_loaded,
    open_weights,
)
from slipstream.weights.fingerprint import describe, digest

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def exported(*tensors):
    parameters = [nn.Parameter(tensor, requires_grad=False) for tensor in tensors]
    return Exporter(parameters), parameters


def test_tensors_of_any_type_and_place_are_the_same_memory_on_both_sides():
    whole = torch.arange(40, dtype=torch.float64).view(8, 5)
    sources = [torch.ones(3, dtype=torch.bfloat16), whole[2:], whole[:, 1:3], torch.full((17,), 3.0), torch.tensor(5.0)]
    wanted = [source.clone() for source in sources]
    exporter, parameters = exported(*sources)
    views = {str(number): parameter.data for number, parameter in enumerate(parameters)}
    shared = exporter.describe(views, {})
    opened = open_weights(msgspec.json.decode(msgspec.json.encode(shared), type=SharedWeights))
    assert list(opened) == list(views)
    for name, there in opened.items():
        here = views[name]
        assert (there.dtype, there.shape, there.stride()) == (here.dtype, here.shape, here.stride())
        assert torch.equal(there, wanted[int(name)])
    # 3 * 2, 40 * 8, 17 * 4 and 4 bytes, each at a multiple of 64.
    assert shared.storages[0].num_bytes == 64 + 320 + 128 + 64
    assert all(parameters[number].data.data_ptr() % 64 == 0 for number in (0, 3, 4))
    for here, there in zip(views.values(), opened.values(), strict=True):
        there.fill_(7)
        assert (here == 7).all()
    assert opened["1"][0, 1] == opened["2"][2, 0] == 7, "two views of one memory still are"


def test_bytes_fill_their_memory_from_its_beginning():
    exporter, (first, second) = exported(torch.arange(64, dtype=torch.uint8), torch.arange(65, dtype=torch.int8))
    shared = exporter.describe({"first": first.data, "second": second.data}, {})
    assert [each.offset for each in shared.tensors.values()] == [0, 64]
    assert shared.storages[0].num_bytes == 64 + 128
    found = open_weights(shared)
    assert all(found[name].tolist() == list(range(size)) for name, size in (("first", 64), ("second", 65)))


def test_a_shard_says_where_it_belongs():
    exporter, (rows, columns, whole) = exported(torch.ones(2, 3), torch.ones(4, 2), torch.ones(4, 3))
    views = {"rows": rows.data, "columns": columns.data, "whole": whole.data}
    places = {"rows": (0, 2), "columns": (1, 1)}
    found = exporter.describe(views, {"odd": "it is"}, places)
    assert {name: (each.dim, each.start) for name, each in found.tensors.items()} == places | {"whole": (0, 0)}
    assert [each.storage for each in found.tensors.values()] == [0, 0, 0]
    assert found.refused == {"odd": "it is"}
    alone = exporter.describe({"columns": columns.data}, {})
    assert (alone.tensors["columns"].dim, alone.tensors["columns"].start, alone.refused) == (0, 0, {})


def test_what_has_no_memory_here_is_not_moved_and_cannot_be_described():
    empty, meta = torch.empty(0, 3), torch.empty(2, 3, device="meta")
    exporter, (kept, *_) = exported(empty, meta)
    assert kept.data_ptr() == 0
    for tensor, kind in ((torch.ones(2), "cpu"), (meta, "meta")):
        with pytest.raises(WeightsError, match=f"kind {kind} cannot be shared: use another weights.bridge"):
            exporter.describe({"a": tensor}, {})


def test_memory_that_cannot_be_opened_says_why_with_a_remedy_of_its_own():
    shared = SharedWeights((SharedStorage(64, "/proc/self/fd/9999"),), {}, {})
    with pytest.raises(CannotShare) as error:
        open_weights(shared)
    assert error.value.problem.startswith("the engine's weights cannot be opened here (")
    assert str(error.value) == f"{error.value.problem}: use another weights.bridge, such as disk"


def test_the_files_that_a_killed_exporter_leaves_are_those_of_gpus():
    handles = [CudaHandle(0, b"", 8, 0, name, 0, b"", False) for name in (b"/torch_1", b"torch_2")]
    storages = (*(SharedStorage(8, cuda=handle) for handle in handles), SharedStorage(8, "/proc/1/fd/3"))
    assert SharedWeights(storages, {}, {}).files() == {"/dev/shm/torch_1", "/dev/shm/torch_2"}


def test_memory_of_a_gpu_is_exported_once_and_opened_by_its_handle(monkeypatch):
    handle, exports, opened = (0, b"handle", 96, 512, b"/torch_1", 3, b"event", True), [], []
    storage = SimpleNamespace(
        device=torch.device("cuda:0"),
        nbytes=lambda: 96,
        data_ptr=lambda: 7,
        _share_cuda_=lambda: exports.append(1) or handle,
    )

    def view(offset, shape, strides):
        methods = {"untyped_storage": storage, "storage_offset": offset, "stride": strides}
        return SimpleNamespace(
            dtype=torch.bfloat16, shape=shape, **{name: lambda value=value: value for name, value in methods.items()}
        )

    places = {"rows": (8, (2, 4), (4, 1)), "turned": (0, (4, 2), (1, 4))}
    exporter = Exporter([])
    for _ in range(2):
        shared = exporter.describe({name: view(*place) for name, place in places.items()}, {})
    assert shared.storages == (SharedStorage(96, cuda=CudaHandle(*handle)),)
    assert exports == [1]

    def new_shared_cuda(*fields):
        opened.append(fields)
        return torch.UntypedStorage(96, device="meta")

    monkeypatch.setattr(torch.cuda, "init", lambda: opened.append("init"))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared_cuda)
    there = open_weights(msgspec.json.decode(msgspec.json.encode(shared), type=SharedWeights))
    assert opened == ["init", handle]
    found = {name: (t.storage_offset(), tuple(t.shape), t.stride()) for name, t in there.items()}
    assert (found, {(t.dtype, t.device.type) for t in there.values()}) == (places, {(torch.bfloat16, "meta")})


def test_weights_are_compared_as_the_engine_holds_them(tmp_path):
    stored = {name: torch.randn(5) for name in ("a", "b", "c")}
    save_file(stored, tmp_path / "model.safetensors")
    check_loaded({name: tensor.bfloat16() for name, tensor in stored.items()}, tmp_path)
    check_loaded({"b": stored["b"]}, tmp_path)  # the files may hold more
    for name in stored:
        others = stored | {name: stored[name] + 1}
        with pytest.raises(WeightsError, match=f"the engine holds another {name} than the files in"):
            check_loaded(others, tmp_path)
    with pytest.raises(ConfigError, match=r"^x is not in the files"):
        check_loaded(stored | {"y": stored["a"], "x": stored["a"]}, tmp_path)


def test_the_engine_goes_on_before_the_version_is_described():
    """It waits since the fence, and fingerprints take time."""
    done = []

    def weights():
        done.append("read")
        yield "w", torch.arange(3.0)

    publisher = SharedPublisher(lambda version: done.append(version))
    ticket = publisher.publish(weights(), 5, 2, done.append)
    assert done == [Version(2, 5, ""), "read", ticket]
    parameters = tuple(describe([("w", torch.arange(3.0))]))
    assert (ticket.version, ticket.bridge, ticket.location) == (Version(2, 5, digest(parameters)), "single_copy", "")
    assert (ticket.parameters, ticket.num_bytes, ticket.delta) == (parameters, 0, None)
    assert SharedPublisher().publish([("w", torch.arange(3.0))], 5, 2, lambda _: None) == ticket
