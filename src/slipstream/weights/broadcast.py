"""The bridge `broadcast`: from memory to memory over a process group that stays, into the running engine.

The trainer is rank 0 and every engine worker has a rank after it. A version is packed into a few flat buffers before
it is announced, so that the engine stands still only while they travel. Both halves are here: `BroadcastPublisher`
in the trainer, `Group.receive` in the worker. The group is made at the first version, over a file in a folder that only
the user can open, and its sockets listen on the loopback interface; every collective has the deadline of the group.
No tensor is described on the wire: the ticket's parameters say what the bytes are.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.errors import WeightsError
from slipstream.records import ApplyReport, ParameterSpec, Ticket, Version
from slipstream.weights.base import Announce, Engine, NamedWeights
from slipstream.weights.fingerprint import describe, digest

BUCKET_BYTES = 64 * 2**20
"""Large enough that a message's latency does not count, small enough to need little memory on both sides."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the group meets; travels as the ticket's `location`."""

    store: str
    """File of the rendezvous, in a folder of mode 0700."""
    num_workers: int
    timeout_s: float
    bucket_bytes: int = BUCKET_BYTES


class Group:
    """One side's membership in the process group."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rendezvous = rendezvous
        distributed: Any = torch.distributed
        if not distributed.is_gloo_available():
            raise WeightsError("this torch was built without gloo, which weights.bridge = broadcast needs: use disk")
        store = distributed.FileStore(rendezvous.store, rendezvous.num_workers + 1)
        store.set_timeout(timedelta(seconds=rendezvous.timeout_s))
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = distributed.ProcessGroupGloo(store, rank, rendezvous.num_workers + 1, options)

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's bytes to everybody; waits for it, with the group's deadline."""
        self._group.broadcast(buffer, 0).wait()

    def receive(self, parameters: Sequence[ParameterSpec]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a version, on the CPU, in the ticket's order."""
        for bucket in buckets(parameters, self.rendezvous.bucket_bytes):
            buffer = torch.empty(sum(num_bytes(spec) for spec in bucket), dtype=torch.uint8)
            self.broadcast(buffer)
            start = 0
            for spec in bucket:
                end = start + num_bytes(spec)
                # Cut out of its bytes and moved to its own place: a view must be aligned to its type.
                flat = buffer[start:end].clone().view(getattr(torch, spec.dtype))
                yield spec.name, flat.view(spec.shape)
                start = end


def num_bytes(spec: ParameterSpec) -> int:
    """Bytes of a parameter."""
    count = 1
    for size in spec.shape:
        count *= size
    return count * getattr(torch, spec.dtype).itemsize


def buckets(parameters: Sequence[ParameterSpec], bucket_bytes: int) -> Iterator[list[ParameterSpec]]:
    """The parameters in order, in runs of at most `bucket_bytes`, or one that is larger alone; the same on both
    sides."""
    bucket: list[ParameterSpec] = []
    total = 0
    for spec in parameters:
        size = num_bytes(spec)
        if bucket and total + size > bucket_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append(spec)
        total += size
    if bucket:
        yield bucket


class BroadcastPublisher:
    """The trainer's half. Owns the rendezvous folder until `close`."""

    def __init__(self, *, num_workers: int, timeout_s: float) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-group-"))
        self._rendezvous = Rendezvous(str(self._folder / "store"), num_workers, timeout_s)
        self._group: Group | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Nothing to do: the parameters stay where they are."""

    def fence(self) -> AbstractContextManager[None]:
        """Nothing is shared, so nothing needs to wait."""
        return nullcontext()

    def publish(self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce) -> Ticket:
        """Pack and describe, announce, then send. Raises `WeightsError` when nobody receives within the deadline."""
        weights = list(named_weights)
        parameters = describe(weights)
        by_name = dict(weights)
        packed = [
            torch.cat([_as_bytes(by_name[spec.name]) for spec in bucket])
            for bucket in buckets(parameters, self._rendezvous.bucket_bytes)
        ]
        total = sum(len(buffer) for buffer in packed)
        version = Version(lineage, step, digest(parameters))
        location = msgspec.json.encode(self._rendezvous).decode()
        ticket = Ticket(version, "broadcast", location, parameters, total)
        announce(ticket)
        try:
            if self._group is None:
                self._group = Group(self._rendezvous, rank=0)
            for buffer in packed:
                self._group.broadcast(buffer)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(
                f"version {version.name} could not be sent to {self._rendezvous.num_workers} engine worker(s) within "
                f"{self._rendezvous.timeout_s:g} s (weights.apply_timeout_s): {_first_line(error)}"
            ) from error
        return ticket

    def close(self) -> None:
        """Leave the group and remove its folder."""
        self._group = None
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)


class BroadcastReceiver:
    """The engine's half as the run sees it; the bytes go to the workers directly."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Have the workers join the collective, between two tokens of what they are generating."""
        return await self.engine.apply(ticket, timeout_s)


def rendezvous_of(ticket: Ticket) -> Rendezvous:
    """The group that a ticket's weights come over."""
    return msgspec.json.decode(ticket.location, type=Rendezvous)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
