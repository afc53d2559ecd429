"""One pass over the queue: concludes lost attempts, then starts all runs with a place.

Guarantees: one pass at a time on a host; an attempt's number and places are stored before its supervisor starts. The
next pass continues the records of a killed one. `submit`, `status`, `cancel`, the service and
each ending supervisor make a pass, so the queue moves without a service.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.plan.memory.sizes import gib
from slipstream.plan.times import Estimate, shared
from slipstream.service.allocation import CPU, Start, choose
from slipstream.service.provider import Provider
from slipstream.service.providers import Providers
from slipstream.service.records import ACTIVE, Attempt, Need, Record
from slipstream.service.store import Store, update


def tick(store: Store, providers: Providers) -> None:
    """Make a pass over the runs of this host."""
    host = socket.gethostname()
    with store.dispatching():
        swept: dict[str, dict[str, tuple[Path, Record]]] = {name: {} for name in providers}
        for folder, record in store.records():
            # Any host of a cluster may look after its jobs; only this one sees this machine's processes.
            is_ours = record.to != "local" or record.host == host
            if is_ours and not record.has_ended and record.to in providers:
                with contextlib.suppress(SlipstreamError, OSError):
                    swept[record.to][record.id] = (folder, providers[record.to].sweep(folder, record))
        for name, provider in providers.items():
            _place(provider, swept[name])


def would_start(store: Store, provider: Provider, need: Need) -> tuple[list[str], str]:
    """The places that a run with this need would get now in this machine's queue, and why these; or none, and why it
    would wait. Starts nothing."""
    host, now = socket.gethostname(), time.time()
    records = [each for _, each in store.records() if each.host == host and each.to == "local" and not each.has_ended]
    capacity = provider.capacity(records)
    assert capacity is not None
    new = Record("this run", "", host, now, "", "", "", 0, 0.0, need, Estimate("", 0, 0.0))
    choice = choose([*(each for each in records if each.state == "queued"), new], capacity.free, now)
    for start in choice.starts:
        if start.id == new.id:
            free = ", ".join(gib(lease.granted_bytes) for lease in start.leases if lease.granted_bytes)
            why = f"the most free memory: {free}" if free else "no run has it"
            return [lease.place for lease in start.leases], why
    return [], choice.waits[new.id]


def _place(provider: Provider, runs: Mapping[str, tuple[Path, Record]]) -> None:
    """Start all runs that this provider has a place for."""
    records = [record for _, record in runs.values()]
    queued = [record for record in records if record.state == "queued"]
    if not queued:
        return
    capacity = provider.capacity(records)
    if capacity is None:
        _hand_over(provider, runs)
        return
    choice = choose(queued, capacity.free, time.time())
    for name in choice.waits.keys() | choice.overtaken.keys():
        folder, record = runs[name]
        _note(folder, record, choice.waits.get(name, record.reason), choice.overtaken.get(name, 0))
    for start in choice.starts:
        folder, _ = runs[start.id]
        with contextlib.suppress(SlipstreamError, OSError):  # a removed folder: the next pass looks again
            record = update(folder, lambda now, start=start: _decided(now, start))
            if record.state == "preparing":
                _start(provider, folder, record)
    for name in _sharing(records, choice.starts):
        with contextlib.suppress(SlipstreamError, OSError):
            update(runs[name][0], _shared)


def _sharing(records: Iterable[Record], starts: Iterable[Start]) -> set[str]:
    """Runs that have a GPU together with another, after these starts."""
    found: dict[str, list[str]] = {}
    for name, leases in [(r.id, r.leases) for r in records if r.state in ACTIVE] + [(s.id, s.leases) for s in starts]:
        for lease in leases:
            found.setdefault(lease.place, []).append(name)
    return {name for place, names in found.items() if place != CPU and len(names) > 1 for name in names}


def _shared(record: Record) -> Record:
    return msgspec.structs.replace(record, estimate=shared(record.estimate))


def _hand_over(provider: Provider, runs: Mapping[str, tuple[Path, Record]]) -> None:
    """Submit the jobs of queued runs to a cluster's own queue."""
    for folder, record in runs.values():
        job = record.job
        is_due = job is None or job.is_over or not job.id
        if record.state == "queued" and is_due and record.not_before <= time.time():
            try:
                provider.submit(folder, record)
            except (SlipstreamError, OSError) as error:  # the next pass tries again
                with contextlib.suppress(SlipstreamError, OSError):
                    _note(folder, record, f"its job was not submitted: {error}", 0)


def _start(provider: Provider, folder: Path, record: Record) -> None:
    try:
        provider.submit(folder, record)
    except OSError as error:  # the next pass queues it again, as nobody has claimed the attempt
        reason = f"its supervisor did not start: {error}"
        update(folder, lambda now: msgspec.structs.replace(now, reason=reason))


def _decided(record: Record, start: Start) -> Record:
    """The record with its next attempt, for a supervisor to claim."""
    if record.state != "queued":
        return record
    number = len(record.attempts) + 1
    attempt = Attempt(number, time.time(), tuple(lease.place for lease in start.leases))
    return msgspec.structs.replace(
        record,
        state="preparing",
        reason="",
        launches=record.launches + 1,
        estimate=shared(record.estimate, is_shared=False),
        leases=start.leases,
        not_before=0.0,
        attempts=(*record.attempts, attempt),
    )


def _note(folder: Path, record: Record, reason: str, overtaken: int) -> None:
    """Store why a run waits, if the reason has changed."""

    def change(now: Record) -> Record:
        if now.state != "queued":
            return now
        return msgspec.structs.replace(now, reason=reason, overtaken=now.overtaken + overtaken)

    if overtaken or reason != record.reason:
        update(folder, change)
