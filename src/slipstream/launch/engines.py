"""Creates the engine of a planned config: its settings, its GPUs, and its supervised processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config import PlannedConfig, RLConfig
from slipstream.config.addresses import family_of, url_of
from slipstream.config.atropos import atropos_settings
from slipstream.config.bounds import GIB
from slipstream.config.traits import (
    begins_early,
    num_engines,
    num_replicas,
    publishes_adapter,
    reasoning_parser,
    serves_agents,
)
from slipstream.inference.addresses import ControlAddress, addresses_of
from slipstream.inference.client import SILENCE_S
from slipstream.inference.engine import Member, OnEvent, RunEngine, SupervisedEngine
from slipstream.inference.lending import RUNS, ServerFacts, Terms, place_of
from slipstream.inference.preimport import EngineAhead
from slipstream.inference.replicas import EngineReplicas
from slipstream.inference.server_engine import ServerEngine
from slipstream.inference.settings import EngineSettings
from slipstream.plan.memory.gpu_shares import place
from slipstream.plan.nodes import assign, engine_workers_of_a_node, node_name
from slipstream.plan.tool_parser import NONE as NO_PARSER
from slipstream.processes.launchers import LOCAL, Launcher, gpu_name

_SERVER_SILENCE_S = 45.0
"""The loss of a server must be named within a minute."""
_GRACE_S = 5.0


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine runs."""

    node: str = ""
    """Empty: this host."""
    gpus: tuple[str, ...] = ()
    """See `EngineSettings.gpus`."""


@dataclass(frozen=True)
class ServerPlace:
    """An engine server."""

    address: ControlAddress
    world_size: int
    """Its workers."""
    inference: str = ""
    """Its address for foreign clients."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine to start, or several alike, and how they are supervised."""

    settings: EngineSettings
    """Settings of each engine; several differ in GPUs and in the rank in a group with the trainer."""
    start_timeout_s: float
    request_timeout_s: float
    max_restarts: int = 1
    places: tuple[EnginePlace, ...] = (EnginePlace(),)
    """Each engine's."""
    launcher: Launcher = LOCAL
    first_number: int = 0
    """The number of the first of them among the engines of all orchestrators."""
    is_only: bool = True
    """Whether there is no other engine than the first of them."""
    num_sequences: int = 0
    """How many are generated at once at most, by all engines together."""
    apply_timeout_s: float = 300.0
    servers: tuple[ServerPlace, ...] = ()
    """Engine servers; with them no engine is started."""
    inference_ports: tuple[int, ...] = ()
    """Each engine's port for foreign clients, if it has one."""

    def model_urls(self, run_folder: Path) -> list[str]:
        """Addresses of the engines for foreign clients, if the run needs any; at servers those of this run alone."""
        if self.servers and self.settings.inference_host:
            return [f"{server.inference}{RUNS}{place_of(run_id(run_folder))}" for server in self.servers]
        return [url_of(self.settings.inference_host, port) for port in self.inference_ports]


EngineMaker = Callable[[EnginePlan, Path, OnEvent], RunEngine]
"""Makes the engine of a run, not started yet, as `create_engine` does; the path is the folder of its logs."""


def _places_of_probe(config: PlannedConfig) -> int:
    """Sequences of the probe beside a whole batch, if both may be in the engine at once."""
    if not begins_early(config) or not isinstance(config.algorithm, RLConfig):
        return 0
    is_whole = config.inference.max_num_seqs >= config.training.prompts_per_batch * config.algorithm.group_size
    return config.weights.probe_tasks if is_whole else 0


