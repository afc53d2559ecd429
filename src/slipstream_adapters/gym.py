"""Environments from the package `reasoning_gym`: every task, by name and settings.

Tasks come from one endless stream, generated in chunks; `split.split_of` assigns each question to a split, and a
repeated question counts once. So the held-out tasks of a seed do not depend on the number of training tasks, and no run
of any seed trains on a held-out question.

A task carries the entry that its reward needs as a Python literal (`Task.info["entry"]`): entries hold tuples and
integer keys that JSON would change, and re-generating an entry from its index is slow for some tasks and differs
between processes for those that iterate over sets.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from slipstream.envs import EVAL_ONE_IN, Message, SingleTurn, Split, Task, split_of
from slipstream.errors import ConfigError, DataError, EnvironmentFault, did_you_mean

if TYPE_CHECKING:
    from slipstream.plugins import EnvironmentConfig

PREFIX = "reasoning_gym/"
CHUNK = 1000
# A split counts as exhausted after this many consecutive draws without a new question, plus ten for each found.
_PATIENCE = 100 * EVAL_ONE_IN
_RESERVED = {"size": "environment.num_train_tasks and evaluation.num_tasks", "seed": "environment.seed"}


class ReasoningGym(SingleTurn):
    """One `reasoning_gym` task. Raises `ConfigError` for an unknown name or settings that the task rejects."""

    takes_section = True
    package = "reasoning_gym"

    def __init__(self, section: EnvironmentConfig) -> None:
        super().__init__(section.seed)
        self.name = section.name
        self._make = _factory(section.name.removeprefix(PREFIX), dict(section.settings))
        self._grader = self._make(0, CHUNK)
        self._stream = self._draw()
        self._found: dict[Split, list[Task]] = {"train": [], "eval": []}
        self._seen: set[str] = set()
        self._fruitless: dict[Split, int] = {"train": 0, "eval": 0}

    def tasks(self, split: Split, num_tasks: int) -> list[Task]:
        """See `Environment.tasks`. Returns fewer training tasks if there are no more distinct questions; too few
        held-out ones raise `DataError`, because accuracy would be less certain than requested."""
        found = self._found[split]
        while len(found) < num_tasks and self._fruitless[split] < _PATIENCE + 10 * len(found):
            task, owner = next(self._stream)
            for each in self._fruitless:
                self._fruitless[each] += 1
            if task is not None:
                self._found[owner].append(task)
                self._fruitless[owner] = 0
        if len(found) < num_tasks and (split == "eval" or not found):
            number = "evaluation.num_tasks" if split == "eval" else "environment.num_train_tasks"
            remedy = f"set {number} to {len(found)}, or " if found else ""
            raise DataError(
                f"{self.name} has only {len(found)} distinct {split} questions and {num_tasks} were asked for: "
                f"{remedy}widen environment.settings"
            )
        return found[:num_tasks]

    def reward(self, task: Task, completion: str) -> dict[str, float]:
        """The task's own `score_answer`. Some raise for an answer that they cannot read: it is wrong, and counted by
        the metric `unreadable`."""
        entry = {"question": task.prompt[-1].content, **_entry(task.info["entry"])}
        try:
            return {"reward": self._grader.score_answer(completion, entry), "unreadable": 0.0}
        except Exception:  # noqa: BLE001 (the package's code, which has not one kind for it)
            return {"reward": 0.0, "unreadable": 1.0}

    def _draw(self) -> Iterator[tuple[Task | None, Split]]:
        """The stream: each item with its split; None in the place of a repeated question."""
        index = 0
        # Most data sets seed item i with seed + i: the streams of two seeds must start far apart.
        start = int.from_bytes(hashlib.sha256(str(self.seed).encode()).digest()[:4], "big") >> 1
        while True:
            chunk = self._make(start + index, CHUNK)
            for place in range(CHUNK):
                try:
                    entry = chunk[place]
                except Exception as error:  # the package's generator, whatever it raises
                    raise EnvironmentFault(
                        f"{self.name} failed to make task {index} of seed {self.seed}: {type(error).__name__}: {error}"
                    ) from error
                question = str(entry["question"])
                fresh = question not in self._seen
                self._seen.add(question)
                yield (self._task(index, question, entry) if fresh else None), split_of(question)
                index += 1

    def _task(self, index: int, question: str, entry: Mapping[str, Any]) -> Task:
        kept = repr(_plain({"answer": entry["answer"], "metadata": entry["metadata"]}))
        answer = entry["answer"]
        return Task(
            f"{self.name}/{self.seed}/{index}",
            (Message("user", question),),
            None if answer is None else str(answer),
            {"entry": kept},
        )


@functools.lru_cache(maxsize=4096)
def _entry(literal: str) -> dict[str, Any]:
    """The entry of a task; graders only read it, so the rollouts of a group share one."""
    return ast.literal_eval(literal)


def _plain(value: Any) -> Any:
    """`value` converted to built-in types, so that its `repr` is a literal."""
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in cast("dict[Any, Any]", value).items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            parts = [_plain(part) for part in cast("list[Any]", value)]
            return parts if kind is list else tuple(parts) if kind is tuple else set(parts)
    if hasattr(value, "item"):  # a NumPy scalar; its `repr` is a call
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | complex | bytes | str) else str(value)


def _factory(task_name: str, settings: dict[str, Any]) -> Callable[[int, int], Any]:
    """`(seed, size) -> data set`, tried once so that invalid settings raise an error at the start."""
    data_sets = _import()
    if task_name not in data_sets:
        raise ConfigError(
            f"environment.name: reasoning_gym has no task {task_name!r}{did_you_mean(task_name, data_sets)}"
        )
    dataset_class, config_class = data_sets[task_name]
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for key in settings:
        path = f"environment.settings.{key}"
        if key in _RESERVED:
            raise ConfigError(f"{path} is not set here: use {_RESERVED[key]}")
        if key not in fields:
            known = sorted(fields.keys() - _RESERVED.keys())
            raise ConfigError(f"{path}: {PREFIX}{task_name} has no such setting{did_you_mean(key, known)}")
        settings[key] = _fitted(settings[key], fields[key].default, path)
    if task_name == "composite":
        settings = _composite(settings, data_sets)

    def make(seed: int, size: int) -> Any:
        config = config_class(**{**settings, "seed": seed, "size": size})
        if hasattr(config, "validate"):
            config.validate()
        return dataset_class(config)

    try:
        make(0, CHUNK)
    except Exception as error:  # validate() asserts, and compares its settings with numbers
        reason = str(error) or type(error).__name__
        given = ", ".join(f"{key} = {value!r}" for key, value in settings.items()) or "its defaults"
        raise ConfigError(f"environment.settings: {PREFIX}{task_name} refuses {given:.300}: {reason}") from error
    return make


def _fitted(value: Any, default: Any, path: str) -> Any:
    """Converts a setting to the type of its default if TOML has no such type. Raises `ConfigError` for another kind."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(cast("list[Any]", value))
    if isinstance(default, float) and type(value) is int:
        return float(value)
    for kind, words in ((bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "text")):
        if type(default) is kind and type(value) is not kind:
            raise ConfigError(f"{path} = {value!r} is a {type(value).__name__}: give {words}")
    return value


