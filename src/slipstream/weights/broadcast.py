"""The bridge `broadcast`: from memory to memory over a process group that stays, into the running engine.

The trainer is rank 0 and every engine worker has a rank after it. Where each has a GPU of its own the group is NCCL's
and packs on the device; otherwise it is gloo's, and a version is packed into the CPU's memory before it is announced,
so that the engine stands still only while it travels. Both halves are here: `BroadcastPublisher` in the trainer,
`Group.receive` in the worker. The group is made at the first version, over a file in a folder that only the user can
open; every wait has the deadline of the group. gloo's sockets listen on the loopback interface, NCCL's on the one that
NCCL chooses (NCCL_SOCKET_IFNAME). No tensor is described on the wire: the ticket's parameters say what the bytes are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from slipstream.errors import WeightsError
from slipstream.records import ApplyReport, ParameterSpec, Ticket, Version
from slipstream.weights.base import Announce, Engine, NamedWeights
from slipstream.weights.delta import Changes, travelling
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.shards import held

BUCKET_BYTES = {"gloo": 64 * 2**20, "nccl": 256 * 2**20}
"""Large enough that a message's latency does not count, small enough to need little memory on both sides."""
ALIGNMENT = 16
"""Every tensor starts at a multiple of it in its bucket, so that it can be read there as what it is."""
_POLL_S = 2e-4
_NO_WATCHDOG = {
    # Torch would end the whole process at a deadline; here it is an error with a sentence.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the group meets; travels as the ticket's `location`."""

    store: str
    """File of the rendezvous, in a folder of mode 0700."""
    num_workers: int
    timeout_s: float
    backend: Literal["gloo", "nccl"] = "gloo"

    @property
    def bucket_bytes(self) -> int:
        """Size of a message."""
        return BUCKET_BYTES[self.backend]


class Group:
    """One side's membership in the process group."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rendezvous = rendezvous
        distributed: Any = torch.distributed
        timeout, size = timedelta(seconds=rendezvous.timeout_s), rendezvous.num_workers + 1
        store = distributed.FileStore(rendezvous.store, size)
        store.set_timeout(timeout)
        if rendezvous.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            # NCCL itself would wait without end for somebody who never comes.
            store.set(f"here-{rank}", b"1")
            store.wait([f"here-{other}" for other in range(size)], timeout)
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with environment(_NO_WATCHDOG):
                self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
            return
        if not distributed.is_gloo_available():
            raise WeightsError("this torch was built without gloo, which weights.bridge = broadcast needs: use disk")
        self.device = torch.device("cpu")
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = distributed.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's bytes to everybody. On the CPU it waits for them; on a GPU what is queued on the current stream
        after it does, and `finish` waits."""
        self._group.broadcast(buffer, 0).wait()

    def finish(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until everything that was queued has arrived; raises RuntimeError at the group's deadline, or when
        `is_over` says that the other side has ended."""
        if self.device.type == "cpu":
            return
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + self.rendezvous.timeout_s
        while not event.query():
            ended = is_over()
            if (ended and not event.query()) or time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError("the other side ended without it" if ended else "the deadline passed")
            time.sleep(_POLL_S)

    def receive(self, ticket: Ticket) -> Iterator[tuple[str, Tensor]]:
        """The tensors that travel for a version, where the group works, in the ticket's order."""
        for bucket in buckets(travelling(ticket), self.rendezvous.bucket_bytes):
            places, total = layout(bucket)
            buffer = torch.empty(total, dtype=torch.uint8, device=self.device)
            self.broadcast(buffer)
            for spec, start in zip(bucket, places, strict=True):
                flat = buffer[start : start + num_bytes(spec)].view(getattr(torch, spec.dtype))
                yield spec.name, flat.view(spec.shape)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """These variables, for as long as something reads them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def layout(bucket: Sequence[ParameterSpec]) -> tuple[list[int], int]:
    """Where each tensor of a bucket starts, and the bucket's size, in bytes."""
    places: list[int] = []
    total = 0
    for spec in bucket:
        places.append(total)
        total += -(-num_bytes(spec) // ALIGNMENT) * ALIGNMENT
    return places, total


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

    def __init__(self, *, num_workers: int, timeout_s: float, backend: Literal["gloo", "nccl"] = "gloo") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="slipstream-group-"))
        self._rendezvous = Rendezvous(str(self._folder / "store"), num_workers, timeout_s, backend)
        self._group: Group | None = None

    def publish(
        self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce, changes: Changes | None = None
    ) -> Ticket:
        """Describe, announce, send. Raises `WeightsError` when nobody receives within the deadline."""
        weights = held(named_weights)
        parameters = describe(weights)
        version = Version(lineage, step, digest(parameters))
        location = msgspec.json.encode(self._rendezvous).decode()
        ticket = Ticket(version, "broadcast", location, parameters)
        # One after another: where they are gathered for it, the next one comes while this one is sent.
        tensors: Iterator[Tensor] = (tensor for _, tensor in weights)
        if changes is not None:
            ticket = msgspec.structs.replace(ticket, changed_fraction=changes.fraction)
            if changes.pays:
                ticket, tensors = msgspec.structs.replace(ticket, delta=changes.delta), iter(changes.payloads.values())
        specs = travelling(ticket)
        ticket = msgspec.structs.replace(ticket, num_bytes=sum(map(num_bytes, specs)))
        batches = list(buckets(specs, self._rendezvous.bucket_bytes))
        on_cpu = self._rendezvous.backend == "gloo"
        packed = [pack(bucket, tensors, torch.device("cpu")) for bucket in batches] if on_cpu else None
        is_over = announce(ticket)
        try:
            if self._group is None:
                self._group = Group(self._rendezvous, rank=0)
            device = self._group.device
            for buffer in packed or (pack(bucket, tensors, device) for bucket in batches):
                self._group.broadcast(buffer)
            self._group.finish(is_over or (lambda: False))
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


def pack(bucket: Sequence[ParameterSpec], tensors: Iterator[Tensor], device: torch.device) -> Tensor:
    """The bytes of a bucket, which are the next of `tensors`, on `device`."""
    places, total = layout(bucket)
    buffer = torch.empty(total, dtype=torch.uint8, device=device)
    for spec, start in zip(bucket, places, strict=True):
        flat = buffer[start : start + num_bytes(spec)].view(getattr(torch, spec.dtype))
        flat.view(spec.shape).copy_(next(tensors).detach())
    return buffer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
