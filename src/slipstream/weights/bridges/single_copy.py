"""The bridge `single_copy`: the trainer's parameters are the engine's tensors, so an optimizer step is the update.

The engine's half is `Exporter`, in each worker. On a CPU it moves the weights into anonymous shared memory: a memfd,
open to this user alone, and gone with its last user. On a GPU it exports a CUDA IPC handle of each allocation, and
nothing moves. The place of every Hugging Face parameter is sent as plain fields. The trainer's half is `open_weights`,
and `SharedPublisher`: its versions are fingerprints without bytes. Nobody may compute with weights in the middle of a
write: the bridge's `fence` pauses the engine before the first write. After the last one it resumes at once, and its
answers are held back until the version is verified as any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.errors import ConfigError, WeightsError, first_line
from slipstream.records import Ticket, Version
from slipstream.weights.base import Announce, NamedWeights
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder

ALIGNMENT = 64
"""Alignment of tensors in shared memory, in bytes, as in torch's own allocations."""
OTHER_BRIDGE = "use another weights.bridge, such as disk"
_STORAGE: Any = torch.UntypedStorage


class CannotShare(ConfigError):
    """Trainer and engine cannot share these weights on this machine; `problem` says why."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: {OTHER_BRIDGE}")
        self.problem = problem


class CudaHandle(msgspec.Struct, frozen=True):
    """A CUDA IPC handle of an allocation; the fields of torch's `_share_cuda_`."""

    device: int
    handle: bytes
    storage_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    needs_event: bool


class SharedStorage(msgspec.Struct, frozen=True):
    """Shared memory: a path to open, or a CUDA handle."""

    num_bytes: int
    path: str = ""
    cuda: CudaHandle | None = None


class SharedTensor(msgspec.Struct, frozen=True):
    """A parameter, or a worker's shard of it, as a view of a storage; `offset` and `strides` in elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    dim: int = 0
    """The sharded dimension, if the parameter is sharded."""
    start: int = 0
    """The shard's first index in the whole parameter."""


class SharedWeights(msgspec.Struct, frozen=True):
    """Handles of one worker's parameters, or shards of them, by Hugging Face name."""

    storages: tuple[SharedStorage, ...]
    tensors: dict[str, SharedTensor]
    refused: dict[str, str]
    """Parameters other than one strided tensor in the engine, each with the reason."""

    def files(self) -> set[str]:
        """torch's reference-count files of CUDA handles; they stay when the exporter is killed."""
        return {f"/dev/shm/{s.cuda.counter_handle.decode().lstrip('/')}" for s in self.storages if s.cuda is not None}


class Exporter:
    """The engine's half: opens `parameters` to other processes while this one lives."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._storages: dict[int, SharedStorage] = {}
        by_storage: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.device.type == "cpu" and parameter.numel():
                by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        if by_storage:
            self._move(list(by_storage.values()))

    def _move(self, groups: list[list[Tensor]]) -> None:
        """Move CPU parameters into a memfd; parameters of one storage still share it."""
        if not hasattr(os, "memfd_create"):
            raise WeightsError(f"weights.bridge = single_copy needs Linux on a CPU: {OTHER_BRIDGE}")
        sizes = [-(-group[0].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT for group in groups]
        # It stays open: the trainer opens it by its path in /proc.
        file = os.memfd_create("slipstream-weights", os.MFD_CLOEXEC)
        os.fchmod(file, 0o600)
        os.ftruncate(file, sum(sizes))
        path = f"/proc/{os.getpid()}/fd/{file}"
        arena = _STORAGE.from_file(path, shared=True, nbytes=sum(sizes))
        start = 0
        for group, size in zip(groups, sizes, strict=True):
            for parameter in group:
                offset = start // parameter.element_size() + int(parameter.storage_offset())
                view = _view(arena, offset, tuple(parameter.shape), parameter.stride(), parameter.dtype)
                view.copy_(parameter.data)
                parameter.data = view
            start += size
        self._storages[arena.data_ptr()] = SharedStorage(arena.nbytes(), path)

    def describe(
        self,
        views: Mapping[str, Tensor],
        refused: Mapping[str, str],
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> SharedWeights:
        """Handles of `views`, each a view of a parameter. `places`: for a shard, its dimension and first index."""
        numbers: dict[int, int] = {}
        storages: list[SharedStorage] = []
        tensors: dict[str, SharedTensor] = {}
        for name, view in views.items():
            storage = view.untyped_storage()
            address = storage.data_ptr()
            if address not in self._storages:
                self._storages[address] = _on_gpu(storage)
            if address not in numbers:
                numbers[address] = len(storages)
                storages.append(self._storages[address])
            dtype = str(view.dtype).removeprefix("torch.")
            tensors[name] = SharedTensor(
                numbers[address],
                int(view.storage_offset()),
                tuple(view.shape),
                tuple(view.stride()),
                dtype,
                *(places or {}).get(name, (0, 0)),
            )
        return SharedWeights(tuple(storages), tensors, dict(refused))


def _on_gpu(storage: Any) -> SharedStorage:
    if storage.device.type != "cuda":
        raise WeightsError(f"weights on a device of kind {storage.device.type} cannot be shared: {OTHER_BRIDGE}")
    return SharedStorage(storage.nbytes(), cuda=CudaHandle(*storage._share_cuda_()))


def _open(storage: SharedStorage) -> torch.UntypedStorage:
    if storage.cuda is None:
        return _STORAGE.from_file(storage.path, shared=True, nbytes=storage.num_bytes)
    torch.cuda.init()
    return _STORAGE._new_shared_cuda(*msgspec.structs.astuple(storage.cuda))


def _view(
    storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, shape, strides)


def open_weights(shared: SharedWeights) -> dict[str, Tensor]:
    """The trainer's half: the engine's own memory as tensors, by Hugging Face name."""
    try:
        storages = [_open(storage) for storage in shared.storages]
    except (OSError, RuntimeError) as error:
        raise CannotShare(f"the engine's weights cannot be opened here ({first_line(error)})") from error
    return {
        name: _view(storages[t.storage], t.offset, t.shape, t.strides, getattr(torch, t.dtype))
        for name, t in shared.tensors.items()
    }


def check_loaded(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `WeightsError` unless the engine has loaded exactly the files in `folder`. As both sides share the memory,
    fingerprints would not find a difference."""
    missing = set(weights)
    for name, stored in read_model_folder(folder):
        live = weights.get(name)
        if live is None:
            continue
        missing.discard(name)
        if not torch.equal(live, stored.to(live.device, live.dtype)):
            raise WeightsError(f"the engine holds another {name} than the files in {folder}: {OTHER_BRIDGE}")
    if missing:
        raise ConfigError(f"{min(missing)} is not in the files of {folder} under this name: save the model again")


class SharedPublisher:
    """Publishes versions already held by the parameters: describes and announces, moves nothing."""

    def __init__(self, go_on: Callable[[Version], None] = lambda version: None) -> None:
        """`go_on` resumes the engine on the written weights, as this version; without it the engine waits for
        `apply`."""
        self._go_on = go_on

    def publish(self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce) -> Ticket:
        """Resume the engine, paused since the fence, then describe and announce the version."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._go_on(Version(lineage, step, ""))
        parameters = describe(named_weights)
        ticket = Ticket(Version(lineage, step, digest(parameters)), "single_copy", "", parameters)
        announce(ticket)
        return ticket

    def hold(self, step: int | None) -> None:
        """Does nothing: there is one version."""

    def close(self) -> None:
        """Does nothing: the memory ends with its last user."""
