"""A user's environment with its `run` in processes of its own (`environment.processes`).

Blocking code there holds up neither the engine nor other work of the run. A synchronous call is interrupted after
blocking for half of `environment.run_timeout_s`: its episode fails, with the line in the error. If the
episode still does nothing until the limit, its process is killed; the stacks are in the error, and all episodes of this
process count as failed. An episode begins in the process with the fewest, and stays there. Tasks are made in the run's
process. Rewards and tools run in their workers, each with its own environment object.
"""

from __future__ import annotations

import base64
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import given, is_python_object
from slipstream.envs.base import ContextFull, Environment, Episode, Policy, Split
from slipstream.envs.hosted.keeper import EnvironmentBlocked, EnvironmentRaised, Keeper, KeptEnvironment, all_of
from slipstream.envs.hosted.process import Frame, Host, HostDied, HostFailed
from slipstream.envs.lifetime import CLOSE_S
from slipstream.envs.mixed import Mixture, parts_of
from slipstream.errors import EnvironmentFault
from slipstream.records import Message, Task, ToolCall

_HOOKS = ("run", "setup", "close", "setup_episode", "close_episode")
"""Methods called in the process."""
_TAKEN_OVER = (
    *("max_turns", "max_tool_calls", "tools", "scores_groups", "tools_in_prompts", "given_settings", "needs_address"),
    *("limits", "has_tools", "grades_groups", "gold", "figures"),
)
"""These are the environment's own, methods too."""
_ANSWER_S = 5.0
"""Time of the process to answer, beside the time of the environment's code."""
_SPACE = (
    "it is played in a process of its own (environment.processes), in which tasks() was not called and which has the "
    "variables of environment.variables only"
)
_MOST_OF_AGENTS = 8


def placement(environment: Environment) -> tuple[int, str]:
    """Most processes for episodes by default, and why; 0: the run's own process."""
    if isinstance(environment, Mixture):
        found = [placement(part) for part in environment.parts.values()]
        return min((each for each in found if each[0]), key=lambda each: each[0], default=found[0])
    if environment.plays_itself:
        return 0, f"an environment of {environment.package} has a process of its own anyway"
    if environment.runs_user_code:
        return _MOST_OF_AGENTS, "the agent's function may block, and its client takes milliseconds a request"
    own = [name for name in _HOOKS if _has_own(environment, name)]
    if not own:
        return 0, "episodes run no code of the environment's own between turns"
    named = ", ".join(f"{name}()" for name in own)  # their variables may be shared by all episodes
    return 1, f"{named} of {environment.name} may block, which would hold up the run"


def plays_own_turns(environment: Environment) -> bool:
    """Whether a `run` of the environment's own decides the messages between the policy's turns."""
    parts = parts_of(environment).values()
    return any(each.plays_itself or each.needs_address or _has_own(each, "run") for each in parts)


def _has_own(environment: Environment, name: str) -> bool:
    """Whether a method is the user's, of the object or its class."""
    if name in vars(environment):
        return True
    definer = next(each for each in type(environment).__mro__ if name in vars(each))
    return definer.__module__.partition(".")[0] != __name__.partition(".")[0]


@dataclass
class _Playing:
    """An episode for the environment's `close_episode` to close: `policy.state` in the run's process."""

    name: str
    keeper: Keeper | None = None
    host: Host | None = None
    """Its process."""


