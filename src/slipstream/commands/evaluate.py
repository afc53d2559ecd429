"""Evaluates a model on held-out tasks, or samples groups of training tasks: an engine and an environment, without a
trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from slipstream.config import PlannedConfig
from slipstream.config.environment import EnvironmentConfig
from slipstream.config.traits import publishes_adapter
from slipstream.envs.lifetime import in_use
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, Interrupted
from slipstream.launch.build import load_model, with_adapter
from slipstream.launch.engines import EnginePlace, EnginePlan, create_engine, engine_plan
from slipstream.launch.prepare import Prepared
from slipstream.names import model_name
from slipstream.orchestrator.concurrency import all_of
from slipstream.orchestrator.deadlines import retries_of
from slipstream.orchestrator.evaluate import Evaluation, evaluate
from slipstream.orchestrator.failure_rate import check_failures
from slipstream.orchestrator.gateway import gateway_of
from slipstream.orchestrator.method import method_of, with_figures
from slipstream.orchestrator.rollouts import RolloutRunner, seed_of
from slipstream.plan.measure import adapter_config
from slipstream.processes.signals import StopRequest
from slipstream.processes.temporary import temporary
from slipstream.progress import Progress
from slipstream.records import Rollout, Task, Version

if TYPE_CHECKING:
    from slipstream.weights.adapter_folder import AdapterConfig

_POLL_S = 0.2
T = TypeVar("T")


def evaluated_by(environment: EnvironmentConfig | None, evaluation: T | None) -> tuple[EnvironmentConfig, T]:
    """The sections [environment] and [evaluation] of a run. Raises ConfigError without one of them."""
    if environment is None or evaluation is None:
        raise ConfigError(
            "an evaluation needs [environment] and must not be turned off: see evaluation in the run file"
        )
    return environment, evaluation


def evaluate_model(prepared: Prepared, progress: Progress) -> Evaluation:
    """Start an engine on the run file's model, verify its weights, evaluate the held-out tasks, and stop it."""
    section, evaluation = evaluated_by(prepared.config.environment, prepared.config.evaluation)

    async def work(runner: RolloutRunner) -> Evaluation:
        progress.phase("evaluate", len(prepared.eval_tasks) * evaluation.samples_per_task)
        found = await evaluate(
            runner,
            prepared.eval_tasks,
            sampling=prepared.sampling(evaluation.temperature),
            threshold=evaluation.threshold,
            seed=evaluation.seed,
            max_failures=section.max_reward_failures,
            graded_text=section.graded_text,
            samples_per_task=evaluation.samples_per_task,
            on_rollout=progress.advance,
            warn=lambda text: progress.message(text, "warning"),
        )
        assert prepared.environment is not None
        method = method_of(prepared.config)
        return with_figures(found, prepared.eval_tasks, prepared.environment, method, prepared.tokenizer)

    return _with_engine(prepared, progress, "evaluate", work)


def sample_groups(prepared: Prepared, progress: Progress, num_tasks: int, group_size: int) -> list[Rollout]:
    """Start an engine on the run file's model, verify its weights, sample a group of `group_size` rollouts for each of
    the first `num_tasks` training tasks as training does, and stop it. Raises `EnvironmentFault` or `EngineError` when
    more of them fail than a run allows."""
    section, tasks = prepared.config.environment, prepared.train_tasks[:num_tasks]
    if section is None or not prepared.uses_engine:
        raise ConfigError(
            "the model is tried with the run's own engine, which SFT without [evaluation] does not plan: use the run "
            "file of the RL run"
        )
    if not tasks:
        raise ConfigError(
            "the model is tried on training tasks, and this run trains on the file of [data]: use the run file of the "
            "RL run, or --no-data"
        )
    seed, sampling = prepared.config.run.seed, prepared.sampling()

    async def work(runner: RolloutRunner) -> list[Rollout]:
        progress.phase("generate", len(tasks) * group_size)

        async def attempt(group: int, task: Task, number: int) -> Rollout:
            name = f"try.{group}"
            rollout = await runner.run(
                task,
                rollout_id=f"{name}.{number}",
                group_id=name,
                sampling=sampling,
                seed=seed_of(seed, "try", group, number),
            )
            progress.advance()
            return rollout

        rollouts = await all_of(
            attempt(group, task, number)
            for group, task in enumerate(tasks)
            for number in range(runner.group_size(task, group_size))
        )
        check_failures(rollouts, "the trial", section.max_reward_failures)
        return rollouts

    return _with_engine(prepared, progress, "sample", work)


def _with_engine(
    prepared: Prepared, progress: Progress, purpose: str, work: Callable[[RolloutRunner], Awaitable[T]]
) -> T:
    """What `work` makes of rollouts by an engine on the run file's model, which is started for it. Raises `Interrupted`
    when it is stopped."""
    with StopRequest() as stop, temporary("eval") as logs:
        progress.start(f"{purpose} {model_name(prepared.config.model.path)}", 0)
        try:
            return asyncio.run(until_stopped(_on_engine(prepared, progress, Path(logs), work), stop, purpose))
        finally:
            progress.stop()


