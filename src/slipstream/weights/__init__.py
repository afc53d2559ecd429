"""Weight transfer from trainer to engine: bridges, and fingerprints to verify every update.

A bridge has a publisher (trainer) and a receiver (engine). The publisher makes a version available and describes it in
a ticket; the receiver has the engine load it and reports the engine's weights after it. `restart` is the reference:
after any other bridge the engine answers bit for bit as if started on the version.
"""

from slipstream.weights.base import Announce, Publisher, Receiver, check_report
from slipstream.weights.bridges.lora import AdapterPublisher
from slipstream.weights.bridges.registry import create_publisher, receiver_of

__all__ = [
    "AdapterPublisher",
    "Announce",
    "Publisher",
    "Receiver",
    "check_report",
    "create_publisher",
    "receiver_of",
]
