"""The weights' way from trainer to engine: bridges, and the fingerprints that prove each arrival.

A bridge is a publisher (trainer's side) and a receiver (engine's side), both in one file. The publisher makes a
version available and describes it in a ticket; the receiver has the engine take it and reports what the
engine then really holds. `restart` is the oracle: every other bridge must leave the engine answering bit for
bit as one started on that version does.
"""

from slipstream.weights.base import Announce, Bridge, Publisher, Receiver, check_report
from slipstream.weights.bridges.registry import create_adapter_bridge, create_bridge

__all__ = [
    "Announce",
    "Bridge",
    "Publisher",
    "Receiver",
    "check_report",
    "create_adapter_bridge",
    "create_bridge",
]