async def until_stopped(work: Coroutine[Any, Any, T], stop: StopRequest, purpose: str) -> T:
    """What `work` returns. Raises `Interrupted`, once its cancelling is done, when a stop is asked for."""
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.wait([task], timeout=_POLL_S)
        if stop():
            task.cancel()
            await asyncio.wait([task])
            raise Interrupted(f"the command was stopped before it could {purpose} the model: run it again")
    return task.result()


async def _on_engine(
    prepared: Prepared, progress: Progress, logs: Path, work: Callable[[RolloutRunner], Awaitable[T]]
) -> T:
    config, section = prepared.config, prepared.config.environment
    assert prepared.environment is not None
    assert section is not None
    engine = create_engine(
        _run_plan(config, logs),
        logs,
        lambda kind, **fields: progress.message(f"{kind}: {fields}", "warning"),
    )
    progress.message("starting vLLM")
    progress.phase("start vLLM")
    try:
        engine.launch()
        await engine.wait_ready()

        def warn(text: str) -> None:
            progress.message(text, "warning")

        async with ScorerPool(section, warn=warn) as scorer, in_use(prepared.environment, section.run_timeout_s, warn):
            gateway = gateway_of(config, prepared.images_of_agents)
            runner = RolloutRunner(
                prepared.environment,
                scorer,
                prepared.tokenizer,
                engine,
                request_timeout_s=config.inference.request_timeout_s,
                run_timeout_s=section.run_timeout_s,
                context_length=config.inference.max_model_len,
                retries=retries_of(config),
                warn=warn,
                control_texts=prepared.tokenizer.special_texts,
                gateway=gateway,
            )
            try:
                return await work(runner)
            finally:
                if gateway is not None:
                    await gateway.close()
    finally:
        await engine.stop()


def _run_plan(config: PlannedConfig, scratch: Path) -> EnginePlan:
    """An engine on the run's model, and on the adapter that `lora.path` names, if it does; both to be verified."""
    import torch

    from slipstream.trainer.model.loading import resolve_folder
    from slipstream.weights.model_files import write_model_folder

    lora, folder = config.lora, resolve_folder(config.model.path)
    plan = engine_plan(config, str(folder), on_cpu=not torch.cuda.is_available())
    if config.cluster.nodes > 1:  # no agent joins a command: one engine, on this host
        plan = replace(plan, places=(EnginePlace(gpus=plan.settings.gpus),), is_only=True)
    if lora is None or lora.path is None:
        return verified_plan(plan, scratch)  # a fresh adapter changes nothing
    if not lora.dora and (publishes_adapter(config) or not config.model.train_tower):
        return verified_plan(plan, scratch, Path(lora.path), adapter_config(config))
    write_model_folder(scratch / "merged", with_adapter(config, load_model(config)).named_weights(), folder)
    merged = msgspec.structs.replace(plan.settings, model=str(scratch / "merged"))
    return verified_plan(replace(plan, settings=merged), scratch)


def verified_plan(
    plan: EnginePlan, scratch: Path, adapter: Path | None = None, adapter_config: AdapterConfig | None = None
) -> EnginePlan:
    """`plan` for an engine that verifies what it loads: the model of the plan and the `adapter`, whose config is
    `adapter_config`. What the engine loads beside the model is written to `scratch`."""
    import torch

    from slipstream.weights.adapter_folder import read_adapter_tensors
    from slipstream.weights.bridges.lora import AdapterPublisher
    from slipstream.weights.fingerprint import describe, digest
    from slipstream.weights.model_files import read_model_folder

    settings = plan.settings
    dtype = getattr(torch, settings.dtype)
    weights = ((name, tensor.to(dtype)) for name, tensor in read_model_folder(Path(settings.model)))
    changes: dict[str, Any] = {"lora_rank": None, "lora_target_modules": (), "lora_tower": False}
    if adapter is None or adapter_config is None:
        parameters = describe(weights)
        changes |= {"version": Version(0, 0, digest(parameters)), "parameters": parameters}
    else:
        tensors = [(name, tensor.to(dtype)) for name, tensor in read_adapter_tensors(adapter).items()]
        publisher = AdapterPublisher(scratch / "adapter", adapter_config, weights)
        targets = tuple(name.rpartition(".")[2] for name in adapter_config.target_modules)
        changes = {"lora_rank": adapter_config.rank, "lora_target_modules": targets}
        changes["lora_tower"] = adapter_config.with_tower
        changes["adapter"] = publisher.publish(tensors, 0, 0, lambda ticket: None)
    return replace(plan, settings=msgspec.structs.replace(settings, **changes))
