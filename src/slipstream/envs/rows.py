"""The environment `rows`: questions with known answers from the user's files or folders, including verl's format.

Settings: `path` (JSON lines, parquet, or a folder; see `data/readers.py`), `subset`, `split`, `eval_path`,
`eval_split`, `format` (`verl`, `messages`, `prompt-answer`; detected if not set), `prompt_column`, `answer_column`,
`messages_column`, `gold_column`, `reward` or `rubric`, `score_groups`, `strip_thinking`, `tokenizer`, `sandbox`, `code`
and `judges`.

`path` and `eval_path` may be a list, or a table of paths by task, as verl's `train_files`: ids then begin with the
task's name, which is also `info["task"]`. Held-out tasks are the rows of `eval_path` or of `eval_split`; without both,
one question in ten, by its text (`split.split_of`). If `eval_path` is a folder of several splits and `eval_split` is
not set, its `test`, `validation` or `eval` split is used, in this order. Only requested rows are read: the reward
worker reads none.

Rewards are those of `rewards/named.py`. In a table of rewards by `data_source`, each row gets the longest name that its
source begins with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from slipstream.data.conversations import Columns, Form, Problem, problems_of
from slipstream.data.files.folders import held_out_split, subset_of
from slipstream.data.plain_values import plain_or_text
from slipstream.data.readers import read_rows
from slipstream.envs.base import Episode, Score, Split
from slipstream.envs.rewards import Options, Reward, named
from slipstream.envs.rewards.contract import COLUMNS, Checked
from slipstream.envs.single_turn import SingleTurn
from slipstream.envs.split import split_of
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.records import Task

NAME = "rows"
_PATHS = ("path", "eval_path")
_TEXTS = ("subset", "split", "eval_split", "format", "tokenizer")
_COLUMNS = ("prompt_column", "answer_column", "messages_column", "gold_column")
_FLAGS = ("strip_thinking", "score_groups")
_TABLES = ("code", "judges")
_SETTINGS = (*_PATHS, *_TEXTS, *_COLUMNS, *_FLAGS, *_TABLES, "reward", "rubric", "sandbox")
_SANDBOXES = ("namespaces", "limits")
_PATH_FORMS = "a text, a list of texts, or a table of texts by task"


class Source(NamedTuple):
    """One file or folder of rows."""

    path: str
    prefix: str
    """The beginning of its tasks' ids."""
    task: str
    """Its name in a table of paths; empty otherwise."""
    setting: str


