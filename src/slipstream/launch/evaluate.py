"""Held-out accuracy of a model folder: an engine, an environment, no trainer."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from slipstream.envs.scorer import ScorerPool
from slipstream.errors import ConfigError, Interrupted
from slipstream.launch.engines import create_engine, engine_settings
from slipstream.launch.local import Progress
from slipstream.launch.prepare import Prepared
from slipstream.launch.stop import StopRequest
from slipstream.orchestrator.evaluate import Evaluation, evaluate
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import Version

_POLL_S = 0.2


def evaluate_model(prepared: Prepared, progress: Progress) -> Evaluation:
    """Start an engine on the run file's model, verify what it loaded, grade the held-out tasks, stop it."""
    if prepared.environment is None or prepared.config.evaluation is None:
        raise ConfigError(
            "an evaluation needs [environment] and must not be turned off: see evaluation in the run file"
        )
    with StopRequest() as stop, tempfile.TemporaryDirectory(prefix="slipstream-eval-") as logs:
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
    import torch

    from slipstream.trainer.model import resolve_folder
    from slipstream.weights.files import read_model_folder
    from slipstream.weights.fingerprint import describe, digest

    config, evaluation, section = prepared.config, prepared.config.evaluation, prepared.config.environment
    assert prepared.environment is not None
    assert evaluation is not None
    assert evaluation.temperature != "auto"
    assert section is not None
    folder = resolve_folder(config.model.path)
    dtype = getattr(torch, config.model.dtype)
    parameters = describe((name, tensor.to(dtype)) for name, tensor in read_model_folder(folder))
    settings = engine_settings(
        config,
        str(folder),
        on_cpu=not torch.cuda.is_available(),
        version=Version(0, 0, digest(parameters)),
        parameters=parameters,
    )
    engine = create_engine(
        config, settings, logs, lambda kind, **fields: progress.message(f"{kind}: {fields}", "warning")
    )
    progress.phase("start the engine")
    try:
        engine.launch()
        await engine.wait_ready()
        async with ScorerPool(section, timeout_s=section.reward_timeout_s) as scorer:
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
            )
    finally:
        await engine.stop()
