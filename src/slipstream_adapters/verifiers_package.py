"""Environments of the package `verifiers`, unchanged: `verifiers/<name>`, or `verifiers/path/to/file.py`.

The package cannot be installed beside vLLM, so the environment runs in a process of its own with the interpreter
`environment.python`. It plays its episodes there and grades them itself; each turn comes back as a request to the
policy, so the tokens trained are those that were sampled. A process that hangs or dies costs its episodes, which are
counted, and another is started.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slipstream.envs import (
    ContextFull,
    Episode,
    Policy,
    RewardFailed,
    Score,
    Split,
    Task,
    as_message,
    shown_settings,
    split_of,
    text_of,
)
from slipstream.envs.hosted import (
    EnvironmentRaised,
    Frame,
    Host,
    HostDied,
    HostFailed,
    Keeper,
    KeptEnvironment,
    in_own_loop,
)
from slipstream.errors import ConfigError, DataError, EnvironmentFault
from slipstream.records import Stop
from slipstream_adapters import inside
from slipstream_adapters.conversation import Conversation

if TYPE_CHECKING:
    from slipstream.plugins import EnvironmentConfig

_ROWS_S = 110.0
"""Time limit of a page of rows."""
PREFIX = "verifiers/"
_PAGE = 1000
_FRUITLESS_PAGES = 20
_OTHER: Mapping[Split, Split] = {"train": "eval", "eval": "train"}


class Verifiers(KeptEnvironment):
    """One environment of `verifiers`. Constructing it starts nothing, as reward workers construct it too."""

    takes_section = True
    plays_itself = True
    package = "verifiers"

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config.seed)
        text = config.name.removeprefix(PREFIX)
        self._file = text if text.endswith(".py") or os.path.isabs(text) else ""
        self._id = Path(text).stem if self._file else text
        self.name = PREFIX + self._id
        self.given_settings = config.settings
        self._config = config
        self._python = _interpreter(config.python)
        self._known: Frame = {}
        self._tasks: dict[Split, list[Task]] = {"train": [], "eval": []}
        self._is_read: dict[Split, bool] = {"train": False, "eval": False}
        self.keeper = Keeper(self.name, lambda: self._started(self.log), self.where)
        self.keepers = (self.keeper,)

    @property
    def max_turns(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Environment`: what the environment says, or `environment.max_turns`."""
        turns = int(self._facts()["max_turns"])
        if turns < 1:
            raise ConfigError(
                f"environment.max_turns is not set, and {self.name} does not say how many turns an episode may take, "
                "which inference.max_model_len is planned with: set it"
            )
        return turns

    @property
    def num_train_tasks(self) -> int:
        """See `Environment`: all rows, where their number is known."""
        sizes = self._facts()["num_rows"]
        if "train" not in sizes:
            return 10_000
        return max(1, len(self.tasks("train", sizes["train"])))

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        return "" if "eval" in self._facts()["splits"] else "one row in ten, by its text"

    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """See `Environment`. Rows are read from the environment's own data sets; where it has one only, one prompt in
        ten is held out, by its text."""
        if len(self._tasks[split]) < num_tasks and not self._is_read[split]:
            in_own_loop(lambda: self._described(lambda host: self._read(host, split, num_tasks)))
        return self._tasks[split][:num_tasks]

    def gold(self, task: Task) -> str | None:
        """None: the answer in a row is what the environment compares with, not what a policy should write."""
        return None

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """Fails: episodes come back graded."""
        raise RewardFailed(f"{self.name} grades whole episodes in its own process, and no text alone")

    async def run(self, task: Task, policy: Policy) -> Episode:
        """One episode, played and graded by the environment."""
        conversation = Conversation()
        frame = await self.keeper.play(task.info["task"], lambda asked: self._turn(asked, conversation, policy))
        return self._episode(frame, conversation)

    async def _turn(self, frame: Frame, conversation: Conversation, policy: Policy) -> Frame:
        messages = conversation.messages(frame["messages"], frame["tools"])
        limits: dict[str, Any] = {} if frame["max_tokens"] is None else {"max_tokens": frame["max_tokens"]}
        try:
            reply = await policy.chat(messages, **limits)
        except ContextFull as full:
            return {"op": "refused", "message": str(full)}
        return conversation.reply(reply)

    def _episode(self, frame: Frame, conversation: Conversation) -> Episode:
        if frame["op"] == "raised":
            if frame["kind"] == "reward":
                raise RewardFailed(f"the reward of {self.name} failed", frame["details"])
            raise EnvironmentRaised(f"in the environment process:\n{frame['details']}")
        if frame["op"] == "cancelled":
            raise EnvironmentRaised(f"{self.name} cancelled its own episode: cancel only tasks that it has started")
        last = conversation.last
        if last is None:
            return Episode("", "done", 0, stop=frame["stop"])
        is_cut = last.finish_reason == "length"
        stop = cast("Stop", "length" if is_cut and frame["stop"] == "answer" else frame["stop"])
        return Episode(
            last.text,
            "truncated" if is_cut or stop in ("length", "context_full") else "done",
            conversation.num_turns,
            frame["metrics"],
            stop=stop,
            reward=frame["reward"],
        )

    async def close(self) -> None:
        """Ends the process."""
        await self.keeper.close()

    async def _started(self, log: Path | None) -> Host:
        config = self._config
        setup: Frame = {
            "folder": str(Path(str(inside.__file__)).parent),
            "module": "generations",
            "id": self._id,
            "file": self._file,
            "settings": config.settings,
            "max_turns": None if config.max_turns == "auto" else config.max_turns,
        }
        try:
            return await Host.start(
                self._python, setup, variables=config.variables, log=log, user_namespace=config.user_namespace
            )
        except HostFailed as failure:
            raise ConfigError(
                f"environment.name = {config.name!r}: {failure} (interpreter {self._python}"
                f"{shown_settings(config.settings)})"
            ) from failure
        except (HostDied, TimeoutError, OSError) as death:
            reason = str(death) or "it was not loaded in time"
            raise ConfigError(
                f"environment.name = {config.name!r}: its process did not start with environment.python = "
                f"{self._python!r}: {reason}"
            ) from death

    # What is asked before a run, by a process that lives as long as the question.

    def _facts(self) -> Frame:
        if not self._known:

            async def nothing(host: Host) -> None:
                return None

            in_own_loop(lambda: self._described(nothing))
        return self._known

    async def _described(self, ask: Callable[[Host], Awaitable[None]]) -> None:
        host = await self._started(None)
        self._known = host.facts
        try:
            await ask(host)
        except HostFailed as failure:
            raise DataError(f"{self.name}: {failure}") from failure
        except (HostDied, TimeoutError) as death:
            raise EnvironmentFault(f"{self.name} gave no tasks: {str(death) or 'not in time'}") from death
        finally:
            await host.kill()

    async def _read(self, host: Host, split: Split, num_tasks: int) -> None:
        splits, other = host.facts["splits"], _OTHER[split]
        if split not in splits and "train" not in splits:
            raise DataError(f"{self.name} has no data set to train on, only held-out rows: use another")
        if "eval" not in splits:  # one data set for both
            await self._read_from(host, "train", (split, other), num_tasks)
            return
        await self._read_from(host, split, (split,), num_tasks)
        if other in splits and not self._tasks[other]:  # now rather than by another process
            await self._read_from(host, other, (other,), _PAGE)

    async def _read_from(self, host: Host, source: Split, wanted: tuple[Split, ...], num_tasks: int) -> None:
        """Reads a data set until the first of the splits has enough tasks; with two, each row is of one of them."""
        found: dict[Split, list[Task]] = {split: [] for split in wanted}
        asked = wanted[0]
        first, is_divided = found[asked], len(wanted) > 1
        start = fruitless = 0
        ends = False
        while len(first) < num_tasks and fruitless < _FRUITLESS_PAGES and not ends:
            ask = {"op": "rows", "split": source, "start": start, "count": (count := min(_PAGE, 64 + 2 * num_tasks))}
            rows = (await host.ask(ask, _ROWS_S))["rows"]
            before = len(first)
            for place, row in enumerate(rows, start):
                task = _as_task(row, f"{source}/{place}", self.name)
                found[split_of(text_of(task)) if is_divided else asked].append(task)
            start += len(rows)
            fruitless = fruitless + 1 if len(first) == before else 0
            ends = len(rows) < count
        for split, tasks in found.items():
            self._is_read[split] = ends
            if len(tasks) > len(self._tasks[split]):
                self._tasks[split] = tasks


def _as_task(row: Mapping[str, Any], id_: str, where: str) -> Task:
    try:
        prompt = tuple(as_message(message) for message in row["prompt"] or ())
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"row {id_} of {where} has a prompt that cannot be read: {error}") from error
    if not prompt:
        raise DataError(f"row {id_} of {where} has no prompt: give every row one")
    return Task(id_, prompt, row["answer"], {"task": row["task"]})


def _interpreter(python: str) -> str:
    if not python:
        return sys.executable
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(
            f"environment.python = {python!r} is not a program: make an environment of its own, as verifiers cannot be "
            "installed beside vLLM (python -m venv FOLDER; FOLDER/bin/pip install verifiers), and give "
            "FOLDER/bin/python"
        )
    return os.path.abspath(found)