class Rows(SingleTurn):
    """The environment `rows`; see the module. Raises `ConfigError` for invalid settings, `DataError` for invalid
    rows."""

    def __init__(self, seed: int, settings: Mapping[str, Any], *, reward_timeout_s: float = 10.0) -> None:
        super().__init__(seed)
        self.name = NAME
        self._settings = given = _checked(settings)
        self.scores_groups = given.get("score_groups", False)
        setting = "rubric" if "rubric" in given else "reward"
        reward = given.get(setting, "exact")
        table = cast("dict[str, Any]", reward) if isinstance(reward, dict) else {"": reward}
        options = Options(
            reward_timeout_s=reward_timeout_s,
            strip_thinking=given.get("strip_thinking", False),
            sandbox=given.get("sandbox", "namespaces"),
            code=given.get("code", {}),
            judges=given.get("judges", {}),
            tokenizer=given.get("tokenizer", ""),
        )
        # Longest name first, so that the first match is the longest one.
        self._rewards = {
            name: named(table[name], options, f"environment.settings.{setting}{f'.{name}' if name else ''}")
            for name in sorted(table, key=len, reverse=True)
        }

    @property
    def num_train_tasks(self) -> int:
        """All rows that are not held out."""
        return len(self._train)

    def held_out(self) -> Sequence[Task]:
        """See `Environment`."""
        return self._eval

    def tasks(self, split: Split, num_tasks: int) -> list[Task]:
        """See `Environment.tasks`: the first rows of the split, fewer if there are no more."""
        found = self._train if split == "train" else self._eval
        if not found:
            path = self._path
            if split == "train":
                raise DataError(
                    f"every question of {path} is held out: add rows, or set environment.settings.eval_path"
                )
            raise DataError(
                f"none of the {len(self._train)} questions of {path} is held out (one in ten is, by its text): set "
                "environment.settings.eval_path or eval_split, add rows, or turn the evaluation off"
            )
        return found[:num_tasks]

    def setup_scoring(self) -> None:
        """See `Environment`."""
        for reward in self._rewards.values():
            reward.setup_scoring()

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """The reward that the row's `data_source` selects."""
        return self._reward_of(task)(task, completion)

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """The same reward, called once for all completions of the task, with `score_groups = true`."""
        return await self._reward_of(task).score_group(task, [episode.completion for episode in episodes])

    def _reward_of(self, task: Task) -> Reward:
        source = str(task.info["data_source"])
        return next(reward for name, reward in self._rewards.items() if source.startswith(name))

    @cached_property
    def _train(self) -> list[Task]:
        if self._has_own_eval:
            return self._main
        return [task for task in self._main if split_of(_question(task)) == "train"]

    @cached_property
    def _eval(self) -> list[Task]:
        if not self._has_own_eval:
            return [task for task in self._main if split_of(_question(task)) == "eval"]
        return self._read(self._eval_setting, held_out=True)

    @cached_property
    def _main(self) -> list[Task]:
        return self._read("path", held_out=False)

    @property
    def _eval_setting(self) -> str:
        return "eval_path" if "eval_path" in self._settings else "path"

    def _split_of(self, source: Source, which: str, *, held_out: bool) -> str:
        """The split of a file or folder: that of the settings; of a held-out folder its test split, unless it is
        trained on."""
        settings = self._settings
        if not held_out:
            return settings.get("split", "")
        folder = Path(source.path)
        if "eval_split" in settings or not folder.is_dir():
            return settings.get("eval_split", "")
        is_same = any(folder.resolve() == Path(other.path).resolve() for other in self._sources("path"))
        trained = settings.get("split", "train") if is_same else ""
        subset = self._subset_of(source, held_out=True)
        return held_out_split(folder, trained, f"environment.settings.{which}", subset)

    def _subset_of(self, source: Source, *, held_out: bool) -> str:
        """The configuration of a source, if it has several; a held-out one need not have those of `path`."""
        subset: str = self._settings.get("subset", "")
        return subset_of(source.path, subset) if held_out and "eval_path" in self._settings else subset

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        if not self._has_own_eval:
            return f"one question in ten of {self._path}, by its text"
        which, found = self._eval_setting, list[str]()
        for source in self._sources(which):
            split = self._split_of(source, which, held_out=True)
            found.append(f"split {split!r} of {source.path}" if split else source.path)
        return ", ".join(found)

    @property
    def _path(self) -> str:
        return ", ".join(source.path for source in self._sources("path"))

    @property
    def _has_own_eval(self) -> bool:
        return "eval_path" in self._settings or "eval_split" in self._settings

    def _sources(self, which: str) -> Iterator[Source]:
        value = self._settings[which]
        if isinstance(value, str):
            yield Source(value, which, "", which)
        elif isinstance(value, dict):
            for task, path in cast("dict[str, str]", value).items():
                yield Source(path, f"{task}/{which}", task, f"{which}.{task}")
        else:
            for number, path in enumerate(cast("list[str]", value)):
                yield Source(path, f"{which}/{number}", "", f"{which}[{number}]")

    def _read(self, which: str, *, held_out: bool) -> list[Task]:
        return [task for source in self._sources(which) for task in self._tasks_of(source, which, held_out=held_out)]

    def _tasks_of(self, source: Source, which: str, *, held_out: bool) -> list[Task]:
        settings = self._settings
        columns = Columns(*(settings.get(f"{name}_column", "") for name in ("messages", "prompt", "answer", "gold")))
        form = cast("Form", settings.get("format", "auto"))
        split, subset = self._split_of(source, which, held_out=held_out), self._subset_of(source, held_out=held_out)
        rows = read_rows(source.path, split, f"environment.settings.{source.setting}", subset)
        needs_answers = any(reward.needs_answers for reward in self._rewards.values())
        problems = problems_of(rows, columns, form, answers=needs_answers)
        found: dict[str, list[Checked]] = {name: [] for name in self._rewards}
        tasks: list[Task] = []
        for row, problem in enumerate(problems):
            name = next((name for name in self._rewards if problem.source.startswith(name)), None)
            if name is None:
                raise DataError(
                    f"{problem.where}: data_source = {problem.source!r} has no reward: "
                    f"environment.settings.reward has {', '.join(self._rewards)}"
                )
            tasks.append(_task(problem, f"{source.prefix}/{row}", source.task, self._rewards[name]))
            found[name].append(Checked(problem.where, tasks[-1]))
        for name, rows in found.items():
            self._rewards[name].check(rows)
        return tasks