def engine_plan(
    config: PlannedConfig,
    model: str,
    *,
    on_cpu: bool,
    orchestrator: int = 0,
    launcher: Launcher = LOCAL,
    servers: Sequence[ServerFacts] = (),
) -> EnginePlan:
    """The plan of the engines of an orchestrator on the folder `model`; `servers`: those of the plan."""
    inference, visible = config.inference, os.environ.get("CUDA_VISIBLE_DEVICES")
    lora = config.lora if publishes_adapter(config) else None
    first = orchestrator * num_replicas(config)
    replicas = range(first, first + num_replicas(config))
    nodes = assign(config).engines
    places = tuple(
        EnginePlace()
        if servers
        else EnginePlace(node_name(nodes[replica]), () if on_cpu else engine_gpus(config, visible, replica))
        for replica in replicas
    )
    atropos = atropos_settings(config.environment)
    ports = _ports(atropos.host, atropos.model_port, len(places)) if atropos and not servers else ()
    settings = EngineSettings(
        model=model,
        dtype=config.model.dtype,
        max_model_len=inference.max_model_len,
        max_num_seqs=inference.max_num_seqs + _places_of_probe(config),
        seed=config.run.seed,
        enforce_eager=inference.enforce_eager,
        kv_cache_bytes=int(inference.kv_cache_gib * GIB),
        gpu_memory_utilization=inference.gpu_memory_utilization,
        gpus=places[0].gpus,
        first_rank=1 + first * inference.tensor_parallel_size,
        in_flight=config.weights.in_flight,
        can_sleep=inference.sleep,
        fp32_head=config.model.fp32_head,
        fp32_residual=config.model.fp32_residual,
        shared_kernels=config.model.shared_kernels,
        replay_experts=config.model.replay_experts,
        trust_remote_code=config.model.trust_remote_code,
        tensor_parallel_size=inference.tensor_parallel_size,
        threads=max(1, config.run.threads // engine_workers_of_a_node(config)) if on_cpu else None,
        lora_rank=lora.rank if lora else None,
        lora_target_modules=tuple(name.rpartition(".")[2] for name in lora.target_modules) if lora else (),
        lora_tower=config.model.train_tower and lora is not None,
        patches=inference.patches,
        tool_parser="" if inference.tool_parser == NO_PARSER else inference.tool_parser,
        inference_host=atropos.host if atropos else "",
        inference_port=ports[0] if ports else 0,
        inference_key_variable=atropos.token_variable if atropos else "",
        options=inference.options,
        inference_socket=serves_agents(config),
        reasoning_parser=reasoning_parser(config),
    )
    return EnginePlan(
        settings,
        start_timeout_s=inference.start_timeout_s,
        request_timeout_s=inference.request_timeout_s,
        max_restarts=inference.max_restarts,
        places=places,
        launcher=launcher,
        first_number=first,
        is_only=num_engines(config) == 1,
        apply_timeout_s=config.weights.apply_timeout_s,
        servers=tuple(
            ServerPlace(address, facts.world_size, facts.inference)
            for address, facts in zip(addresses_of(config.inference.servers), servers, strict=True)
        )
        if servers
        else (),
        num_sequences=config.training.prompts_per_batch * getattr(config.algorithm, "group_size", 1),
        inference_ports=ports,
    )


def _ports(host: str, first: int, number: int) -> tuple[int, ...]:
    """Ports of `number` engines: from `first` on, or free ones. An engine that starts again has the same."""
    if first:
        return tuple(range(first, first + number))
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server((host, 0), family=family_of(host))) for _ in range(number)]
        return tuple(each.getsockname()[1] for each in found)


def engine_gpus(config: PlannedConfig, visible: str | None, replica: int = 0) -> tuple[str, ...]:
    """Return the GPUs of one replica, see `Resources.gpus`; empty for all of them, where the only engine shares the
    trainer's. `visible`: CUDA_VISIBLE_DEVICES of this host."""
    size, separate = config.inference.tensor_parallel_size, config.run.placement == "separate"
    ranks, replicas = config.training.ranks, num_engines(config)
    if not separate and replicas == 1:
        return ()
    per_node = config.cluster.gpus_per_node if config.cluster.nodes > 1 else 0
    placement = place(
        ranks=ranks, replicas=replicas, tensor_parallel_size=size, separate=separate, gpus_per_node=per_node
    )
    gpus = placement.engines[replica]
    if per_node and gpus[0] >= per_node:
        return tuple(str(gpu % per_node) for gpu in gpus)
    return tuple(gpu_name(gpu, visible) for gpu in gpus)


