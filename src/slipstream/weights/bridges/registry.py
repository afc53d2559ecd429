"""Creates the bridge of a run; the one module with knowledge of all bridges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from slipstream.engine_protocols import TakesWeights
from slipstream.records import Version
from slipstream.weights.base import Fence, Publisher, Receiver
from slipstream.weights.bridges.broadcast import BroadcastPublisher
from slipstream.weights.bridges.delta import DeltaPublisher
from slipstream.weights.bridges.disk import FolderPublisher, RestartReceiver
from slipstream.weights.bridges.single_copy import SharedPublisher

BridgeName = Literal["disk", "restart", "broadcast", "single_copy"]


def create_publisher(
    name: BridgeName,
    *,
    folder: Path,
    source: Path,
    timeout_s: float = 300.0,
    num_workers: int = 1,
    has_nodes: bool = False,
    between_gpus: bool = False,
    held: Callable[[], Version | None] | None = None,
    joined: Callable[[], int] = lambda: 0,
    leave: Callable[[], None] = lambda: None,
    go_on: Callable[[Version], None] = lambda version: None,
    meet_at: str = "",
    peers: Sequence[str] = (),
) -> Publisher:
    """The trainer's half of the bridge called `name`, for whole models. `folder` takes published versions; `source` is
    the model's own folder; `timeout_s` bounds a collective among the trainer and the engine's `num_workers`. It goes
    over NCCL `between_gpus`. If the run `has_nodes`, they meet in its folder, and with servers on
    the hosts `peers` at this host's address `meet_at`. `joined` waits for them all and says how
    often some were replaced, `leave` has them leave it. `held` asks the engine for its verified version; with it `disk`
    and `broadcast` send deltas. Under `single_copy` `go_on` has the engine compute with the written version before it
    is proved."""
    if name == "single_copy":
        return SharedPublisher(go_on)
    if name == "broadcast":
        backend = "nccl" if between_gpus else "gloo"
        carrier = BroadcastPublisher(
            num_workers=num_workers,
            timeout_s=timeout_s,
            backend=backend,
            joined=joined,
            leave=leave,
            meet_in=folder.parent if has_nodes else None,
            meet_at=meet_at,
            peers=peers,
        )
    else:
        carrier = FolderPublisher(name, folder, source)
    return DeltaPublisher(carrier, held) if held and name != "restart" else carrier


def receiver_of(name: BridgeName | Literal["lora"], engine: TakesWeights) -> tuple[Receiver, Fence | None]:
    """The engine's half of a bridge, and the fence to pause the engine before its weights are written in place."""
    if name == "restart":
        return RestartReceiver(engine), None
    return engine, engine.fence if name == "single_copy" else None
