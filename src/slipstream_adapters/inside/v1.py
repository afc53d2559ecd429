"""Tasksets, harnesses and judges of `verifiers.v1` (0.4).

`environment.settings` are verifiers' own `[env]` block without `taskset.id`, and `eval_taskset`, which is laid over
`taskset` for the held-out tasks. Episodes are `Env.run_episode`: harnesses talk to verifiers' interception server on
this machine, and its client, which is ours, gives the policy's turns. One agent is trained; others need a model of
their own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.envs.hosted.inside.host import ContextFull, Refused, RewardRaised, Turns
else:
    from slipstream_environment_process.host import ContextFull, Refused, RewardRaised, Turns

from .openai_format import MODEL, completion, max_tokens_of, module_id, unsupported

_NOWHERE = "http://127.0.0.1:9/v1"
"""The address of the policy in verifiers' configuration; nothing is sent there."""
STOPS = {
    "max_turns": "turn_limit",
    "max_input_tokens": "length",
    "max_output_tokens": "length",
    "max_total_tokens": "length",
}


def load(setup: dict[str, Any]) -> V1 | None:
    """The environment; None if the module exports no taskset, or if `verifiers` is too old."""
    try:
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        importlib.import_module("verifiers.v1.envs.single_agent")
    except ImportError:
        return None
    name = module_id(setup)
    try:
        loaders.taskset_class(name)
    except (ModuleNotFoundError, AttributeError, TypeError):
        return None
    return V1(loaders, name, setup["settings"], setup["max_turns"])


