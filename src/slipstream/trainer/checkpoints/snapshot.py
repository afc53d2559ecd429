"""A copy of all that a checkpoint holds of a learner, in memory of its own, so that it can be written while training
goes on.

Guarantees: the copy is of one moment, between two optimizer commits; what a snapshot writes is what the learner itself
would have written then. From a GPU the copies are queued and not waited for: what is queued later, the next update,
comes after them, and whoever writes waits. The memory is taken once, page-locked for a GPU; each snapshot overwrites
the one before: that this is written, or given up, is the caller's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.records import ParameterSpec
from slipstream.trainer.checkpoints.state_files import write_state
from slipstream.trainer.learner import Learner, write_deployable
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.fingerprint import describe

_PAGE_BYTES = 4096
_PIECE_BYTES = 256 << 20
"""Page-locked at once: meanwhile the driver has other calls wait."""


@dataclass(frozen=True)
class Snapshot:
    """A learner as it was; see `checkpoint.SavesAll`."""

    weights: Sequence[tuple[str, Tensor]]
    """As they are deployed."""
    parameters: tuple[ParameterSpec, ...]
    """What these must be, by the learner's own memory."""
    adapter: AdapterConfig | None
    state: Mapping[str, Tensor]
    step: int
    wait: Callable[[], None]
    """Until all copies are there."""

    def write_weights(self, folder: Path, source: Path) -> tuple[ParameterSpec, ...]:
        """See `Learner.write_weights`."""
        self.wait()
        write_deployable(folder, self.weights, self.adapter, source)
        return self.parameters

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        self.wait()
        folder.mkdir(parents=True, exist_ok=True)
        write_state(folder, self.state, self.step)


class Snapshots:
    """The snapshots of one learner, in one memory; of one that is not `deployed`, as a critic, its resume state."""

    def __init__(self, learner: Learner, *, deployed: bool = True) -> None:
        self._learner = learner
        self._deployed = deployed
        self._buffer = _HostBuffer(learner.model.device)

    def preparation(self) -> Callable[[], None]:
        """What takes the memory, for any thread to call before the next `take`, which then need not. Of use once an
        update was made: optimizers remember nothing before the first."""
        live = [tensor for _, tensor in (*self._weights(), *self._learner.state().items())]
        sizes = [tensor.nbytes for tensor in live]
        return lambda: self._buffer.allocate(sizes)

    def take(self) -> Snapshot:
        """The learner as it is now."""
        weights, state, adapter = self._weights(), self._learner.state(), self._learner.model.adapter
        parameters = describe(weights)  # before the copies, as it waits for the device
        copies = self._buffer.copies([*(tensor for _, tensor in weights), *state.values()])
        return Snapshot(
            [(name, next(copies)) for name, _ in weights],
            parameters,
            adapter.config if adapter is not None else None,
            {name: next(copies) for name in state},
            self._learner.step,
            self._buffer.wait_for_copies(),
        )

    def _weights(self) -> list[tuple[str, Tensor]]:
        return list(self._learner.deployable()) if self._deployed else []

    def close(self) -> None:
        """Give the memory back."""
        self._buffer.close()


class _HostBuffer:
    """Memory of the CPU for copies of tensors from `device`: of the same sizes each time, or it is taken anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: list[int] = []
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._locked: list[int] = []

    def allocate(self, sizes: Sequence[int]) -> None:
        """Take what tensors of so many bytes need. Each begins a page, and so does each piece that is locked."""
        if sizes == self._sizes:
            return
        self.close()
        memory = torch.empty(sum(map(_whole_pages, sizes)) + _PAGE_BYTES, dtype=torch.uint8)
        self._bytes, self._sizes = memory[-memory.data_ptr() % _PAGE_BYTES :], list(sizes)
        if self._device.type == "cuda":
            self._bytes.zero_()  # the pages come here, which takes longer than locking them
            for start, end in _pieces([_whole_pages(size) for size in sizes]):
                self._page_lock(self._bytes[start:end])

    def _page_lock(self, piece: Tensor) -> None:
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            error = int(cudart.cudaHostRegister(piece.data_ptr(), piece.nbytes, 1))  # for every context of the process
        if error:
            raise SlipstreamError(
                f"{len(self._bytes) >> 20} MiB of memory for snapshots cannot be page-locked (CUDA error {error}): set "
                "run.async_checkpoints = false"
            )
        self._locked.append(piece.data_ptr())

    @torch.no_grad()
    def copies(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Copies of these; from a GPU they are only queued."""
        self.allocate([tensor.nbytes for tensor in tensors])
        made: list[Tensor] = []
        starts = itertools.accumulate((_whole_pages(size) for size in self._sizes), initial=0)
        for tensor, start in zip(tensors, starts, strict=False):
            copy = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            made.append(copy.copy_(tensor, non_blocking=True))
        return iter(made)

    def wait_for_copies(self) -> Callable[[], None]:
        """What waits for all copies that were queued so far."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def close(self) -> None:
        """Give the memory back."""
        for address in self._locked:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(address)
        self._locked, self._sizes, self._bytes = [], [], torch.empty(0, dtype=torch.uint8)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where stretches of whole tensors begin and end: a copy must not go over the edge of what was locked at once."""
    start = end = 0
    for size in sizes:
        if end > start and end + size - start > _PIECE_BYTES:
            yield start, end
            start = end
        end += size
    if end > start:
        yield start, end
