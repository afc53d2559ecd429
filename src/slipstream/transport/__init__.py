"""Queues of records between two sides of a run, for example of batches from the orchestrator to the trainer: put, take,
acknowledge."""

from slipstream.transport.base import Receipt, RecordError, Transport, TransportClosed, TransportLost
from slipstream.transport.memory import MemoryTransport
from slipstream.transport.polled import TransportAway, Unreachable
from slipstream.transport.redis_server import check_redis
from slipstream.transport.streams import FileStreams, RedisStreams, Streams, open_transport

__all__ = [
    "FileStreams",
    "MemoryTransport",
    "Receipt",
    "RecordError",
    "RedisStreams",
    "Streams",
    "Transport",
    "TransportAway",
    "TransportClosed",
    "TransportLost",
    "Unreachable",
    "check_redis",
    "open_transport",
]
