"""Weight synchronisation of a run: its bridge, what it publishes, and metrics of each publication."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import PlannedConfig
from slipstream.config.traits import apply_timeout_s, engine_workers, keeps_copy, num_replicas, publishes_adapter
from slipstream.errors import SlipstreamError
from slipstream.launch.engines import RunEngine
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.records import Ticket, Version
from slipstream.runlog import RunLog
from slipstream.weights import Bridge, create_adapter_bridge, create_bridge
from slipstream.weights.base import NamedWeights

_DYING_S, _POLL_S = 10.0, 0.1
"""An engine's process lives a little longer than vLLM's core: how long, and how often, its end is polled for."""

if TYPE_CHECKING:
    from slipstream.trainer.learner import Learner


def run_bridge(
    config: PlannedConfig, learner: Learner, engine: RunEngine, folder: Path, thread: EventLoopThread
) -> tuple[Bridge, Callable[[], NamedWeights]]:
    """Create the bridge from the model of `learner` to `engine`, which runs in `thread`; also returns the weights to
    publish, those of the adapter or of the whole model. `folder` is for bridges that write files."""
    name, timeout_s = config.weights.bridge, apply_timeout_s(config)
    model = learner.model
    if publishes_adapter(config):
        assert model.adapter is not None
        bridge = create_adapter_bridge(
            folder=folder, engine=engine, adapter=model.adapter.config, base_weights=learner.base_weights()
        )
        return bridge, learner.adapter_weights
    assert name != "lora"

    def held() -> Version | None:
        # An engine that died is restarted first.
        longest_s = timeout_s + config.inference.start_timeout_s
        return thread.call(engine.held(), longest_s, "the engine to say which version it holds")

    def joined() -> int:
        return thread.call(engine.joined(), config.inference.start_timeout_s, "dead engines to start again")

    def go_on(version: Version) -> None:
        thread.call(engine.go_on(version, timeout_s), timeout_s, f"the engine to go on with version {version.name}")

    bridge = create_bridge(
        name,
        folder=folder,
        source=model.folder,
        engine=engine,
        timeout_s=timeout_s,
        num_workers=engine_workers(config),
        between_gpus=model.device.type == "cuda" and config.run.placement == "separate",
        held=held if keeps_copy(config) else None,
        joined=joined,
        go_on=go_on,
    )
    return bridge, learner.named_weights


def repeats_update(config: PlannedConfig, engine: RunEngine, log: RunLog, error: SlipstreamError) -> bool:
    """Whether a version whose update failed with `error` is published once more: where one engine of several died in a
    broadcast, which those that are left cannot finish. The whole version then goes over a new process group."""
    if config.weights.bridge != "broadcast" or num_replicas(config) == 1:
        return False
    has_died = ends_soon(engine)
    if has_died:
        log.event("update_repeated", reason=str(error))
    return has_died


def ends_soon(engine: RunEngine) -> bool:
    """Wait a little for one of the engine's processes to end, as it does after vLLM's core has died; whether one
    did."""
    deadline = time.monotonic() + _DYING_S
    while engine.is_up and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not engine.is_up


def update_metrics(ticket: Ticket) -> dict[str, float]:
    """Metrics for the step's row: bytes sent and, where versions are compared, the fraction of elements that
    changed."""
    metrics = {"update/bytes": float(ticket.num_bytes)}
    if ticket.changed_fraction is not None:
        metrics["update/changed_fraction"] = ticket.changed_fraction
    return metrics


def publication_fields(ticket: Ticket) -> dict[str, object]:
    """Fields for the event of a publication: bytes, and the base version if it is a delta."""
    fields: dict[str, object] = {"num_bytes": ticket.num_bytes}
    if ticket.delta is not None:
        fields["delta_of"] = ticket.delta.base.name
    return fields
