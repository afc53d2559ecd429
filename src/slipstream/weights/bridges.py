"""The one place that knows all bridges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.weights.base import Bridge, Engine, Publisher, Receiver
from slipstream.weights.broadcast import BroadcastPublisher, BroadcastReceiver
from slipstream.weights.disk import DiskReceiver, FolderPublisher, RestartReceiver


@dataclass(frozen=True)
class _Bridge:
    name: str
    publisher: Publisher
    receiver: Receiver


def create_bridge(
    name: Literal["disk", "restart", "broadcast"],
    *,
    folder: Path,
    source: Path,
    engine: Engine,
    timeout_s: float = 300.0,
    num_workers: int = 1,
) -> Bridge:
    """The bridge called `name`. `folder` takes published versions; `source` is the model's own folder; `timeout_s`
    bounds a collective among the trainer and the engine's `num_workers`."""
    if name == "broadcast":
        return _Bridge(
            name, BroadcastPublisher(num_workers=num_workers, timeout_s=timeout_s), BroadcastReceiver(engine)
        )
    receiver = DiskReceiver(engine) if name == "disk" else RestartReceiver(engine)
    return _Bridge(name, FolderPublisher(name, folder, source), receiver)
