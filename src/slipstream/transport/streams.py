"""Where the queues of a run are, and how to open one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slipstream.transport.base import Transport
from slipstream.transport.files import FileTransport
from slipstream.transport.memory import MemoryTransport
from slipstream.transport.redis import RedisTransport

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class MemoryStreams:
    """Queues within this process: each `open_transport` makes another one."""


@dataclass(frozen=True)
class FileStreams:
    """Queues in a folder that all processes of the run see, for example `streams` in the run folder."""

    folder: Path
    lineage: int = 0
    """Attempt of the run, which counts resumes: records of an earlier attempt are never read as those of this one."""


@dataclass(frozen=True)
class RedisStreams:
    """Queues on a Redis server."""

    url: str
    """`redis://host:port/database`, `rediss://` with TLS, or `unix:///path`; without a password."""
    run_id: str
    """Tells the runs on one server apart."""
    lineage: int = 0
    """As in `FileStreams`."""
    password_variable: str = ""
    """Name of the environment variable that holds the password; empty for a private Unix socket."""


Streams = MemoryStreams | FileStreams | RedisStreams


def open_transport(
    streams: Streams,
    topic: str,
    kind: type[T],
    *,
    capacity: int,
    producer: str = "the orchestrator",
    consumer: str = "the trainer",
) -> Transport[T]:
    """Opens the queue `topic` of records of type `kind`, which it makes if there is none, with `capacity` places;
    `producer` and `consumer` are the sides' names in errors. Both sides open it, in any order. A consumer that starts
    again calls `requeue` once. Raises `ConfigError` for a Redis server that cannot be used."""
    for name in (topic, *([streams.run_id] if isinstance(streams, RedisStreams) else [])):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} names no queue: use letters, digits, '.', '_' and '-'")
    if isinstance(streams, MemoryStreams):
        return MemoryTransport(capacity, producer, consumer)
    if isinstance(streams, FileStreams):
        return FileTransport(
            streams.folder, topic, kind, capacity, lineage=streams.lineage, producer=producer, consumer=consumer
        )
    return RedisTransport(
        streams.url,
        streams.run_id,
        topic,
        kind,
        capacity,
        lineage=streams.lineage,
        password_variable=streams.password_variable,
        producer=producer,
        consumer=consumer,
    )
