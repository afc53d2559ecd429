"""Where the queues of a run are, and how to open one."""

from __future__ import annotations

import re
from typing import TypeVar

from slipstream.transport.base import Transport
from slipstream.transport.files import FileStreams, FileTransport
from slipstream.transport.redis import RedisStreams, RedisTransport

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Streams = FileStreams | RedisStreams


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
    `producer` and `consumer` are the sides' names in errors. Both sides open it, in any order. Raises `ConfigError` for
    a Redis server that cannot be used."""
    for name in (topic, *([streams.run_id] if isinstance(streams, RedisStreams) else [])):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} names no queue: use letters, digits, '.', '_' and '-'")
    if isinstance(streams, FileStreams):
        return FileTransport(streams, topic, kind, capacity, producer, consumer)
    return RedisTransport(streams, topic, kind, capacity, producer, consumer)
