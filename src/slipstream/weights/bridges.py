"""The one place that knows all bridges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.weights.base import Bridge, Engine, Publisher, Receiver
from slipstream.weights.disk import DiskReceiver, FolderPublisher, RestartReceiver


@dataclass(frozen=True)
class _Bridge:
    name: str
    publisher: Publisher
    receiver: Receiver


def create_bridge(name: Literal["disk", "restart"], *, folder: Path, source: Path, engine: Engine) -> Bridge:
    """The bridge called `name`. `folder` takes published versions; `source` is the model's own folder."""
    receiver = DiskReceiver(engine) if name == "disk" else RestartReceiver(engine)
    return _Bridge(name, FolderPublisher(name, folder, source), receiver)
