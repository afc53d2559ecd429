"""Queue of batches from the orchestrator to the trainer: put, take, acknowledge."""

from slipstream.transport.base import Receipt, Transport, TransportClosed
from slipstream.transport.memory import MemoryTransport

__all__ = ["MemoryTransport", "Receipt", "Transport", "TransportClosed"]