class Apart(KeptEnvironment):
    """`environment`, with `run`, `setup` and `close` in other processes, as are those of its episodes."""

    bounds_itself = True

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        """`config`: as planned."""
        self.name = environment.name
        super().__init__(environment.seed)
        self._environment = environment
        self._config = config
        for name in _TAKEN_OVER:
            setattr(self, name, getattr(environment, name))
        number = 1 if config.processes == "auto" else config.processes
        self.keepers = [Keeper(self.name, self._started, self.where) for _ in range(number)]
        self._closes_episodes = any(_has_own(each, "close_episode") for each in parts_of(environment).values())
        self._serial = itertools.count()

    @property
    def is_held_up(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Environment`; also shortly afterwards, when the next episode may block. A call going on long after its
        interrupt is not waited for."""
        return any(each.host is not None and each.host.is_held_up for each in self.keepers)

    @property
    def num_train_tasks(self) -> int:
        """See `Environment`."""
        return self._environment.num_train_tasks

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        return self._environment.eval_source

    def held_out(self) -> Sequence[Task]:
        """See `Environment`."""
        return self._environment.held_out()

    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """See `Environment`."""
        return self._environment.tasks(split, num_tasks)

    async def close(self) -> None:
        """Has the environment closed in each process, and ends it. Warns of exceptions in the environment's `close`."""
        await all_of(self._close(each) for each in self.keepers)

    async def _close(self, keeper: Keeper) -> None:
        host = keeper.host
        try:
            if host is not None and host.alive:
                await host.ask({"op": "close"}, CLOSE_S + _ANSWER_S)
        except (HostFailed, HostDied) as failure:
            self.on_warning(str(failure))
        except TimeoutError:
            self.on_warning(f"close() of {self.name} blocks, and its process was killed")
        finally:
            await keeper.close()

    async def setup_episode(self, task: Task) -> _Playing | None:
        """Nothing but a name: the environment's is called in the process."""
        return _Playing(f"played-{next(self._serial)}") if self._closes_episodes else None

    async def close_episode(self, task: Task, state: _Playing | None) -> None:
        """Has the environment's called in the episode's process, if it lives."""
        keeper = state.keeper if state is not None else None
        if state is None or keeper is None or state.host is not keeper.host or not keeper.is_up:
            return
        frame = self._check(await keeper.play({"close": state.name}, _nothing))
        if "failed" in frame:
            raise EnvironmentRaised(frame["failed"])

    async def run(self, task: Task, policy: Policy) -> Episode:
        """An episode, played in the process with the fewest."""
        keeper = min(self.keepers, key=lambda each: each.num_playing)
        playing: _Playing | None = policy.state
        if playing is not None:
            playing.keeper, playing.host = keeper, await keeper.ready()
        asked = {"task": msgspec.to_builtins(task), "name": playing.name if playing else ""}
        if policy.address is not None:
            asked["address"] = msgspec.to_builtins(policy.address)
        frame = self._check(await keeper.play(asked, lambda frame: _answer(frame, policy)))
        if "episode" not in frame:
            raise ContextFull(frame["context_full"])
        return msgspec.convert(frame["episode"], Episode)

    def _check(self, frame: Frame) -> Frame:
        """`frame`, unless the environment failed. Raises `EnvironmentRaised`."""
        if frame["op"] == "cancelled":
            raise EnvironmentRaised(f"{self.name} cancelled the episode's own task")
        if frame["op"] == "raised":
            kind = EnvironmentBlocked if frame["kind"] == "blocked" else EnvironmentRaised
            raise kind(f"{frame['details'].rstrip()}\n({_SPACE})")
        return frame

    def _blocks(self, host: Host, frame: Frame) -> None:
        now = time.monotonic()
        host.held_up_until = now + (self._interrupt_s - frame["seconds"] if frame["where"] else 0.0) + _ANSWER_S
        if not frame["is_new"]:
            return
        self.on_warning(
            f"environment {self.name} blocks its other episodes: a synchronous call ({frame['where']}) has held up its "
            f"process for {frame['seconds']:.1f} s: await there, or use asyncio.to_thread; it is interrupted after "
            f"{self._interrupt_s:g} s, half of environment.run_timeout_s"
        )

    @property
    def _interrupt_s(self) -> float:
        return self._config.run_timeout_s / 2

    async def _started(self) -> Host:
        passed = given(self._config.name) if is_python_object(self._config.name) else None
        setup: Frame = {
            "module": "own",
            "section": self._config.model_copy(update={"processes": 0}).model_dump_json(
                exclude={"num_train_tasks", "reward_workers"}
            ),
            "passed": base64.b64encode(msgspec.msgpack.encode(passed)).decode() if passed is not None else "",
            "interrupt_s": self._interrupt_s,
        }
        namespace = self._config.user_namespace
        try:
            host = await Host.start(
                sys.executable, setup, variables=self._config.variables, log=self.log, user_namespace=namespace
            )
        except (HostFailed, HostDied, TimeoutError, OSError) as error:
            reason = str(error) or "it was not loaded in time"
            raise EnvironmentFault(f"the process of {self.name} did not start: {reason}{self.where()}") from error
        host.on_blocks = partial(self._blocks, host)
        try:
            await host.ask({"op": "serve"}, self._config.run_timeout_s + _ANSWER_S)
        except BaseException as error:
            await host.kill()
            match error:
                case HostFailed():
                    raise EnvironmentFault(str(error)) from error
                case HostDied():
                    raise EnvironmentFault(f"setup() of {self.name} ended its process: {error}") from error
                case TimeoutError():
                    raise EnvironmentFault(
                        f"setup() of {self.name} blocks, for {self._config.run_timeout_s:g} s already "
                        f"(environment.run_timeout_s): correct it{host.last_lines()}"
                    ) from error
                case _:
                    raise
        return host


async def _nothing(frame: Frame) -> Frame:
    raise EnvironmentRaised(f"close_episode() asked for {frame['op']}: the episode is over")


async def _answer(frame: Frame, policy: Policy) -> Frame:
    if frame["op"] == "tool":
        result = await policy.call_tool(msgspec.convert(frame["tool"], ToolCall))
        return {"op": "result", "result": msgspec.to_builtins(result)}
    messages = msgspec.convert(frame["messages"], list[Message])
    try:
        reply = await policy.chat(messages, max_tokens=frame["max_tokens"], tools=frame["tools"])
    except ContextFull as full:
        return {"op": "refused", "message": str(full)}
    return {"op": "reply", "reply": msgspec.to_builtins(reply)}