def _task(problem: Problem, id_: str, task: str, reward: Reward) -> Task:
    gold, answer = problem.gold, problem.answer
    if not reward.answer_is_gold:
        gold = None if gold == str(answer) else gold
    elif gold is None and isinstance(answer, list) and answer:
        gold = str(cast("list[Any]", answer)[0])
    info: dict[str, Any] = {
        "data_source": problem.source,
        "ground_truth": answer,
        "extra_info": problem.extra or {},
    }
    if task:
        info["task"] = task
    if reward.needs_columns:
        info[COLUMNS] = {name: plain_or_text(value) for name, value in problem.columns.items()}
    return Task(id_, problem.prompt, gold, info)


def check_settings(given: Mapping[str, Any], name: str, known: Sequence[str], texts: Sequence[str]) -> None:
    """Raises `ConfigError` for settings of the environment `name` outside `known`, for `texts` with another type, and
    without a path."""
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"environment.settings.{key}: {name} has no such setting{did_you_mean(key, known)}")
        if key in texts and not _is_text(value):
            raise ConfigError(f"environment.settings.{key} = {value!r:.60} is not a text: give one, or leave it out")
    if "path" not in given:
        raise ConfigError(f"environment.settings.path is missing: {name} needs the path of a file or folder of rows")


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    check_settings(given, NAME, _SETTINGS, (*_TEXTS, *_COLUMNS))
    for key, value in given.items():
        path = f"environment.settings.{key}"
        if key in _PATHS and not _is_text(value) and not _are_texts(value):
            raise ConfigError(f"{path} = {value!r:.60} is no path: give {_PATH_FORMS}")
        if key in _FLAGS and not isinstance(value, bool):
            raise ConfigError(f"{path} = {value!r:.60} is a {type(value).__name__}: give true or false")
        if key in _TABLES and not isinstance(value, dict):
            raise ConfigError(f"{path} = {value!r:.60} is a {type(value).__name__}: give a table of settings")
    for key, choices in (("format", get_args(Form)), ("sandbox", _SANDBOXES)):
        if given.get(key, choices[0]) not in choices:
            raise ConfigError(
                f"environment.settings.{key} = {given[key]!r} is not a choice{did_you_mean(str(given[key]), choices)}"
            )
    if "rubric" in given and "reward" in given:
        raise ConfigError("environment.settings has reward and rubric: keep one, a reward may be a part of the rubric")
    if "rubric" in given and not isinstance(given["rubric"], list):
        raise ConfigError(
            "environment.settings.rubric is not a list: give its parts, each { reward = ..., weight = ... }"
        )
    return dict(given)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    """Whether a value is a list, or a table, of at least one text."""
    if not isinstance(value, list | dict) or not value:
        return False
    held = cast("Sequence[Any]", list(cast("dict[Any, Any]", value).values()) if isinstance(value, dict) else value)
    return all(map(_is_text, held))


def _question(task: Task) -> str:
    turns = [message for message in task.prompt if message.role != "system"]
    return "\n".join([*(turn.content for turn in turns), *(image.sha256 for turn in turns for image in turn.media)])
