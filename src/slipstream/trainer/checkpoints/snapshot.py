"""Copies of a learner's checkpoint state in host memory: training continues while checkpoints are written.

Guarantees: a snapshot is consistent, taken between two optimizer commits; it writes the same as the learner itself at
this time. Copies from a GPU are asynchronous: the next update is ordered after them on the stream, and the writer
waits for them. The memory is allocated once, page-locked for a GPU. Each snapshot overwrites the previous one; the
caller must have written it by then."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.algo.balancing import runs
from slipstream.errors import SlipstreamError
from slipstream.records import ParameterSpec
from slipstream.trainer.checkpoints.state_files import write_state
from slipstream.trainer.learner import Learner, write_deployable
from slipstream.trainer.model.policy import Form
from slipstream.weights.fingerprint import describe

_PAGE_BYTES = 4096
_PIECE_BYTES = 256 << 20
"""Bytes page-locked in one call; it blocks other driver calls."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of a learner's state, to save."""

    weights: Sequence[tuple[str, Tensor]]
    """The deployable weights, by name."""
    parameters: tuple[ParameterSpec, ...]
    """Their specs with the fingerprints of the live weights."""
    form: Form
    state: Mapping[str, Tensor]
    step: int
    wait: Callable[[], None]
    """Waits until all copies are complete."""

    def write_weights(self, folder: Path, source: Path) -> tuple[ParameterSpec, ...]:
        """See `Learner.write_weights`."""
        self.wait()
        write_deployable(folder, self.weights, self.form, source)
        return self.parameters

    def save(self, folder: Path) -> None:
        """See `Learner.save`."""
        self.wait()
        folder.mkdir(parents=True, exist_ok=True)
        write_state(folder, self.state, self.step)


class Snapshots:
    """Takes snapshots of one learner into one host buffer; if not `deployed` (a critic) of its resume state only."""

    def __init__(self, learner: Learner, *, deployed: bool = True) -> None:
        self._learner = learner
        self._deployed = deployed
        self._buffer = _HostBuffer(learner.model.device)

    def preparation(self) -> Callable[[], None]:
        """A function to allocate the memory, for another thread to call before the next `take`. Useful after the
        first update only: optimizers have no states before."""
        live = [tensor for _, tensor in (*self._weights(), *self._learner.state().items())]
        sizes = [tensor.nbytes for tensor in live]
        return lambda: self._buffer.allocate(sizes)

    def take(self) -> Snapshot:
        """Copy the learner's current state."""
        weights, state = self._weights(), self._learner.state()
        parameters = describe(weights)  # before the copies, because it synchronizes the device
        copies = self._buffer.copies([*(tensor for _, tensor in weights), *state.values()])
        return Snapshot(
            [(name, next(copies)) for name, _ in weights],
            parameters,
            self._learner.model.form,
            {name: next(copies) for name in state},
            self._learner.step,
            self._buffer.wait_for_copies(),
        )

    def _weights(self) -> list[tuple[str, Tensor]]:
        return list(self._learner.deployable()) if self._deployed else []

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()


class _HostBuffer:
    """Host memory for copies of tensors from `device`; reallocated when their sizes change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: list[int] = []
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._locked: list[int] = []

    def allocate(self, sizes: Sequence[int]) -> None:
        """Allocate memory for tensors of these sizes in bytes; each starts on a page, and so does each locked piece."""
        if sizes == self._sizes:
            return
        self.close()
        memory = torch.empty(sum(map(_whole_pages, sizes)) + _PAGE_BYTES, dtype=torch.uint8)
        self._bytes, self._sizes = memory[-memory.data_ptr() % _PAGE_BYTES :], list(sizes)
        if self._device.type == "cuda":
            self._bytes.zero_()  # touches the pages: this takes longer than locking them
            start = 0
            # Whole tensors: a copy must not cross the boundary of a locked piece. The driver refuses empty pieces.
            for piece in runs(filter(None, map(_whole_pages, sizes)), int, _PIECE_BYTES):
                self._page_lock(self._bytes[start : start + sum(piece)])
                start += sum(piece)

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
        """Copy the tensors; asynchronously from a GPU."""
        self.allocate([tensor.nbytes for tensor in tensors])
        made: list[Tensor] = []
        starts = itertools.accumulate((_whole_pages(size) for size in self._sizes), initial=0)
        for tensor, start in zip(tensors, starts, strict=False):
            copy = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            made.append(copy.copy_(tensor, non_blocking=True))
        return iter(made)

    def wait_for_copies(self) -> Callable[[], None]:
        """A function to wait for all copies queued so far."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def close(self) -> None:
        """Free the memory."""
        for address in self._locked:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(address)
        self._locked, self._sizes, self._bytes = [], [], torch.empty(0, dtype=torch.uint8)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
