"""The environment `agent`: an existing program sends its requests to an address of the run instead of to OpenAI.

Settings:
- `command` (a text or a list) or `callable` (`path/to/file.py:function`).
- `tasks` (`path/to/file.py:function`, called with `split, num_tasks, seed`), or the settings of `rows`.
- `reward`: a named one, or a function `reward(task, result)` or `reward(task, result, episode)`.
- `models`: further names for the model in requests. `reasoning_parser`: vLLM's, for thinking outside of the text.

A command is started for each task, below a guard. It gets the task as JSON on standard input, and in the file named by
`SLIPSTREAM_TASK`. The variables of OpenAI's and Anthropic's clients hold address and key. Its result is its last line
of standard output. A callable gets the task and an `Address`, in one of `environment.processes`, and returns the
result.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from inspect import isasyncgenfunction, isawaitable, iscoroutinefunction, isgeneratorfunction, signature
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.config.environment import AGENT, EnvironmentConfig
from slipstream.envs.base import Address, Environment, Episode, Policy, Score, Split, scored
from slipstream.envs.from_python import FunctionEnvironment
from slipstream.envs.hosted.command import run_command
from slipstream.envs.rewards import Options, named
from slipstream.envs.rewards.contract import Plain
from slipstream.envs.rewards.functions import function_in
from slipstream.envs.rows import Rows
from slipstream.errors import ConfigError
from slipstream.records import Message, Task

NAME = AGENT
_OWN = ("command", "callable", "tasks", "models", "reasoning_parser")
_MOST_TURNS = 16
_THREADS = 512
"""Calls of a plain function at once."""


class Agent(Environment):
    """The environment `agent`; see the module. Raises `ConfigError` for invalid settings."""

    needs_address = True
    max_turns = _MOST_TURNS

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config.seed)
        self.name = NAME
        self._variables, self._user_namespace = config.variables, config.user_namespace
        settings = config.settings
        if ("command" in settings) == ("callable" in settings):
            raise ConfigError(
                "environment.settings of an agent need command or callable: give one, such as callable = "
                '"agent.py:solve"'
            )
        self._command = _command_of(settings["command"]) if "command" in settings else []
        self._callable = _place_of(settings["callable"], "callable") if "callable" in settings else None
        self.runs_user_code = self._callable is not None
        self._reward = _episode_reward(settings.get("reward"))
        self._inner = self._tasks_of(config)
        self.scores_groups = self._inner.scores_groups

    def _tasks_of(self, config: EnvironmentConfig) -> Environment:
        """The environment of the tasks; it also grades results."""
        rest = {name: value for name, value in config.settings.items() if name not in _OWN}
        if self._reward is not None:
            rest["reward"] = Plain(lambda task, result: 0.0)  # never called
        if "tasks" not in config.settings:
            return Rows(config.seed, rest, reward_timeout_s=config.reward_timeout_s)
        place = _place_of(config.settings["tasks"], "tasks")
        reward = rest.pop("reward", "exact")
        if rest:
            raise ConfigError(
                f"environment.settings.{min(rest)} has no effect: tasks come from {config.settings['tasks']}: remove it"
            )
        make = function_in(*place, "environment.settings.tasks")
        options = Options(reward_timeout_s=config.reward_timeout_s)
        reward = named(reward, options, "environment.settings.reward")
        return FunctionEnvironment(place[0].stem, make, reward, config.seed, {})

    @property
    def num_train_tasks(self) -> int:
        """See `Environment`."""
        return self._inner.num_train_tasks

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        return self._inner.eval_source

    def held_out(self) -> Sequence[Task]:
        """See `Environment`."""
        return self._inner.held_out()

    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """See `Environment`."""
        return self._inner.tasks(split, num_tasks)

    def gold(self, task: Task) -> str | Sequence[Message] | None:
        """See `Environment`; the right result."""
        return self._inner.gold(task)

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """The reward of a result alone."""
        if self._reward is not None:
            return scored(self._reward(task, completion, Episode(completion)))
        return self._inner.score(task, completion)

    def score_episode(self, task: Task, episode: Episode) -> Score | Awaitable[Score]:
        """The reward of a whole episode."""
        if self._reward is not None:
            return scored(self._reward(task, episode.completion, episode))
        return super().score_episode(task, episode)

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """See `Environment`."""
        return self._inner.score_group(task, episodes)

    async def setup(self) -> None:
        """Loads the function: its imports take seconds, and may fail."""
        if self._callable is not None:
            assert self._function

    async def run(self, task: Task, policy: Policy) -> Episode:
        """An episode of the program; its requests are recorded elsewhere."""
        if policy.address is None:
            raise RuntimeError("an agent needs an engine with an address: play it with slipstream train or eval")
        if self._callable is not None:
            result = await self._called(task, policy.address)
        else:
            result = await self._commanded(task, policy.address)
        return result if isinstance(result, Episode) else Episode(_text_of(result))

    async def _called(self, task: Task, address: Address) -> Any:
        if iscoroutinefunction(self._function):
            return await self._function(task, address)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._function, task, address)
        return await found if isawaitable(found) else found

    async def _commanded(self, task: Task, address: Address) -> str:
        variables = {
            "OPENAI_BASE_URL": address.base_url,
            "OPENAI_API_BASE": address.base_url,
            "OPENAI_API_KEY": address.api_key,
            "OPENAI_MODEL": address.model,
            "ANTHROPIC_BASE_URL": address.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": address.api_key,
            "ANTHROPIC_MODEL": address.model,
        }
        return await run_command(
            self._command,
            json.dumps(msgspec.to_builtins(task)),
            variables,
            names=self._variables,
            user_namespace=self._user_namespace,
            log=self.log_folder and self.log_folder / "agent.log",
        )

    @cached_property
    def _function(self) -> Callable[..., Any]:
        """Loaded only in the process of the episodes."""
        assert self._callable is not None
        found = function_in(*self._callable, "environment.settings.callable")
        if isgeneratorfunction(found) or isasyncgenfunction(found):
            raise ConfigError(
                f"environment.settings.callable {found.__name__} is a generator: return the result instead"
            )
        return found

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="agent")


def files_of_agent(config: EnvironmentConfig) -> list[tuple[str, Path]]:
    """The Python files of an agent, each with its setting."""
    settings, found = config.settings, list[tuple[str, Path]]()
    if "callable" in settings:
        found.append(("environment.settings.callable", _place_of(settings["callable"], "callable")[0]))
    words = _command_of(settings["command"]) if "command" in settings else []
    files = [Path(word) for word in words if word.endswith(".py") and Path(word).is_file()]
    return [*found, *(("environment.settings.command", file) for file in files)]


def _command_of(given: Any) -> list[str]:
    words = shlex.split(given) if isinstance(given, str) else given
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in cast("list[Any]", words)):
        raise ConfigError(
            f'environment.settings.command = {given!r:.60} is no command: give a text, or a list as ["python", '
            '"agent.py"]'
        )
    found = cast("list[str]", words)
    return [sys.executable if found[0] in ("python", "python3") else found[0], *found[1:]]


def _place_of(given: Any, name: str) -> tuple[Path, str]:
    """The file and function of a setting; the file is read, and not run."""
    setting = f"environment.settings.{name}"
    file, _, function = str(given).rpartition(":")
    if not file.endswith(".py"):
        raise ConfigError(f"{setting} = {given!r:.80} is no function: use path/to/file.py:function")
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{setting} = {given!r:.80}: the file cannot be read ({error}): correct it") from error
    if not any(function in _names(node) for node in tree.body):
        raise ConfigError(f"{setting}: {file} has no function {function!r} at its top level: correct the name")
    return Path(os.path.abspath(file)), function


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} | {
        each.asname or each.name for each in ast.walk(node) if isinstance(each, ast.alias)
    }


def _episode_reward(given: Any) -> Callable[..., Any] | None:
    """A reward function with the argument `episode`; None for every other reward."""
    if not isinstance(given, str) or not given.partition(":")[0].endswith(".py"):
        return None
    place = _place_of(given, "reward")
    function = function_in(*place, "environment.settings.reward")
    return function if "episode" in signature(function).parameters else None


def _text_of(result: Any) -> str:
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    if isinstance(result, Mapping | list | int | float | bool):
        return json.dumps(result, ensure_ascii=False)
    return str(result)
