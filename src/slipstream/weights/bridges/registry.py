"""Creates the bridge of a run; the one module that knows all bridges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.engine_protocols import TakesWeights
from slipstream.records import Version
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.base import Bridge, Fence, NamedWeights, Publisher, Receiver
from slipstream.weights.bridges.broadcast import BroadcastPublisher
from slipstream.weights.bridges.delta import DeltaPublisher
from slipstream.weights.bridges.disk import FolderPublisher, RestartReceiver
from slipstream.weights.bridges.lora import AdapterPublisher
from slipstream.weights.bridges.single_copy import SharedPublisher


@dataclass(frozen=True)
class _Bridge:
    name: str
    publisher: Publisher
    receiver: Receiver
    fence: Fence | None = None


def create_bridge(
    name: Literal["disk", "restart", "broadcast", "single_copy"],
    *,
    folder: Path,
    source: Path,
    engine: TakesWeights,
    timeout_s: float = 300.0,
    num_workers: int = 1,
    between_gpus: bool = False,
    held: Callable[[], Version | None] | None = None,
    joined: Callable[[], int] = lambda: 0,
    go_on: Callable[[Version], None] = lambda version: None,
) -> Bridge:
    """The bridge called `name` for whole models. `folder` takes published versions; `source` is the model's own
    folder; `timeout_s` bounds a collective among the trainer and the engine's `num_workers`, which goes over NCCL
    `between_gpus`; `joined` waits for them all and says how often some were replaced. With `held`, which asks the
    engine what it has verified, `disk` and `broadcast` send deltas. Under `single_copy` `go_on` has the engine
    compute with what was written before it is proved."""
    if name == "broadcast":
        backend = "nccl" if between_gpus else "gloo"
        carrier = BroadcastPublisher(num_workers=num_workers, timeout_s=timeout_s, backend=backend, joined=joined)
        return _Bridge(name, DeltaPublisher(carrier, held) if held else carrier, engine)
    if name == "single_copy":
        return _Bridge(name, SharedPublisher(go_on), engine, engine.fence)
    folders = FolderPublisher(name, folder, source)
    if name == "restart":
        return _Bridge(name, folders, RestartReceiver(engine))
    return _Bridge(name, DeltaPublisher(folders, held) if held else folders, engine)


def create_adapter_bridge(
    *, folder: Path, engine: TakesWeights, adapter: AdapterConfig, base_weights: NamedWeights
) -> Bridge:
    """The bridge `lora`: only the adapter's tensors are published; the engine starts on the base."""
    return _Bridge("lora", AdapterPublisher(folder, adapter, base_weights), engine)
