"""The bridge of a planned run, what it publishes, and what is noted of each version's way."""

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
"""An engine's process outlives vLLM's core a little; its death is looked for so long, and so often."""

if TYPE_CHECKING:
    from slipstream.trainer.learner import Learner


def run_bridge(
    config: PlannedConfig, learner: Learner, engine: RunEngine, folder: Path, thread: EventLoopThread
) -> tuple[Bridge, Callable[[], NamedWeights]]:
    """The bridge between the model of `learner` and `engine`, which belongs to `thread`, and what to publish over it:
    the adapter alone, or the whole model. `folder` is for versions that are files."""
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
        # One that died comes back first.
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


def repeats_updates(config: PlannedConfig, engine: RunEngine, log: RunLog) -> Callable[[SlipstreamError], bool]:
    """Whether a version whose update failed is published once more: where one engine of several died in a collective,
    which those that are left cannot end. It then comes whole, over a new group."""

    def publishes_again(error: SlipstreamError) -> bool:
        if config.weights.bridge != "broadcast" or num_replicas(config) == 1:
            return False
        has_ended = ends_soon(engine)
        if has_ended:
            log.event("update_repeated", reason=str(error))
        return has_ended

    return publishes_again


def ends_soon(engine: RunEngine) -> bool:
    """Whether one of its processes is dead, after waiting for it for as long as vLLM's core may be dead before."""
    deadline = time.monotonic() + _DYING_S
    while engine.is_up and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not engine.is_up


def update_metrics(ticket: Ticket) -> dict[str, float]:
    """For the step's row: what was moved, and where versions are compared, which part of them changed."""
    metrics = {"update/bytes": float(ticket.num_bytes)}
    if ticket.changed_fraction is not None:
        metrics["update/changed_fraction"] = ticket.changed_fraction
    return metrics


def travelled(ticket: Ticket) -> dict[str, object]:
    """For the event of a publication: bytes, and against which version they are a delta, if they are one."""
    fields: dict[str, object] = {"num_bytes": ticket.num_bytes}
    if ticket.delta is not None:
        fields["delta_of"] = ticket.delta.base.name
    return fields