def create_engine(
    plan: EnginePlan, log_folder: Path, on_event: OnEvent, *, ahead: EngineAhead | None = None
) -> SupervisedEngine | EngineReplicas:
    """Create the engine without starting it; its output goes to `engine.log` in `log_folder`, that of several replicas
    to `engine-<number>.log`. One of several orchestrators has replicas also where it has one engine. `ahead`: a process
    that has imported vLLM already, which may become the first engine's."""

    def create(
        settings: EngineSettings, log: str, on_event: OnEvent, node: str, ahead: EngineAhead | None = None
    ) -> SupervisedEngine:
        return SupervisedEngine(
            settings,
            log_folder / log,
            start_timeout_s=plan.start_timeout_s,
            max_restarts=plan.max_restarts,
            on_event=on_event,
            silence_s=min(SILENCE_S, plan.request_timeout_s + _GRACE_S),
            ahead=None if node else ahead,
            launcher=plan.launcher,
            node=node,
        )

    settings = plan.settings
    if plan.servers:
        return _create_servers(plan, log_folder, on_event)
    if plan.is_only and len(plan.places) == 1:
        return create(settings, "engine.log", on_event, plan.places[0].node, ahead)
    engines: list[Member] = []
    for number, own_place in enumerate(plan.places):
        first_rank = settings.first_rank + number * settings.tensor_parallel_size
        own_number = plan.first_number + number
        own = msgspec.structs.replace(settings, gpus=own_place.gpus, first_rank=first_rank)
        if plan.inference_ports:
            own = msgspec.structs.replace(own, inference_port=plan.inference_ports[number])
        first = ahead if number == 0 else None
        on_own = functools.partial(on_event, replica=own_number)
        engines.append(create(own, f"engine-{own_number}.log", on_own, own_place.node, first))

    def on_replica_event(kind: str, *, replica: int, **fields: Any) -> None:
        on_event(kind, replica=plan.first_number + replica, **fields)

    per_engine = min(settings.max_num_seqs, -(-plan.num_sequences // len(engines)))
    return EngineReplicas(engines, num_places=per_engine, on_event=on_replica_event)


def _create_servers(plan: EnginePlan, log_folder: Path, on_event: OnEvent) -> EngineReplicas:
    """Engine servers for the run of this folder. Its next attempt gets them again."""
    folder = log_folder.parent
    engines: list[Member] = []
    first_rank, attempt = 1, secrets.token_hex(4)
    for number, server in enumerate(plan.servers):
        settings = plan.settings
        parsers = (settings.tool_parser, settings.reasoning_parser)
        terms = Terms(folder.resolve().name, run_id(folder), first_rank, settings.in_flight, *parsers, attempt)
        engines.append(
            ServerEngine(
                server.address,
                terms,
                world_size=server.world_size,
                start_timeout_s=plan.start_timeout_s,
                apply_timeout_s=plan.apply_timeout_s,
                max_restarts=plan.max_restarts,
                on_event=functools.partial(on_event, replica=number),
                silence_s=min(_SERVER_SILENCE_S, plan.request_timeout_s + _GRACE_S),
            )
        )
        first_rank += server.world_size
    per_engine = min(plan.settings.max_num_seqs, -(-plan.num_sequences // len(engines)))
    by_others = bool(plan.settings.inference_host)
    return EngineReplicas(engines, num_places=per_engine, on_event=on_event, asked_by_others=by_others)


def run_id(folder: Path) -> str:
    """The id of the run in this folder, the same in all its attempts."""
    return hashlib.sha256(f"{socket.gethostname()}:{folder.resolve()}".encode()).hexdigest()[:32]
