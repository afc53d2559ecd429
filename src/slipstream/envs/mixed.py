"""Several environments as one (`environment.mixture`): each task belongs to a part, and the part's environment handles
it."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.mixture import MixturePart
from slipstream.envs.base import Environment, Episode, Limits, Policy, Reply, Score, Split, ToolResult
from slipstream.envs.lifetime import set_up, shut_down
from slipstream.envs.single_turn import make_tasks
from slipstream.errors import SlipstreamError
from slipstream.records import Message, Task, ToolCall

Load = Callable[[EnvironmentConfig], Environment]


def section_of(config: EnvironmentConfig, part: MixturePart) -> EnvironmentConfig:
    """[environment] as it would be for one part of the mixture alone."""
    return config.model_copy(
        update={
            "mixture": {},
            "name": part.name,
            "settings": part.settings,
            "python": part.python,
            "tools": part.tools,
            "max_turns": "auto" if part.max_turns is None else part.max_turns,
            "processes": 0,  # the whole mixture has them
        }
    )


class Mixture(Environment):
    """See the module."""

    bounds_itself = True
    tools_in_prompts = True

    def __init__(self, config: EnvironmentConfig, load: Load) -> None:
        """`load` constructs the environment of a part. Raises ConfigError with the part's name."""
        self.name = "the mixture of " + ", ".join(config.mixture)
        super().__init__(config.seed)
        self._settings = dict(config.mixture)
        self.parts: dict[str, Environment] = {}
        for name, part in config.mixture.items():
            with _named(name, len(config.mixture)):
                self.parts[name] = load(section_of(config, part))
        environments = self.parts.values()
        self.needs_address = any(each.needs_address for each in environments)
        self.tools = tuple(dict.fromkeys(tool for each in environments for tool in each.tools))
        self._set_up_s = config.run_timeout_s
        self._is_set_up = False

    @functools.cached_property
    def max_turns(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Environment`; not before it is needed, as an environment of `verifiers` starts a process to say it."""
        return max(each.max_turns for each in self.parts.values())

    @property
    def begins_with_turn(self) -> bool:
        """See `Environment`."""
        return all(each.begins_with_turn for each in self.parts.values())

    def part_of(self, task: Task) -> Environment:
        """The environment of a task."""
        return self.parts[task.part]

    def limits(self, task: Task) -> Limits:
        """See `Environment`."""
        part = self._settings[task.part]
        return Limits(part.group_size, part.max_tokens)

    @property
    def hung(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Environment`."""
        return next((each.hung for each in self.parts.values() if each.hung), "")

    @property
    def is_held_up(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Environment`."""
        return any(each.is_held_up for each in self.parts.values())

    def attach(self, warn: Callable[[str], None] | None = None, log_folder: Path | None = None) -> None:
        """See `Environment`; each part has a folder of its own for logs."""
        super().attach(warn, log_folder)
        for name, each in self.parts.items():
            each.attach(warn, log_folder / name if log_folder is not None else None)

    @property
    def num_train_tasks(self) -> int:
        """Tasks of all parts together."""
        return sum(self._num_train_tasks(name) for name in self.parts)

    def _num_train_tasks(self, name: str) -> int:
        return self._settings[name].num_train_tasks or self.parts[name].num_train_tasks

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        return "; ".join(f"{name}: {each.eval_source}" for name, each in self.parts.items() if each.eval_source)

    def held_out(self) -> Sequence[Task]:
        """See `Environment`."""
        return [task for each in self.parts.values() for task in each.held_out()]

    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """One of each part in turn, for training as long as it has further ones."""
        most = [self._num_train_tasks(name) if split == "train" else num_tasks for name in self.parts]
        made: list[list[Task]] = []
        for (name, environment), wanted in zip(self.parts.items(), shares(num_tasks, most), strict=True):
            with _named(name, len(self.parts)):
                tasks = make_tasks(environment, split, wanted)
            made.append([_as_part(task, name, self._settings[name].system_prompt) for task in tasks])
        return [tasks[place] for place in range(max(map(len, made))) for tasks in made if place < len(tasks)]

    def gold(self, task: Task) -> str | Sequence[Message] | None:
        """See `Environment`."""
        return self.part_of(task).gold(_own(task))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """See `Environment`."""
        system = self._settings[task.part].system_prompt
        return await self.part_of(task).run(_own(task), _Instructed(policy, system) if system else policy)

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """See `Environment`."""
        return self.part_of(task).score(_own(task), completion)

    def score_episode(self, task: Task, episode: Episode) -> Score | Awaitable[Score]:
        """See `Environment`."""
        return self.part_of(task).score_episode(_own(task), episode)

    def has_tools(self, task: Task) -> bool:
        """See `Environment`."""
        return bool(self.part_of(task).tools)

    def grades_groups(self, task: Task) -> bool:
        """See `Environment`."""
        return self.part_of(task).grades_groups(_own(task))

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """See `Environment`."""
        return self.part_of(task).score_group(_own(task), episodes)

    def call_tool(self, name: str, arguments: dict[str, Any], task: Task) -> Any:
        """See `Environment`."""
        return self.part_of(task).call_tool(name, arguments, _own(task))

    async def setup(self) -> None:
        """Sets up all parts, once."""
        if self._is_set_up:
            return
        self._is_set_up = True
        for environment in self.parts.values():
            await set_up(environment, self._set_up_s)

    async def close(self) -> None:
        """Closes all parts."""
        self._is_set_up = False
        for environment in self.parts.values():
            await shut_down(environment, self.on_warning)

    async def setup_episode(self, task: Task) -> Any:
        """See `Environment`."""
        return await self.part_of(task).setup_episode(_own(task))

    async def close_episode(self, task: Task, state: Any) -> None:
        """See `Environment`."""
        await self.part_of(task).close_episode(_own(task), state)


class _Instructed:
    """The policy with the system prompt of a part, also before messages written by the part's `run`."""

    def __init__(self, policy: Policy, system: str) -> None:
        self._policy = policy
        self._system = system
        self.state, self.address = policy.state, policy.address

    async def chat(self, messages: Sequence[Message], **options: Any) -> Reply:
        """See `Policy`."""
        has_system = any(message.role == "system" for message in messages)
        return await self._policy.chat(messages if has_system else _after(self._system, messages), **options)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """See `Policy`."""
        return await self._policy.call_tool(call)


def shares(number: int, most: Sequence[int]) -> list[int]:
    """`number` things given out one by one in turn to the places with room; at most so many to each."""
    given = [0] * len(most)
    while left := min(number, sum(most)) - sum(given):
        open_ones = [place for place, limit in enumerate(most) if given[place] < limit]
        each = max(1, min(left // len(open_ones), *(most[place] - given[place] for place in open_ones)))
        for place in open_ones[:left]:
            given[place] += each
    return given


@contextlib.contextmanager
def _named(part: str, num_parts: int) -> Generator[None]:
    """Errors inside name the part, and settings as they stand in the run file."""
    prefix = f"environment.mixture.{part}"
    try:
        yield
    except SlipstreamError as error:
        text = _SETTINGS_OF_A_PART.sub(rf"{prefix}.\1", str(error))
        text = _NUM_EVAL_TASKS.sub(lambda found: f"{found[1]}{int(found[2]) * num_parts}", text)
        raise type(error)(text if text.startswith(prefix) else f"{prefix}: {text}") from error


_NUM_EVAL_TASKS = re.compile(r"(set evaluation\.num_tasks to )(\d+)")
"""A part is asked for its share."""
_SETTINGS_OF_A_PART = re.compile(r"environment\.(name|settings|python|tools|max_turns|num_train_tasks)\b")


def parts_of(environment: Environment) -> Mapping[str, Environment]:
    """The parts of a mixture by their names; of any other environment itself."""
    return environment.parts if isinstance(environment, Mixture) else {"": environment}


def _as_part(task: Task, name: str, system: str | None) -> Task:
    prompt = task.prompt
    if system and not any(message.role == "system" for message in prompt):
        prompt = tuple(_after(system, prompt))
    return msgspec.structs.replace(task, id=f"{name}/{task.id}", part=name, prompt=prompt)


def _after(system: str, messages: Sequence[Message]) -> list[Message]:
    first, *rest = messages
    # A conversation's tools stand on its first message.
    return [Message("system", system, tools=first.tools), msgspec.structs.replace(first, tools=()), *rest]


def _own(task: Task) -> Task:
    """A task as its part made it."""
    return msgspec.structs.replace(task, id=task.id.removeprefix(f"{task.part}/"), part="")
