"""The bridge `single_copy`: the trainer's parameters are the engine's tensors, and a new version is there as soon as
the optimizer has written it.

The engine's half is `Exporter`, in each worker: on a CPU it moves the weights into memory that has no name (a
memfd, which ends with its last user and can be opened by this user alone); on a GPU it asks CUDA for a handle of each
allocation, and nothing moves. Where every Hugging Face parameter lies travels as plain fields. The trainer's half is
`open_weights`, and `SharedPublisher`, whose versions are fingerprints and no bytes. Nobody may compute with weights
that are being written: the bridge's `fence` stops the engine before the first write, and after the last one it goes on
at once, with what it makes held back until the version is verified as any other.
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
"""Every tensor starts at a multiple of it, as torch's own allocations do."""
OTHER_BRIDGE = "use another weights.bridge, such as disk"
_STORAGE: Any = torch.UntypedStorage


class CannotShare(ConfigError):
    """Trainer and engine cannot have one copy of these weights on this machine; `problem` says why."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: {OTHER_BRIDGE}")
        self.problem = problem


class CudaHandle(msgspec.Struct, frozen=True):
    """What CUDA needs to open another process's allocation; the fields of torch's own `_share_cuda_`."""

    device: int
    handle: bytes
    storage_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    needs_event: bool


class SharedStorage(msgspec.Struct, frozen=True):
    """A piece of memory that both processes see: a path to open, or a handle of a GPU's."""

    num_bytes: int
    path: str = ""
    cuda: CudaHandle | None = None


class SharedTensor(msgspec.Struct, frozen=True):
    """A parameter, or a worker's rows or columns of it, as a view of a storage; `offset` and `strides` count
    elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    dim: int = 0
    """Along which the parameter is divided among workers, where it is."""
    start: int = 0
    """The first row or column in the whole."""


class SharedWeights(msgspec.Struct, frozen=True):
    """Where each parameter, or one worker's part of it, lies, by its Hugging Face name."""

    storages: tuple[SharedStorage, ...]
    tensors: dict[str, SharedTensor]
    refused: dict[str, str]
    """Why a parameter that the engine holds cannot be seen as one tensor."""

    def files(self) -> set[str]:
        """What torch keeps in shared memory to count a GPU's users, and leaves there when the exporter is killed."""
        return {f"/dev/shm/{s.cuda.counter_handle.decode().lstrip('/')}" for s in self.storages if s.cuda is not None}


class Exporter:
    """The engine's half: keeps `parameters` where another process can open them, for as long as this one lives."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._storages: dict[int, SharedStorage] = {}
        by_storage: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.device.type == "cpu" and parameter.numel():
                by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        if by_storage:
            self._move(list(by_storage.values()))

    def _move(self, groups: list[list[Tensor]]) -> None:
        """Give the CPU's parameters memory that can be opened; those that share a storage go on to share it."""
        if not hasattr(os, "memfd_create"):
            raise WeightsError(f"weights.bridge = single_copy needs Linux on a CPU: {OTHER_BRIDGE}")
        sizes = [-(-group[0].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT for group in groups]
        # It stays open: its path is how the trainer finds it.
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
        """How to open `views`, each a view of one of the parameters. `places` says of those that are a worker's rows or
        columns along which dimension and where they begin."""
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
    """Raise `WeightsError` unless the engine has loaded exactly what the files in `folder` hold: both sides see one
    memory, so that no fingerprint would ever find it."""
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
    """A version is what the parameters hold: described and announced, not moved."""

    def __init__(self, go_on: Callable[[Version], None] = lambda version: None) -> None:
        """`go_on` has the engine compute with what was written, as this version; by itself it waits for `apply`."""
        self._go_on = go_on

    def publish(self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce) -> Ticket:
        """Let the engine go on, describe, announce. It stands still since the fence, or has not begun."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._go_on(Version(lineage, step, ""))
        parameters = describe(named_weights)
        ticket = Ticket(Version(lineage, step, digest(parameters)), "single_copy", "", parameters)
        announce(ticket)
        return ticket

    def close(self) -> None:
        """Nothing to give up: the memory ends with its last user."""
