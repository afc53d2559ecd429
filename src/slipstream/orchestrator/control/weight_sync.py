"""The trainer's side of a run with an engine: its publisher, and its handles to the generating side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from slipstream.config import PlannedConfig
from slipstream.config.bounds import GIB
from slipstream.config.traits import (
    apply_timeout_s,
    engine_workers,
    generates_for,
    keeps_copy,
    num_engines,
    publishes_adapter,
    update_phase,
)
from slipstream.errors import SlipstreamError, one_line
from slipstream.inference.addresses import addresses_of, own_host_of
from slipstream.inference.lending import ServerFacts
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import Caller, Orchestrator
from slipstream.orchestrator.deadlines import START_GRACE_S, waits_of
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.hooks import TrainerHooks
from slipstream.progress import Progress
from slipstream.records import ApplyReport, Rollout, Ticket, Version
from slipstream.runlog import EventLog, RunLog, sample_of
from slipstream.weights import AdapterPublisher, Announce, Publisher, create_publisher
from slipstream.weights.base import NamedWeights

if TYPE_CHECKING:
    from slipstream.trainer.learner import Learner

_GRACE_S = 5.0
_LEAVE_S = 5.0
"""How long engines may take to leave a process group between two steps. At the run's end everything else waits."""


def connect(
    config: PlannedConfig,
    learner: Learner,
    caller: Caller,
    hooks: TrainerHooks,
    log: RunLog,
    saved_step: Callable[[], int],
    servers: Sequence[ServerFacts] = (),
) -> tuple[Orchestrator, Publisher]:
    """Create the training loop's engine, and the publisher of the weights of `learner`; the caller closes it.
    `saved_step`: see `Orchestrator`. `servers`: the plan's."""
    publisher, published = _publisher(config, learner, log.folder / "weights", caller, log, servers)

    def publish(step: int, announce: Announce) -> Ticket:
        ticket = publisher.publish(published(), step, log.lineage, announce)
        # A group's meeting address is its members' matter: servers have a secret in it.
        kept = msgspec.structs.replace(ticket, location="") if ticket.bridge == "broadcast" else ticket
        log.published(kept, **publication_fields(ticket))
        log.note(update_metrics(ticket))
        return ticket

    def hold(step: int | None) -> None:
        log.held_version = step
        publisher.hold(step)

    waits = waits_of(config)
    engine = Orchestrator(caller, publish=publish, saved_step=saved_step, waits=waits, hooks=hooks, hold=hold)
    return engine, publisher


class RunHooks(TrainerHooks):
    """Writes events and samples, and has engine and trainer take turns on a shared GPU."""

    def __init__(
        self,
        config: PlannedConfig,
        log: RunLog,
        progress: Progress,
        caller: Caller,
        *,
        waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        planned_bytes: int = 0,
    ) -> None:
        """`waiting`: entered while the first update waits for the engine. `planned_bytes`: the plan's memory of an
        engine on each of its GPUs."""
        self._config, self._log, self._progress, self._caller = config, log, progress, caller
        self._waiting, self._planned_bytes = waiting, planned_bytes

    @contextlib.contextmanager
    def waiting_for_engine(self) -> Generator[None]:
        """The wait is a stage of its own, except under the restart bridge: this starts the engine in the update."""
        if self._config.weights.bridge == "restart":
            yield
            return
        with self._waiting():
            yield
        self._progress.phase(update_phase(self._config))

    def before_update(self) -> None:
        """Under `inference.sleep`, return the trainer's cached but unused GPU memory, and wake the engine."""
        if self._config.inference.sleep:
            import torch

            with self._log.phase("wake"):
                torch.cuda.empty_cache()
                self._take_turns("wake", commands.Wake(self._config.weights.apply_timeout_s))

    def repeats_update(self, error: SlipstreamError) -> bool:
        """Whether to publish a version once more after its update failed with `error`: if one engine of several, of
        one or several orchestrators, died in a broadcast. The remaining engines cannot finish it. The whole version
        then goes over a new process group."""
        servers = self._config.inference.servers
        if self._config.weights.bridge != "broadcast" or (num_engines(self._config) == 1 and not servers):
            return False
        has_died = not self._caller.engine_state(settles=True).is_up
        if has_died:
            self._log.event("update_repeated", reason=str(error))
        return has_died

    def wants_weights(self) -> bool:
        """Asks only if there are servers."""
        if not self._config.inference.servers:
            return False
        wants = self._caller.engine_state(settles=False).wants_weights
        if wants:
            self._log.event("update_repeated", reason="a server is back without weights")
        return wants

    def version_applied(self, report: ApplyReport, metrics: Mapping[str, float]) -> None:
        """Write an event, and numbers of the update and the engine into the step's row."""
        self._log.event(
            "apply",
            version=report.version.name,
            digest=report.version.digest,
            transfer_s=report.transfer_s,
            verify_s=report.verify_s,
            num_bytes=report.num_bytes,
            stall_s=report.stall_s,
            memory_bytes=report.memory_bytes,
        )
        if report.stall_s:
            self._log.note({"update/stall_s": report.stall_s})
        if report.memory_bytes:
            took = report.memory_bytes / self._config.inference.tensor_parallel_size
            self._log.note({"memory/engine_gib": took / GIB, "memory/engine_planned_gib": self._planned_bytes / GIB})
        self._log.note(metrics)

    def version_evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Keep the answers to the first held-out tasks: the same ones in every evaluation."""
        for rollout in evaluation.rollouts[: self._config.run.save_samples]:
            self._log.sample(sample_of(rollout, step, f"{self._log.lineage}.{step}", split="eval"))

    def version_released(self, step: int) -> None:
        """Under SFT an engine only for evaluation sleeps until the next version."""
        if not generates_for(self._config, step):
            self.batch_taken()

    def rolled_out(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Keep the first rollouts of a step of SFT."""
        for rollout in rollouts[: self._config.run.save_samples]:
            self._log.sample(sample_of(rollout, step, f"{self._log.lineage}.{step}"))

    def batch_taken(self) -> None:
        """Under `inference.sleep`, the engine frees its GPU memory while the trainer works."""
        if self._config.inference.sleep:
            with self._log.phase("sleep"):
                self._take_turns("sleep", commands.Sleep(self._config.weights.apply_timeout_s))

    def _take_turns(self, name: str, command: commands.Sleep | commands.Wake) -> None:
        self._caller.call(command, commands.Done, command.timeout_s + _GRACE_S, f"the engine to {name}")


