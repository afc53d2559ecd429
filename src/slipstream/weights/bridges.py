"""The one place that knows all bridges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.weights.adapter import AdapterConfig
from slipstream.weights.base import Bridge, Engine, NamedWeights, Publisher, Receiver
from slipstream.weights.disk import DiskReceiver, FolderPublisher, RestartReceiver
from slipstream.weights.lora import AdapterPublisher


@dataclass(frozen=True)
class _Bridge:
    name: str
    publisher: Publisher
    receiver: Receiver


def create_bridge(
    name: Literal["disk", "restart"],
    *,
    folder: Path,
    source: Path,
    engine: Engine,
) -> Bridge:
    """The bridge called `name` for whole models. `folder` takes published versions; `source` is the model's own
    folder."""
    receiver = DiskReceiver(engine) if name == "disk" else RestartReceiver(engine)
    return _Bridge(name, FolderPublisher(name, folder, source), receiver)


def create_adapter_bridge(
    *, folder: Path, engine: Engine, adapter: AdapterConfig, base_weights: NamedWeights
) -> Bridge:
    """The bridge `lora`: only the adapter's tensors are published; the engine starts on the base."""
    return _Bridge("lora", AdapterPublisher(folder, adapter, base_weights), DiskReceiver(engine))