class V1:
    """An environment of `verifiers.v1`, as a `Hosted`."""

    def __init__(self, loaders: Any, name: str, settings: dict[str, Any], max_turns: int | None) -> None:
        settings = dict(settings)
        held_out = settings.pop("eval_taskset", None)
        if settings.get("taskset", {}).get("id", name) != name:
            raise Refused("environment.settings.taskset.id is not set here: it is in environment.name")
        taskset = {**settings.get("taskset", {}), "id": name}
        self._environment = loaders.load_environment(_config(loaders, {**settings, "taskset": taskset}, max_turns))
        self._sets: dict[str, Any] = {"train": self._environment.taskset}
        if held_out is not None:
            config = loaders.taskset_config_type(name).model_validate({**taskset, **held_out})
            self._sets["eval"] = loaders.load_taskset(config)
        self._read: dict[str, tuple[Any, int]] = {}
        self._traces: dict[str, tuple[Any, Turns]] = {}
        _lead_to_policy(self._traces)

    def facts(self) -> dict[str, Any]:
        """See `Hosted`."""
        turns = [agent.max_turns or 0 for agent in _agents(self._environment.config).values()]
        return {"max_turns": max(turns) if all(turns) else 0, "splits": list(self._sets), "num_rows": {}}

    def rows(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """See `Hosted`. A taskset is read once, in order, as it may be endless."""
        tasks, place = self._read.get(split, (None, -1))
        if place != start:
            tasks, place = iter(self._sets[split]), 0
            for _ in zip(range(start), tasks, strict=False):
                place += 1
        found = [_row(task) for _, task in zip(range(count), tasks, strict=False)]
        self._read[split] = (tasks, place + len(found))
        return found

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """See `Hosted`: tool servers that tasks share, and the interception server."""
        return self._environment.serving()

    async def play(self, task: Any, turns: Turns) -> dict[str, Any]:
        """See `Hosted`."""
        kind = type(self._environment.taskset).task_type()
        data = kind.data_type().model_validate(task)
        mine: list[str] = []

        def minted(trace: Any) -> None:
            mine.append(trace.id)
            self._traces[trace.id] = (trace, turns)

        try:
            rebuilt = kind(data, self._environment.config.taskset.task)
            episode = await self._environment.run_episode(rebuilt, _context(), on_trace=minted)
        finally:
            for name in mine:
                self._traces.pop(name, None)
        return _graded(episode, turns)


def _config(loaders: Any, block: dict[str, Any], max_turns: int | None) -> Any:
    config = loaders.resolve_env_config(block)
    if config.retries.max_retries or any(rule.max_retries for rule in config.retries.rules):
        raise Refused(f"environment.settings.retries would train on turns that are thrown away: leave it out{_WHY}")
    update: dict[str, Any] = {}
    for name, agent in _agents(config).items():
        path = f"environment.settings.{name}"
        if agent.retries.max_retries or any(rule.max_retries for rule in agent.retries.rules):
            raise Refused(f"{path}.retries would train on turns that are thrown away: leave it out{_WHY}")
        changes: dict[str, Any] = {}
        if "runtime" not in agent.model_fields_set:
            harness = loaders.load_harness(config.agent_harnesses()[name])
            if not harness.EXECUTES_CODE and not harness.NEEDS_CONTAINER:
                changes["runtime"] = importlib.import_module("verifiers.v1.runtimes").SubprocessConfig()
            elif "PRIME_API_KEY" not in os.environ and not (Path.home() / ".prime" / "config.json").exists():
                raise Refused(
                    f"{path}.runtime is verifiers' default, Prime's sandboxes, and there is no PRIME_API_KEY: set "
                    f'{path}.runtime.type, "docker" say ("subprocess" runs what the model asks for on this machine)'
                )
        if max_turns is not None and agent.client is None:
            changes["max_turns"] = max_turns
        if changes:
            update[name] = agent.model_copy(update=changes)
    return config.model_copy(update=update)


_WHY = "; the run itself repeats a lost turn"


def _agents(config: Any) -> dict[str, Any]:
    return importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(config)


def _row(task: Any) -> dict[str, Any]:
    data = task.data
    messages: list[dict[str, str]] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    elif data.prompt is not None:
        messages += [message.model_dump(mode="json", exclude_none=True) for message in data.prompt]
    if not any(message["role"] == "user" for message in messages):  # the environment opens the conversation
        messages.append({"role": "user", "content": data.name or data.id or data.description or f"task {data.idx}"})
    answer = getattr(data, "answer", None)
    return {
        "prompt": messages,
        "answer": answer if isinstance(answer, str) else None,
        "task": data.model_dump(mode="json"),
    }


@functools.cache
def _context() -> Any:
    """What agents without a model of their own talk to."""
    clients: Any = importlib.import_module("verifiers.v1.clients")
    # With this kind of configuration verifiers asks the client for whole responses, also where a harness streams.
    return clients.ModelContext(model=MODEL, client=clients.TrainClientConfig(base_url=_NOWHERE, api_key_var="-"))


def _lead_to_policy(traces: dict[str, tuple[Any, Turns]]) -> None:
    """Has the interception server's client for `_context` be ours."""
    server: Any = importlib.import_module("verifiers.v1.interception.server")
    others = server.resolve_client

    def resolve(config: Any) -> Any:
        return _client_class()(traces) if config.base_url == _NOWHERE else others(config)

    server.resolve_client = resolve


_NO_TURN: dict[str, Any] = {
    "content": "",
    "tool_calls": [],
    "finish_reason": "length",
    "num_prompt_tokens": 0,
    "num_tokens": 0,
    "name": "",
}


@functools.cache
def _client_class() -> Any:
    base: Any = importlib.import_module("verifiers.v1.clients.client").Client
    chat: Any = importlib.import_module("verifiers.v1.dialects").ChatDialect
    refused: Any = importlib.import_module("verifiers.v1.errors").ProviderError

    class PolicyClient(base):
        def __init__(self, traces: dict[str, tuple[Any, Turns]]) -> None:
            self._traces = traces

        async def get_response(
            self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str | None = None, **_: Any
        ) -> Any:
            if not isinstance(dialect, chat):
                raise refused(f"{type(dialect).__name__}: the policy speaks OpenAI's chat completions", status_code=400)
            trace, turns = self._traces[session_id or ""]
            if not trace.agent.trainable:
                name = trace.agent.name
                raise refused(
                    f"agent {name} is not trained and has no model of its own: set environment.settings.{name}.client "
                    "and .model",
                    status_code=400,
                )
            if what := unsupported(body):
                raise refused(f"the harness asks for {what}, which is not supported: leave it out", status_code=400)
            try:
                reply = await turns.chat(body["messages"], body.get("tools"), max_tokens_of(body))
            except ContextFull:
                # A stopped trace refuses this turn and all further ones, and is graded as it stands.
                trace.stop("context_full")
                reply = _NO_TURN
            raw = completion(reply, split_thinking=True)
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    return PolicyClient


def _graded(episode: Any, turns: Turns) -> dict[str, Any]:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    for failed in [each for each in (*episode.traces, episode) if not each.ok and each.errors]:
        _raise(failed.errors)
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained) or "no agent"
        raise Refused(f"the episode trained {names}: exactly one agent's run can be trained on")
    trace = trained[0]
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        which = "".join(f" {name}" for name in unscored)
        raise RewardRaised(f"the episode has no reward{which}, and ended with {trace.stop_condition}")
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    stop = trace.stop_condition or ""
    is_timeout = trace.is_timeout or episode.is_timeout
    return {
        "reward": trace.reward,
        "metrics": {**scores, **metrics},
        "stop": "context_full" if turns.context_full else "timeout" if is_timeout else STOPS.get(stop, "answer"),
    }


def _raise(errors: list[Any]) -> None:
    error = errors[-1]
    text = f"{error.type}: {error.message}\n{error.traceback or ''}"
    if error.type == "TaskError" and "scoring" in error.message:
        raise RewardRaised(text)
    raise RuntimeError(text)
