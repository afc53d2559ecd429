"""Evaluates a model at an OpenAI-compatible address on the held-out tasks of a run file: an environment without an
engine, a trainer or a local model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from slipstream.commands.evaluate import evaluated_by, until_stopped
from slipstream.config import EvaluationConfig, RunConfig
from slipstream.config.addresses import key_variable_problem
from slipstream.config.environment import EnvironmentConfig
from slipstream.config.traits import usual_reward_workers
from slipstream.envs.base import Environment
from slipstream.envs.hosted.apart import placement
from slipstream.envs.lifetime import in_use
from slipstream.envs.registry import load_environment, played
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.single_turn import make_tasks
from slipstream.envs.store.registry import located
from slipstream.errors import ConfigError, DataError
from slipstream.inference.chat_server import ChatServer, MessageTokens
from slipstream.orchestrator.evaluate import Evaluation, evaluate
from slipstream.orchestrator.method import method_of, with_figures
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.plan.machine import usable_cpus
from slipstream.processes.signals import StopRequest
from slipstream.progress import Progress
from slipstream.records import SamplingParams, Task
from slipstream.runlog.redaction import hide_userinfo

DEFAULT_MAX_TOKENS = 2048
REQUEST_TIMEOUT_S = 600.0
"""Deadline of one request with all its tries, if `inference.request_timeout_s` is not set."""


def key_of(variable: str) -> str:
    """The key in an environment variable; empty without a name. Raises `ConfigError` if it is not set."""
    if not variable:
        return ""
    if problem := key_variable_problem("--key-variable", variable):
        raise ConfigError(problem)
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"the environment variable {variable} holds no key: set it, or leave out --key-variable")
    return key


def settled(section: EnvironmentConfig) -> tuple[EnvironmentConfig, Environment]:
    """The section with every `auto` decided as the plan does, and its environment: for commands that plan no run."""
    section = located(section)
    environment = load_environment(section)
    processes, workers = section.processes, section.reward_workers
    decided = {
        "processes": min(1, placement(environment)[0]) if processes == "auto" else processes,
        "reward_workers": usual_reward_workers(usable_cpus()) if workers == "auto" else workers,
    }
    return section.model_copy(update=decided), environment


def evaluate_address(
    config: RunConfig, url: str, progress: Progress, *, model: str = "", key: str = ""
) -> tuple[Evaluation, list[Task], SamplingParams, str]:
    """Evaluate the held-out tasks of `config` at `url`; returns the results, the tasks, how was sampled, and the
    model's name there. `sampling.max_tokens = auto` is 2,048. Lengths are the server's counts.

    Raises `ConfigError` for what cannot be evaluated there, and what `evaluate` raises.
    """
    section, evaluation = evaluated_by(config.environment, config.evaluation)
    section, environment = settled(section)
    if environment.needs_address:
        raise ConfigError(
            "an agent is evaluated with an engine of ours, which gives each episode an address: leave --url out"
        )
    environment = played(environment, section) or environment
    tasks, method = _tasks(environment, evaluation), method_of(config)
    if method is not None:
        tasks = method.tasks(tasks)
    sampling = _sampling(config, evaluation)

    async def work() -> tuple[Evaluation, str]:
        progress.message(f"asking {hide_userinfo(url)}")
        async with ChatServer(url, model, key) as server:
            found = await _evaluate(config, section, evaluation, environment, server, tasks, sampling, progress)
            if server.num_stops_unknown:
                progress.message(
                    f"the server does not say which string of sampling.stop ended {server.num_stops_unknown} "
                    "completions: their rewards did not see it",
                    "warning",
                )
            found = with_figures(found, tasks, environment, method, None)
            return replace(found, mean_length=server.num_tokens / max(1, server.num_counted)), server.model

    with StopRequest() as stop:
        progress.start(f"evaluate {model or hide_userinfo(url)}", 0)
        try:
            found, name = asyncio.run(until_stopped(work(), stop, "evaluate"))
        finally:
            progress.stop()
    return found, tasks, sampling, name


async def _evaluate(
    config: RunConfig,
    section: EnvironmentConfig,
    evaluation: EvaluationConfig,
    environment: Environment,
    server: ChatServer,
    tasks: Sequence[Task],
    sampling: SamplingParams,
    progress: Progress,
) -> Evaluation:
    def warn(text: str) -> None:
        progress.message(text, "warning")

    timeout_s = config.inference.request_timeout_s
    async with ScorerPool(section, warn=warn) as scorer, in_use(environment, section.run_timeout_s, warn):
        runner = RolloutRunner(
            environment,
            scorer,
            MessageTokens(section.system_prompt),
            server,
            request_timeout_s=REQUEST_TIMEOUT_S if timeout_s == "auto" else timeout_s,
            run_timeout_s=section.run_timeout_s,
            warn=warn,
        )
        progress.phase("evaluate", len(tasks) * evaluation.samples_per_task)
        return await evaluate(
            runner,
            tasks,
            sampling=sampling,
            threshold=evaluation.threshold,
            seed=evaluation.seed,
            max_failures=section.max_reward_failures,
            graded_text=section.graded_text,
            samples_per_task=evaluation.samples_per_task,
            on_rollout=progress.advance,
            warn=warn,
        )


def _tasks(environment: Environment, evaluation: EvaluationConfig) -> list[Task]:
    if environment.tools:
        raise ConfigError(
            f"environment {environment.name} has tools, which are called in the format of a model that an engine here "
            "serves: evaluate a model folder, or an environment without tools"
        )
    tasks = make_tasks(environment, "eval", evaluation.num_tasks)
    if not tasks:
        raise DataError(f"{environment.name} gave no held-out tasks: have tasks('eval', n) return some")
    return tasks


def _sampling(config: RunConfig, evaluation: EvaluationConfig) -> SamplingParams:
    given = config.sampling
    temperature = given.temperature if evaluation.temperature == "auto" else evaluation.temperature
    greedy = temperature == 0.0
    return SamplingParams(
        max_tokens=DEFAULT_MAX_TOKENS if given.max_tokens == "auto" else given.max_tokens,
        temperature=temperature,
        top_p=1.0 if greedy else given.top_p,
        top_k=0 if greedy else given.top_k,
        min_p=0.0 if greedy else given.min_p,
        stop=given.stop,
    )
