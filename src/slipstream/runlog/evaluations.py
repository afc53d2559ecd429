"""Kept results of evaluations: one JSON file each, in `evaluations/` of a run folder or wherever the user says; and the
names of an evaluation's figures among metrics.

Guarantees: a file is private to its user, appears whole or not at all, and never takes the place of another one. It
holds every sample of every task, to compute figures again and to compare two evaluations task by task. It holds no key
and no user information of an address. Only files of this `schema` are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import ConfigError, DataError
from slipstream.processes.files import UNDECODABLE, disk_errors, open_own
from slipstream.records import Message, Outcome
from slipstream.regular_files import read_regular
from slipstream.runlog.files import usable

FOLDER = "evaluations"
SCHEMA = 1
_KINDS = ("mean", "std", "pass", "best", "maj", "worst")
_FIGURE = re.compile(rf"({'|'.join(_KINDS)})@(\d+)")
_SOURCE = re.compile(r"eval/source/(.+)/accuracy")


class KeptSample(msgspec.Struct, frozen=True):
    """One sample of a task."""

    text: str
    """The graded text."""
    reward: float
    right: bool
    """Graded, and the reward reaches the threshold."""
    outcome: Outcome
    metrics: dict[str, float] = {}
    """Further measurements of the reward or the environment."""
    vote: str | None = None
    """Its answer in a majority vote; null if it gives no answer, or if the task has none."""
    num_tokens: int | None = None
    """Number of sampled tokens; null if an address does not return them one by one."""
    error: str = ""


class KeptTask(msgspec.Struct, frozen=True):
    """One task with its samples, in order."""

    id: str
    source: str
    """Its `data_source`; empty if it has none."""
    prompt_digest: str
    """Digest of all messages of the prompt: two tasks of one id are the same task only if it is equal."""
    prompt: str
    """The last message of the prompt."""
    answer: str | None
    samples: list[KeptSample]

    @property
    def accuracy(self) -> float:
        """Fraction of right samples."""
        return sum(sample.right for sample in self.samples) / len(self.samples)


class KeptEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A kept evaluation."""

    schema: int = SCHEMA
    model: str
    """The evaluated model: a folder, a hub id, or an address and the model's name there."""
    time: float
    """Unix time of its end."""
    settings: dict[str, Any]
    """All settings behind the figures: `section.key` and value."""
    metrics: dict[str, float]
    """As in `metrics.jsonl`."""
    tasks: list[KeptTask]


def prompt_digest(prompt: Sequence[Message]) -> str:
    """SHA-256 of `content_of` the prompt: its first 32 hex digits."""
    return hashlib.sha256(msgspec.json.encode(content_of(prompt))).hexdigest()[:32]


def content_of(messages: Sequence[Message]) -> list[Any]:
    """The content of messages, for digests. Paths of images are left out, as images have digests, and so are values
    dependent on the model."""
    found: list[Any] = []
    for message in messages:
        media = [{**msgspec.to_builtins(image), "uri": ""} for image in message.media]
        for image in media:
            del image["sees_itself"]
        found.append({**msgspec.to_builtins(message), "media": media} if media else message)
    return found


def new_place(folder: Path) -> Path:
    """A free file name in `evaluations/` of a run's folder, by date and time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(path for each in names if not (path := folder / FOLDER / f"{each}.json").exists())


def refuse_taken(path: Path) -> None:
    """Raise `ConfigError` if the file cannot be made, before anything is computed for it."""
    if path.exists():
        raise ConfigError(f"{path} exists already, and kept results are not overwritten: name another file with --out")
    if not path.parent.is_dir() and path.parent.name != FOLDER:
        raise ConfigError(f"{path.parent} is not a folder, so no results can be kept there: make it, or name another")


def keep_evaluation(path: Path, evaluation: KeptEvaluation) -> None:
    """Write the file, whole and on disk. Raises `ConfigError` if there is one already."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with disk_errors(path):
        if path.parent.name == FOLDER:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with open(open_own(partial, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(msgspec.json.encode(evaluation) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(partial, path)  # unlike a rename, this fails if there is a file
        except FileExistsError:
            raise ConfigError(
                f"{path} was made by another process meanwhile, and kept results are not overwritten: evaluate again, "
                "and name another file with --out"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()


def find_evaluation(named: Path) -> Path:
    """The file of kept results for `named`: itself, or the newest of a run. Raises `ConfigError` without one."""
    if named.is_file():
        return named
    if (named / "events.jsonl").is_file():
        found = sorted((named / FOLDER).glob("*.json"), key=_age)
        if not found:
            raise ConfigError(f"the run in {named} has no kept evaluation: make one with `slipstream eval {named}`")
        return found[-1]
    problem = "holds no run" if named.exists() else "does not exist"
    raise ConfigError(f"{named} {problem}: name a file that `slipstream eval` wrote, or a run with kept evaluations")


def _age(path: Path) -> tuple[int, str, int, str]:
    """Sorts by time, and files of one moment of the file system's clock as `new_place` names them."""
    second = path.stem[: len("20260101-000000")]
    return path.stat().st_mtime_ns, second, len(path.stem), path.stem


def read_evaluation(path: Path) -> KeptEvaluation:
    """Read a file of kept results. Raises `DataError` if it is damaged, of another kind or another schema."""
    try:
        with usable(path):
            data = read_regular(path)
        found = msgspec.json.decode(data, type=_Schema).schema
        if found != SCHEMA:
            raise DataError(f"{path} has results of schema {found}, and this Slipstream reads {SCHEMA}: evaluate again")
        evaluation = msgspec.json.decode(data, type=KeptEvaluation)
    except UNDECODABLE as error:
        raise DataError(f"{path} holds no kept results ({error}): name a file that `slipstream eval` wrote") from error
    if empty := next((task.id for task in evaluation.tasks if not task.samples), None):
        raise DataError(f"{path} has no sample of task {empty}: it was changed since, so evaluate again")
    if len({task.id for task in evaluation.tasks}) < len(evaluation.tasks):
        raise DataError(f"{path} has several tasks of one id: it was changed since, so evaluate again")
    return evaluation


class _Schema(msgspec.Struct):
    schema: int


def figures_of(metrics: Mapping[str, Any], group: str = "eval") -> dict[str, tuple[float, float | None, float | None]]:
    """The figures of `eval`, or of a data source, by name (`best@4`): value, and ends of the interval if it has one."""
    found: dict[str, tuple[float, float | None, float | None]] = {}
    for name, value in metrics.items():
        figure = name.removeprefix(f"{group}/")
        if figure != name and value is not None and _FIGURE.fullmatch(figure):
            found[figure] = (value, metrics.get(f"{name}_low"), metrics.get(f"{name}_high"))
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(figure: str) -> tuple[int, int]:
    kind, _, number = figure.partition("@")
    return _KINDS.index(kind), int(number)


def sources_of(metrics: Mapping[str, Any]) -> list[str]:
    """The data sources with figures of their own."""
    return [match[1] for name in metrics if (match := _SOURCE.fullmatch(name))]
