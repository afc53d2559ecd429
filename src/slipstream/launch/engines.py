"""From a planned config to a supervised engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slipstream import weights
from slipstream.config import RunConfig
from slipstream.inference.engine import OnEvent, SupervisedEngine
from slipstream.inference.settings import EngineSettings
from slipstream.orchestrator import rollouts
from slipstream.records import EngineHealth, ParameterSpec, Version


class RunEngine(rollouts.Engine, weights.Engine, Protocol):
    """An engine as a run owns it: started beside other work, stopped in any case."""

    def launch(self) -> None:
        """Begin to start."""
        ...

    async def wait_ready(self) -> EngineHealth:
        """Wait until it is in service, with a deadline, and what it says of itself."""
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
) -> EngineSettings:
    """How to start the engine on the folder `model`; the config's `auto`s have been replaced by the plan."""
    inference = config.inference
    assert isinstance(inference.max_model_len, int)
    assert isinstance(inference.max_num_seqs, int)
    assert isinstance(inference.enforce_eager, bool)
    assert isinstance(inference.kv_cache_gib, float | int)
    assert isinstance(config.run.threads, int)
    return EngineSettings(
        model=model,
        socket="",
        dtype=config.model.dtype,
        max_model_len=inference.max_model_len,
        max_num_seqs=inference.max_num_seqs,
        seed=config.run.seed,
        enforce_eager=inference.enforce_eager,
        kv_cache_bytes=int(inference.kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        trust_remote_code=config.model.trust_remote_code,
        threads=config.run.threads if on_cpu else None,
        version=version,
        parameters=parameters,
        options=inference.options,
    )


def create_engine(config: RunConfig, settings: EngineSettings, log_folder: Path, on_event: OnEvent) -> SupervisedEngine:
    """The engine, not started yet; its output goes to `engine.log` in `log_folder`."""
    return SupervisedEngine(
        settings,
        log_folder / "engine.log",
        start_timeout_s=config.inference.start_timeout_s,
        max_restarts=config.inference.max_restarts,
        on_event=on_event,
    )