def _composite(settings: dict[str, Any], data_sets: Mapping[str, Any]) -> dict[str, Any]:
    """Converts `datasets`, a list of {name, weight, config}, to the package's own objects."""
    from reasoning_gym.composite import DatasetSpec  # pyright: ignore[reportMissingImports]

    path = "environment.settings.datasets"
    specs: list[Any] = []
    for row in settings.get("datasets") or []:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise ConfigError(f"{path} has the entry {row!r:.80}: give {{name, weight, config}}")
        entry = cast("dict[str, Any]", row)
        if entry["name"] not in data_sets:
            raise ConfigError(
                f"{path}: reasoning_gym has no task {entry['name']!r}{did_you_mean(entry['name'], data_sets)}"
            )
        if unknown := sorted(entry.keys() - {"name", "weight", "config"}):
            raise ConfigError(f"{path}: entry {entry['name']!r} has the key {unknown[0]!r}: give name, weight, config")
        specs.append(DatasetSpec(entry["name"], float(entry.get("weight", 1.0)), dict(entry.get("config", {}))))
    return {**settings, "datasets": specs}


def _import() -> Mapping[str, Any]:
    """Imports the package's table of data sets."""
    with warnings.catch_warnings():
        # A dependency (cellpylib) uses `is` for `==`, which warns on the first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            import reasoning_gym  # noqa: F401  # pyright: ignore[reportUnusedImport]
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(
                f"environment.name: {PREFIX}... needs a package that cannot be imported ({error}): "
                "pip install 'slipstream[reasoning-gym]'"
            ) from error
    return DATASETS
