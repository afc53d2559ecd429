"""Held-out accuracy of a model folder: an engine, an environment, no trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.config import PlannedConfig, with_values
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, Interrupted
from slipstream.inference.settings import EngineSettings
from slipstream.launch.build import load_model, with_adapter
from slipstream.launch.engines import create_engine, engine_settings
from slipstream.launch.plan.measure import adapter_config
from slipstream.launch.prepare import Prepared
from slipstream.launch.progress import Progress
from slipstream.launch.signals import StopRequest
from slipstream.orchestrator.evaluate import Evaluation, evaluate
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import Version
from slipstream.runlog.temporary import temporary

_POLL_S = 0.2


def evaluate_model(prepared: Prepared, progress: Progress) -> Evaluation:
    """Start an engine on the run file's model, verify what it loaded, grade the held-out tasks, stop it."""
    if prepared.environment is None or prepared.config.evaluation is None:
        raise ConfigError(
            "an evaluation needs [environment] and must not be turned off: see evaluation in the run file"
        )
    with StopRequest() as stop, temporary("eval") as logs:
        progress.start(f"evaluate {Path(prepared.config.model.path).name}", 1)
        try:
            return asyncio.run(_until_stopped(prepared, progress, Path(logs), stop))
        finally:
            progress.stop()


async def _until_stopped(prepared: Prepared, progress: Progress, logs: Path, stop: StopRequest) -> Evaluation:
    work = asyncio.create_task(_evaluate(prepared, progress, logs))
    while not work.done():
        await asyncio.wait([work], timeout=_POLL_S)
        if stop():
            work.cancel()
            await asyncio.wait([work])
            raise Interrupted("the evaluation was stopped: run it again")
    return work.result()


async def _evaluate(prepared: Prepared, progress: Progress, logs: Path) -> Evaluation:
    config, evaluation, section = prepared.config, prepared.config.evaluation, prepared.config.environment
    assert prepared.environment is not None
    assert evaluation is not None
    assert section is not None
    engine = create_engine(
        config,
        verified_settings(config, logs),
        logs,
        lambda kind, **fields: progress.message(f"{kind}: {fields}", "warning"),
    )
    progress.message("starting vLLM")
    progress.phase("start vLLM")
    try:
        engine.launch()
        await engine.wait_ready()
        async with ScorerPool(section, warn=lambda text: progress.message(text, "warning")) as scorer:
            runner = RolloutRunner(
                prepared.environment,
                scorer,
                prepared.tokenizer,
                engine,
                request_timeout_s=config.inference.request_timeout_s,
                run_timeout_s=section.run_timeout_s,
            )
            progress.phase("evaluate", len(prepared.eval_tasks))
            return await evaluate(
                runner,
                prepared.eval_tasks,
                sampling=prepared.sampling(evaluation.temperature),
                threshold=evaluation.threshold,
                seed=evaluation.seed,
                max_failures=section.max_reward_failures,
                on_rollout=progress.advance,
                warn=lambda text: progress.message(text, "warning"),
            )
    finally:
        await engine.stop()


def verified_settings(config: PlannedConfig, scratch: Path) -> EngineSettings:
    """An engine on the model, and on its adapter if `lora.path` names one; both to be verified. No `auto` is left in
    `config`; what the engine loads beside the model lies in `scratch`."""
    import torch

    from slipstream.trainer.model.policy import resolve_folder
    from slipstream.weights.adapter_folder import read_adapter_tensors
    from slipstream.weights.bridges.lora import AdapterPublisher
    from slipstream.weights.fingerprint import describe, digest
    from slipstream.weights.model_files import read_model_folder, write_model_folder

    folder, lora, on_cpu = resolve_folder(config.model.path), config.lora, not torch.cuda.is_available()
    dtype = getattr(torch, config.model.dtype)
    weights = ((name, tensor.to(dtype)) for name, tensor in read_model_folder(folder))
    if lora is None or lora.path is None:
        # A fresh adapter changes nothing.
        config, parameters = with_values(config, {"weights.bridge": "disk"}), describe(weights)
        version = Version(0, 0, digest(parameters))
        return engine_settings(config, str(folder), on_cpu=on_cpu, version=version, parameters=parameters)
    if lora.dora:
        model = with_adapter(config, load_model(config))
        write_model_folder(scratch / "merged", model.named_weights(), folder)
        merged = {"lora": None, "model": config.model.model_copy(update={"path": str(scratch / "merged")})}
        return verified_settings(config.model_copy(update=merged), scratch)
    adapter = [(name, tensor.to(dtype)) for name, tensor in read_adapter_tensors(Path(lora.path)).items()]
    publisher = AdapterPublisher(scratch / "adapter", adapter_config(config), weights)
    ticket = publisher.publish(adapter, 0, 0, lambda ticket: None)
    config = with_values(config, {"weights.bridge": "lora"})
    return engine_settings(config, str(folder), on_cpu=on_cpu, adapter=ticket)
