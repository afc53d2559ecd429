"""The bridge `broadcast`: weights travel from memory to memory over a process group, into the running engine.

The trainer is rank 0; the engine workers have the ranks after it. The group is NCCL's if each has a GPU of its own, and
gloo's otherwise. With gloo, a version is copied to the CPU's memory before its announcement: the engine is paused only
for the transfer. Each large tensor is a message, without a copy if it is contiguous. Small ones are packed into two
buckets: one travels while the other is packed or read. `BroadcastPublisher` is the trainer's half, `Group.receive` the
worker's. The first version makes the group, over a file in a folder of mode 0700, or with servers over `tcp_store`;
every wait has the group's timeout. gloo listens on loopback, and NCCL chooses; on several nodes, and with servers, both
take the host's interface (`processes.rendezvous`). Messages have no headers: the ticket's parameters describe their
bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from slipstream.config.addresses import is_loopback
from slipstream.errors import WeightsError, first_line
from slipstream.nodes.forwarding import end_connections
from slipstream.processes.rendezvous import address_in, interface_variables, meet
from slipstream.processes.tcp_store import StoreServer
from slipstream.processes.temporary import make_temporary, remove_temporary
from slipstream.processes.variables import variables_set
from slipstream.records import ParameterSpec, Ticket, Version
from slipstream.weights.base import Announce, NamedWeights
from slipstream.weights.bridges.delta import Changes, travelling
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.shards import held

BUCKET_BYTES = {"gloo": 64 * 2**20, "nccl": 256 * 2**20}
"""Bucket size: large enough to hide a message's latency, small enough to need little memory on both sides."""
DIRECT_BYTES = {"gloo": 2**15, "nccl": 64 * 2**20}
"""A tensor of this size or more is a message of its own. Each side copies it only if it is not contiguous there.
Between GPUs a message costs as much as ten copied megabytes, and a copy at ten times the link's speed is hidden behind
the message before it (`benchmarks/broadcast_messages.py` measures both)."""
ALIGNMENT = 16
"""Tensor offsets in a bucket are multiples of it, for aligned views of any dtype."""
_POLL_S = 2e-4
_LOOK_S = 0.2
_OVER_S = 2.0
"""Most seconds from the end of an update to the end of its transfer."""
_NO_WATCHDOG = {
    # Otherwise torch's watchdog ends the whole process at a timeout; here it raises.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Rendezvous(msgspec.Struct, frozen=True):
    """How to join the process group; the ticket's `location`."""

    store: str
    """Its address, see `processes.rendezvous`."""
    num_workers: int
    timeout_s: float
    backend: Literal["gloo", "nccl"] = "gloo"

    @property
    def bucket_bytes(self) -> int:
        """Largest packed message, in bytes."""
        return BUCKET_BYTES[self.backend]

    @property
    def direct_bytes(self) -> int:
        """From this size in bytes on a tensor is a message of its own."""
        return DIRECT_BYTES[self.backend]


Memory = Callable[[ParameterSpec], Tensor | None]
"""The engine's bytes to receive a parameter into, if they are contiguous; else None."""


class Group:
    """One process's membership in the process group."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rendezvous = rendezvous
        self._buckets: dict[int, Tensor] = {}
        """Two reused buckets: one travels while the other is packed or read."""
        distributed: Any = torch.distributed
        timeout, size = timedelta(seconds=rendezvous.timeout_s), rendezvous.num_workers + 1
        # NCCL asks it at the first broadcast, and a store written in Python answers only while its object lives.
        self._store = store = meet(rendezvous.store, rank, size, rendezvous.timeout_s)
        if rendezvous.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with variables_set(_NO_WATCHDOG | interface_variables()):
                self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
            return
        if not distributed.is_gloo_available():
            raise WeightsError("this torch was built without gloo, which weights.bridge = broadcast needs: use disk")
        self.device = torch.device("cpu")
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timeout
        interface = interface_variables()["GLOO_SOCKET_IFNAME"]
        options._devices = [distributed.ProcessGroupGloo.create_device(interface=interface)]
        self._group = distributed.ProcessGroupGloo(store, rank, size, options)

    def begin(self, buffer: Tensor) -> Any:
        """Start the broadcast of rank 0's bytes, after the work queued on the current stream. `wait` of the returned
        work blocks on a CPU; on a GPU it makes the current stream wait."""
        return self._group.broadcast(buffer, 0)

    def broadcast(self, buffer: Tensor) -> None:
        """`begin` and `wait`; on a GPU only `finish` blocks."""
        self.begin(buffer).wait()

    def slot(self, number: int, size: int) -> Tensor:
        """The bucket of packed message `number`; message `number + 2` reuses it."""
        slot = self._buckets.get(number % 2)
        if slot is None or slot.numel() < size:
            size_kept = max(size, min(self.rendezvous.bucket_bytes, 2 * size))
            slot = self._buckets[number % 2] = torch.empty(size_kept, dtype=torch.uint8, device=self.device)
        return slot[:size]

    def finish(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until all queued messages have arrived. Raises RuntimeError at the group's timeout, or when `is_over`
        reports the other side's end."""
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

    def leave(self) -> None:
        """Leave the group, also when other members are dead."""
        if self.device.type != "cpu":
            self._group.abort()

    def receive(self, ticket: Ticket, memory: Memory = lambda _: None) -> Iterator[list[tuple[str, Tensor]]]:
        """Receive a version's tensors on the group's device and yield them message by message. Tensors with a place in
        `memory` are received there, and not yielded. A message's tensors are valid until the request for the next but
        one (on a GPU: for work queued before this request); the next message travels meanwhile."""
        ahead: tuple[Any, list[tuple[str, Tensor]]] | None = None
        num_packed = 0
        for bucket in messages(travelling(ticket), self.rendezvous):
            places, total = layout(bucket)
            own = memory(bucket[0]) if len(bucket) == 1 and num_bytes(bucket[0]) == total else None
            if own is None:
                buffer, tensors = self.slot(num_packed, total), []
                num_packed += 1
                for spec, start in zip(bucket, places, strict=True):
                    flat = buffer[start : start + num_bytes(spec)].view(getattr(torch, spec.dtype))
                    tensors.append((spec.name, flat.view(spec.shape)))
            else:
                buffer, tensors = own, []
            arriving = self.begin(buffer), tensors
            if ahead is not None:
                ahead[0].wait()
                yield ahead[1]
            ahead = arriving
        if ahead is not None:
            ahead[0].wait()
            yield ahead[1]

    def send(self, specs: Sequence[ParameterSpec], tensors: Iterable[Tensor]) -> None:
        """Rank 0's counterpart of `receive`: send tensors in the order of `specs`. Each is taken from the iterator
        while earlier ones travel, and released when the next message but one begins."""
        coming = zip(specs, tensors, strict=True)
        arrived: dict[str, Tensor] = {}
        works: deque[Any] = deque()
        num_packed = 0
        for bucket in messages(specs, self.rendezvous):
            while bucket[-1].name not in arrived:
                spec, tensor = next(coming)
                arrived[spec.name] = tensor
            if len(works) > 1:
                works.popleft().wait()  # it may have used the next bucket
            buffer = whole(bucket, arrived, self.device)
            if buffer is None:
                buffer = self.slot(num_packed, layout(bucket)[1])
                num_packed += 1
                pack(bucket, arrived, buffer)
            works.append(self.begin(buffer))
            for spec in bucket:
                del arrived[spec.name]
        for work in works:
            work.wait()
        next(coming, None)  # exhausts a gathering generator


def layout(bucket: Sequence[ParameterSpec]) -> tuple[list[int], int]:
    """Offset of each tensor in a bucket, and the bucket's size, in bytes."""
    places: list[int] = []
    total = 0
    for spec in bucket:
        places.append(total)
        total += -(-num_bytes(spec) // ALIGNMENT) * ALIGNMENT
    return places, total


def num_bytes(spec: ParameterSpec) -> int:
    """Bytes of a parameter."""
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def messages(parameters: Sequence[ParameterSpec], rendezvous: Rendezvous) -> list[list[ParameterSpec]]:
    """The parameters of each message, equal on both sides: every large one by itself, small ones in buckets; ordered by
    the last parameter of each message."""
    found: dict[int, list[ParameterSpec]] = {}
    bucket: list[ParameterSpec] = []
    total = last = 0
    for place, spec in enumerate(parameters):
        size = num_bytes(spec)
        if size >= rendezvous.direct_bytes:
            found[place] = [spec]
            continue
        if bucket and total + size > rendezvous.bucket_bytes:
            found[last] = bucket
            bucket, total = [], 0
        bucket.append(spec)
        total, last = total + size, place
    if bucket:
        found[last] = bucket
    return [found[place] for place in sorted(found)]


class BroadcastPublisher:
    """The trainer's half; owns the rendezvous folder until `close`."""

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        backend: Literal["gloo", "nccl"] = "gloo",
        joined: Callable[[], int] = lambda: 0,
        leave: Callable[[], None] = lambda: None,
        meet_in: Path | None = None,
        meet_at: str = "",
        peers: Sequence[str] = (),
    ) -> None:
        """`joined` waits until all workers run and returns how often some were replaced. A change of it makes a new
        group, and so does a failure to send a version. `leave` makes the workers leave the group before its end; it is
        bounded and does not raise. `meet_in`: a folder of all nodes, by default the temporary one. `meet_at`: for
        servers, an address of this host in its place. `peers`: the servers' hosts."""
        self._joined, self._leave = joined, leave
        self._meet_at, self._peers = meet_at, [host for host in peers if not is_loopback(host)]
        self._store: StoreServer | None = None
        self._num_replaced = 0
        self._num_broken = 0
        self._folder = make_temporary("group", meet_in)
        self._rendezvous = Rendezvous(self._place(""), num_workers, timeout_s, backend)
        self._group: Group | None = None

    def _place(self, attempt: str) -> str:
        """Meeting address of the next group's members."""
        if not self._meet_at:
            return address_in(self._folder, attempt)
        if self._store is not None:
            self._store.abort()
        self._store = StoreServer(self._meet_at)
        return self._store.address

    def publish(
        self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce, changes: Changes | None = None
    ) -> Ticket:
        """Describe, announce, send. Raises `WeightsError` when the receivers do not take it within the timeout."""
        if (num_replaced := self._joined()) != self._num_replaced:  # everybody joins a new group, by this ticket
            self._num_replaced = num_replaced
            self._new_group()
        weights = held(named_weights)
        parameters = describe(weights)
        version = Version(lineage, step, digest(parameters))
        location = msgspec.json.encode(self._rendezvous).decode()
        ticket, sent = Ticket(version, "broadcast", location, parameters), weights
        if changes is not None:
            delta, sent = (changes.delta, changes.payloads.items()) if changes.pays else (None, weights)
            ticket = msgspec.structs.replace(ticket, changed_fraction=changes.fraction, delta=delta)
        # Lazy: tensors are gathered, if at all, while earlier ones are sent.
        tensors = (tensor for _, tensor in sent)
        specs = travelling(ticket)
        ticket = msgspec.structs.replace(ticket, num_bytes=sum(map(num_bytes, specs)))
        if self._rendezvous.backend == "gloo":
            in_memory = [tensor.detach().cpu() for tensor in tensors]
            tensors = (tensor for tensor in in_memory)
        with contextlib.closing(tensors):  # otherwise other ranks still gather when the next publish begins
            # Start a gather before the engine is paused.
            first = deque(itertools.islice(tensors, 1))
            is_over = announce(ticket) or (lambda: False)
            # No reference to a sent tensor stays here.
            self._send(ticket, specs, itertools.chain((first.popleft() for _ in range(len(first))), tensors), is_over)
        return ticket

    def _send(
        self, ticket: Ticket, specs: Sequence[ParameterSpec], tensors: Iterable[Tensor], is_over: Callable[[], bool]
    ) -> None:
        try:
            with self._ends_with(is_over):
                if self._group is None:
                    self._group = Group(self._rendezvous, rank=0)
                self._group.send(specs, tensors)
            self._group.finish(is_over)
        except (RuntimeError, ValueError) as error:
            # Workers may have received a part: in this group they would take the next version for the rest.
            self._num_broken += 1
            self._new_group()
            raise WeightsError(
                f"version {ticket.version.name} could not be sent to {self._rendezvous.num_workers} engine worker(s) "
                f"within {self._rendezvous.timeout_s:g} s (weights.apply_timeout_s): {first_line(error)}"
            ) from error

    @contextlib.contextmanager
    def _ends_with(self, is_over: Callable[[], bool]) -> Generator[None]:
        """Servers may be lost: within the block, end the wait for members once the other side has ended without."""
        if self._store is None:
            yield
            return
        store, done = self._store, threading.Event()

        def watch() -> None:
            while not is_over():
                if done.wait(_LOOK_S):
                    return
            if not done.wait(_OVER_S):
                store.abort()
                if not done.wait(_OVER_S):  # in a transfer to a lost host
                    for host in self._peers:
                        end_connections(host)

        watcher = threading.Thread(target=watch, name="broadcast-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _new_group(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None
        store = self._place(f"-{self._num_replaced}-{self._num_broken}")
        self._rendezvous = msgspec.structs.replace(self._rendezvous, store=store)

    def hold(self, step: int | None) -> None:
        """Does nothing: no version is kept."""

    def close(self) -> None:
        """Leave the group after the workers, and remove its folder."""
        if self._group is not None:
            self._leave()
            self._group.leave()
            self._group = None
        if self._store is not None:
            self._store.abort()
        remove_temporary(self._folder)


def rendezvous_of(ticket: Ticket) -> Rendezvous:
    """The rendezvous in a ticket of this bridge."""
    return msgspec.json.decode(ticket.location, type=Rendezvous)


def pack(bucket: Sequence[ParameterSpec], tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Copy the tensors of a bucket into `buffer`."""
    places, _ = layout(bucket)
    flats = [
        buffer[start : start + num_bytes(spec)].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, start in zip(bucket, places, strict=True)
    ]
    copy_all(flats, [tensors[spec.name].detach() for spec in bucket])


def whole(bucket: Sequence[ParameterSpec], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
    """The bytes of a message of one contiguous tensor on `device`; None when it must be packed."""
    tensor = tensors[bucket[0].name].detach()
    if len(bucket) > 1 or num_bytes(bucket[0]) != layout(bucket)[1]:
        return None
    return flat_bytes(tensor) if tensor.device == device else None


def flat_bytes(tensor: Tensor) -> Tensor | None:
    """A tensor's memory as bytes; None when it is not contiguous or empty."""
    return tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() and tensor.numel() else None


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target. Pairs on one device with equal strides take few kernels (`_foreach_copy_`)."""
    by_kind: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = (target.dtype, source.dtype, target.device, source.device, target.stride() == source.stride())
        pair = by_kind.setdefault(kind, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for (_, _, here, there, is_alike), (to, of) in by_kind.items():
        if here == there and is_alike:
            torch._foreach_copy_(to, of)
        else:
            for target, source in zip(to, of, strict=True):
                target.copy_(source, non_blocking=True)
