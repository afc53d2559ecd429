"""Exceptions: each is a failure that the user can meet, with the exit code of the process that it ends.

A message is one sentence with the value, the reason and the remedy. Any other exception that reaches the command line
is a bug and shows its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

FailureClass = Literal[
    "bug",
    "config",
    "data",
    "disk",
    "engine",
    "environment",
    "guard",
    "memory",
    "orchestrator",
    "rank",
    "stopped",
    "trainer",
]
"""What kind of thing ended a run; `guard`: a check that the run computes what it should."""
_MAX_CHARACTERS = 300
SECTIONS = (
    *("algorithm", "cluster", "critic", "data", "environment", "evaluation", "inference", "lora", "matching"),
    *("model", "preferences", "redis", "run", "sampling", "teacher", "training", "weights"),
)
"""Sections of a run file."""
_NAME = rf"(?:{'|'.join(SECTIONS)})(?:\.(?!toml\b|jsonl?\b|parquet\b|txt\b|py\b)\w+)+"
_WITH_VALUE = re.compile(rf"(?<![\w./-])({_NAME})(?:\[\d+\])? = ")
_AT_FIRST = re.compile(rf"({_NAME})(?![\w.])")


class SlipstreamError(Exception):
    """Base of every error whose message is meant for the user."""

    exit_code = 1
    failure_class: FailureClass = "disk"
    is_retriable = False
    """Whether the same command with --resume may succeed, without anybody changing anything."""

    @property
    def setting(self) -> str:
        """The first setting with a value in the message, such as `training.ranks`, else the one it begins with."""
        found = _WITH_VALUE.search(str(self)) or _AT_FIRST.match(str(self))
        return found[1] if found else ""


class ConfigError(SlipstreamError):
    """The run file, an override or the command line is wrong: nothing has been started."""

    exit_code = 2
    failure_class = "config"


class DataError(SlipstreamError):
    """A task, a row or a prompt cannot be used."""

    exit_code = 3
    failure_class = "data"


class EnvironmentFault(SlipstreamError):
    """The environment's own code failed, or its rewards do not separate right from wrong answers."""

    exit_code = 4
    failure_class = "environment"


class EngineError(SlipstreamError):
    """The inference engine did not start, died, or refused a request."""

    exit_code = 5
    failure_class = "engine"
    is_retriable = True


class DeadlineError(EngineError):
    """A wait exceeded its deadline; the message names the process that was waited for."""


class WeightsError(SlipstreamError):
    """The engine's weights are not the ones that were published."""

    exit_code = 6
    failure_class = "guard"


class IntegrityError(SlipstreamError):
    """The engine's report on its tokens contradicts itself, so none of it can be trained on."""

    exit_code = 6
    failure_class = "guard"


class TrainingError(SlipstreamError):
    """The optimizer step would have no signal, or a value is not finite."""

    exit_code = 7
    failure_class = "guard"


class ZeroGradientError(TrainingError):
    """All gradients are zero."""


class MismatchError(TrainingError):
    """Engine and trainer give the same tokens different log-probabilities."""


class RankError(SlipstreamError):
    """One of several trainer processes died, failed or did not answer."""

    exit_code = 8
    failure_class = "rank"
    is_retriable = True


class RankDeadlineError(RankError):
    """A wait for other trainer processes exceeded `training.rank_timeout_s`."""


class OrchestratorError(SlipstreamError):
    """The process in which rollouts are generated died or did not answer."""

    exit_code = 10
    failure_class = "orchestrator"
    is_retriable = True

    def __init__(self, *arguments: object, was_killed: bool = False) -> None:
        super().__init__(*arguments)
        self.was_killed = was_killed
        """Whether somebody else has ended or stopped it by a signal, which says nothing of what it was doing."""


class TrainerLost(SlipstreamError):
    """The trainer's process was killed or stood still, and its supervisor does not start it again."""

    failure_class = "trainer"
    is_retriable = True

    def __init__(self, *arguments: object, exit_code: int = 1) -> None:
        super().__init__(*arguments)
        self.exit_code = exit_code
        """128 and the number of the signal."""


class OutOfMemory(SlipstreamError):
    """The trainer, an engine or another process of the run ran out of memory."""

    exit_code = 9
    failure_class = "memory"
    is_retriable = True


class Interrupted(SlipstreamError):
    """Ctrl-C, SIGTERM or SIGUSR1: the child processes were stopped, after a checkpoint was written if there was time
    for it (`run.grace_s`)."""

    exit_code = 130
    failure_class = "stopped"
    is_retriable = True


class StartsAgain(Exception):
    """The run in `folder` is to be resumed (`--resume`) in a fresh process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"run {folder} starts again")
        self.folder = folder
        self.arguments: list[str] = []
        """Arguments of the command that resumes it, if there is a command."""


def named_error(name: str, text: str) -> SlipstreamError | None:
    """The error of another process, by its class's name; None for a class of others, or without a text alone."""
    kinds = [SlipstreamError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__name__ == name:
            with contextlib.suppress(TypeError):
                return kind(text)
    return None


def first_line(error: BaseException) -> str:
    """The first line of the error's message, at most 300 characters; the name of its class if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:_MAX_CHARACTERS] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """The error's class and its whole message on one line, the message cut at 300 characters: for errors of compilers
    and of the Hugging Face Hub, whose first line often does not hold the reason."""
    message = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?`, or the known names where none is close, at most ten of them."""
    names = sorted(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f": did you mean {close[0]!r}?"
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f": use one of {shown}" if names else ""
