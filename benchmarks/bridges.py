"""Both halves of a weight bridge in one process, for measurements and tests. A run has one half in the trainer, the
other in the process that generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine_protocols import TakesWeights
from slipstream.weights import AdapterPublisher, Publisher, Receiver, create_publisher, receiver_of
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.base import Fence, NamedWeights
from slipstream.weights.bridges.registry import BridgeName


@dataclass(frozen=True)
class Bridge:
    """A way of the weights from trainer to engine."""

    name: str
    publisher: Publisher
    receiver: Receiver
    fence: Fence | None = None
    """To be called before the optimizer writes the live weights; None if the engine has a separate copy."""


def create_bridge(name: BridgeName, *, engine: TakesWeights, **options: Any) -> Bridge:
    """Both halves of the bridge called `name`; `options` as for `create_publisher`."""
    receiver, fence = receiver_of(name, engine)
    return Bridge(name, create_publisher(name, **options), receiver, fence)


def create_adapter_bridge(
    *, folder: Path, engine: TakesWeights, adapter: AdapterConfig, base_weights: NamedWeights
) -> Bridge:
    """The bridge `lora`: only the adapter's tensors are published; the engine starts on the base."""
    return Bridge("lora", AdapterPublisher(folder, adapter, base_weights), engine)
