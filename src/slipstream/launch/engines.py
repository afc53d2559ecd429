"""From a planned config to a supervised engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.config import RunConfig
from slipstream.config.traits import engine_workers, num_replicas, publishes_adapter
from slipstream.inference.client import SILENCE_S
from slipstream.inference.engine import OnEvent, RunEngine, SupervisedEngine
from slipstream.inference.preimport import EngineAhead
from slipstream.inference.replicas import EngineReplicas
from slipstream.inference.settings import EngineSettings
from slipstream.launch.plan.memory.gpu_shares import place
from slipstream.records import ParameterSpec, Ticket, Version

_GRACE_S = 5.0
EngineMaker = Callable[[RunConfig, EngineSettings, Path, OnEvent], RunEngine]
"""Makes the engine of a run, not started yet, as `create_engine` does; the path is the folder of its logs."""


def engine_settings(
    config: RunConfig,
    model: str,
    *,
    on_cpu: bool,
    version: Version | None = None,
    parameters: tuple[ParameterSpec, ...] = (),
    adapter: Ticket | None = None,
) -> EngineSettings:
    """How to start the engine on the folder `model`; the config's `auto`s have been replaced by the plan."""
    inference = config.inference
    assert isinstance(inference.max_model_len, int)
    assert isinstance(inference.max_num_seqs, int)
    assert isinstance(inference.enforce_eager, bool)
    assert isinstance(inference.kv_cache_gib, float | int)
    assert isinstance(inference.gpu_memory_utilization, float | int)
    assert isinstance(config.run.threads, int)
    lora = config.lora if publishes_adapter(config) else None
    return EngineSettings(
        model=model,
        socket="",
        dtype=config.model.dtype,
        max_model_len=inference.max_model_len,
        max_num_seqs=inference.max_num_seqs,
        seed=config.run.seed,
        enforce_eager=inference.enforce_eager,
        kv_cache_bytes=int(inference.kv_cache_gib * 2**30),
        gpu_memory_utilization=inference.gpu_memory_utilization,
        gpus=() if on_cpu else engine_gpus(config, os.environ.get("CUDA_VISIBLE_DEVICES")),
        in_flight=config.weights.in_flight,
        can_sleep=inference.sleep is True,
        fp32_head=config.model.fp32_head,
        trust_remote_code=config.model.trust_remote_code,
        tensor_parallel_size=inference.tensor_parallel_size,
        threads=max(1, config.run.threads // engine_workers(config)) if on_cpu else None,
        version=version,
        parameters=parameters,
        lora_rank=lora.rank if lora else None,
        lora_target_modules=tuple(name.rpartition(".")[2] for name in lora.target_modules) if lora else (),
        adapter=adapter,
        patches=inference.patches,
        options=inference.options,
    )


def engine_gpus(config: RunConfig, visible: str | None, replica: int = 0) -> tuple[str, ...]:
    """The GPUs that an engine may see, as `visible`, CUDA_VISIBLE_DEVICES, names them; none: all, where the only engine
    shares the trainer's."""
    size, separate = config.inference.tensor_parallel_size, config.run.placement == "separate"
    if not separate and num_replicas(config) == 1:
        return ()
    ranks, replicas = config.training.ranks, num_replicas(config)
    cards = place(ranks=ranks, replicas=replicas, tensor_parallel_size=size, separate=separate).engines[replica]
    named = [name.strip() for name in visible.split(",")] if visible else None
    return tuple(named[card] if named else str(card) for card in cards)


def create_engine(
    config: RunConfig,
    settings: EngineSettings,
    log_folder: Path,
    on_event: OnEvent,
    *,
    ahead: EngineAhead | None = None,
) -> SupervisedEngine | EngineReplicas:
    """The engine, not started yet; its output goes to `engine.log` in `log_folder`. Of several each has its own, and
    `engine-<number>.log`. `ahead` may become its process, or that of the first."""

    def create(
        settings: EngineSettings, log: str, on_event: OnEvent, ahead: EngineAhead | None = None
    ) -> SupervisedEngine:
        return SupervisedEngine(
            settings,
            log_folder / log,
            start_timeout_s=float(config.inference.start_timeout_s),
            max_restarts=config.inference.max_restarts,
            on_event=on_event,
            silence_s=min(SILENCE_S, float(config.inference.request_timeout_s) + _GRACE_S),
            ahead=ahead,
        )

    if num_replicas(config) == 1:
        return create(settings, "engine.log", on_event, ahead)
    engines: list[SupervisedEngine] = []
    for number in range(num_replicas(config)):
        own = msgspec.structs.replace(
            settings,
            gpus=engine_gpus(config, os.environ.get("CUDA_VISIBLE_DEVICES"), number)
            if settings.threads is None
            else (),
            first_rank=settings.first_rank + number * settings.tensor_parallel_size,
        )
        first = ahead if number == 0 else None
        engines.append(create(own, f"engine-{number}.log", functools.partial(on_event, replica=number), first))
    num_sequences = config.training.prompts_per_batch * getattr(config.algorithm, "group_size", 1)
    fair = min(settings.max_num_seqs, -(-num_sequences // len(engines)))
    return EngineReplicas(engines, num_places=fair, on_event=on_event)
