"""From a planned config to a supervised engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slipstream import weights
from slipstream.config import RunConfig
from slipstream.config.checks import engine_workers, publishes_adapter
from slipstream.inference.engine import OnEvent, SupervisedEngine
from slipstream.inference.settings import EngineSettings
from slipstream.orchestrator import rollouts
from slipstream.records import EngineHealth, ParameterSpec, Ticket, Version
from slipstream.weights.single_copy import SharedWeights


class RunEngine(rollouts.Engine, weights.Engine, Protocol):
    """An engine as a run owns it: started beside other work, stopped in any case."""

    @property
    def socket(self) -> str:
        """The Unix socket that it answers on, for as long as the run lives; empty where there is none."""
        ...

    def launch(self) -> None:
        """Begin to start."""
        ...

    async def wait_ready(self) -> EngineHealth:
        """Wait until it is in service, with a deadline, and what it says of itself."""
        ...

    async def share(self, parameters: tuple[ParameterSpec, ...], timeout_s: float) -> SharedWeights:
        """Where its live weights lie, for a trainer that trains them."""
        ...

    async def sleep(self, timeout_s: float) -> None:
        """Free its memory until `wake`."""
        ...

    async def wake(self, timeout_s: float) -> None:
        """Take it back."""
        ...

    async def stop(self) -> None:
        """Stop for good."""
        ...

    def kill(self) -> None:
        """The same at once, from any thread and without an event loop."""
        ...


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
        threads=config.run.threads if on_cpu else None,
        version=version,
        parameters=parameters,
        lora_rank=lora.rank if lora else None,
        lora_target_modules=tuple(name.rpartition(".")[2] for name in lora.target_modules) if lora else (),
        adapter=adapter,
        options=inference.options,
    )


def engine_gpus(config: RunConfig, visible: str | None) -> tuple[str, ...]:
    """The engine's GPUs when they are not the trainer's, which has the first; `visible` is CUDA_VISIBLE_DEVICES."""
    if config.run.placement != "separate":
        return ()
    number = engine_workers(config)
    named = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(number + 1)]
    return tuple(named[1 : number + 1])


def create_engine(config: RunConfig, settings: EngineSettings, log_folder: Path, on_event: OnEvent) -> SupervisedEngine:
    """The engine, not started yet; its output goes to `engine.log` in `log_folder`."""
    return SupervisedEngine(
        settings,
        log_folder / "engine.log",
        start_timeout_s=config.inference.start_timeout_s,
        max_restarts=config.inference.max_restarts,
        on_event=on_event,
    )