def _publisher(
    config: PlannedConfig,
    learner: Learner,
    folder: Path,
    caller: Caller,
    log: EventLog,
    servers: Sequence[ServerFacts],
) -> tuple[Publisher, Callable[[], NamedWeights]]:
    """Create the trainer's half of the bridge from the model of `learner`; also returns the weights to publish: the
    adapter's or the whole model's. `folder` is for bridges with files."""
    name, timeout_s = config.weights.bridge, apply_timeout_s(config)
    model = learner.model
    if publishes_adapter(config):
        assert model.adapter is not None
        base = learner.base_weights()
        return AdapterPublisher(folder, model.adapter.config, base), learner.adapter_weights
    assert name != "lora"

    def held() -> Version | None:
        # A dead engine is restarted first.
        longest_s = timeout_s + config.inference.start_timeout_s
        return caller.call(
            commands.AskHeld(), commands.Held, longest_s, "the engine to say which version it holds"
        ).version

    def joined() -> int:
        start_s = config.inference.start_timeout_s + (START_GRACE_S if servers else 0.0)  # they name themselves
        return caller.call(commands.AskJoined(), commands.Joined, start_s, "dead engines to start again").count

    def leave() -> None:
        waits_for, command = "the engines to leave the weight group", commands.Leave(_LEAVE_S)
        problem = ""
        try:
            caller.call(command, commands.Done, _LEAVE_S, waits_for, may_stop=False)
        except (SlipstreamError, CancelledError, RuntimeError) as error:  # they may have ended with the run
            problem = one_line(error)
        log.event("weight_group_left", problem=problem)

    def go_on(version: Version) -> None:
        command = commands.GoOn(version, timeout_s)
        caller.call(command, commands.Done, timeout_s, f"the engine to go on with version {version.name}")

    on_gpu = model.device.type == "cuda"
    if servers:
        on_gpu = on_gpu and all(server.on_gpu for server in servers) and _are_others(servers)
    publisher = create_publisher(
        name,
        folder=folder,
        source=model.folder,
        timeout_s=timeout_s,
        num_workers=sum(server.world_size for server in servers) or engine_workers(config),
        has_nodes=config.cluster.nodes > 1,
        between_gpus=on_gpu and config.run.placement == "separate",
        meet_at=own_host_of(addresses_of(config.inference.servers)) if servers else "",
        peers=tuple(filter(None, (urlsplit(server.url).hostname for server in config.inference.servers))),
        held=held if keeps_copy(config) else None,
        joined=joined,
        leave=leave,
        go_on=go_on,
    )
    return publisher, learner.named_weights


def _are_others(servers: Sequence[ServerFacts]) -> bool:
    """Whether no server is on the trainer's GPU: NCCL would refuse two ranks there."""
    import torch

    own = str(torch.cuda.get_device_properties(0).uuid)
    return own not in {gpu.removeprefix("GPU-") for server in servers for gpu in server.gpus}


def update_metrics(ticket: Ticket) -> dict[str, float]:
    """Metrics for the step's row: bytes sent and, if versions are compared, the fraction of changed elements."""
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
