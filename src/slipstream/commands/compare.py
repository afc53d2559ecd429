"""Compares two kept evaluations task by task: whether one model is better, by how much, and what could have been found.

Tasks are paired by their id, and must have the same prompt; those that only one evaluation has are counted and left
out. Needs neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.commands.differences import PairedDifference, paired_difference
from slipstream.errors import ConfigError, DataError
from slipstream.runlog.evaluations import KeptEvaluation, KeptTask, find_evaluation, read_evaluation

_COMPARABLE = ("environment.name", "evaluation.threshold")
"""Settings without which two accuracies are not of the same thing."""
_WORTH_A_NOTE = (
    "environment.name",
    "environment.settings",
    "environment.mixture",
    "environment.system_prompt",
    "environment.num_examples",
    "environment.graded_text",
    "sampling.temperature",
    "sampling.max_tokens",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
)
_LEAST_TASKS = 2


@dataclass(frozen=True)
class Comparison:
    """B against A. Differences are B - A, accuracies from 0 to 1."""

    before: Path
    after: Path
    accuracy_before: float
    accuracy_after: float
    accuracy: PairedDifference
    reward: PairedDifference | None
    """Over the tasks of which both have a sample that could be graded."""
    by_source: dict[str, PairedDifference]
    """Accuracy, for sources with two tasks or more."""
    samples: tuple[int, int]
    """Samples of a task, in A and in B."""
    num_unpaired: tuple[int, int]
    """Tasks that only A, and only B has."""
    notes: tuple[str, ...]
    """What else differs between the two evaluations."""

    @property
    def verdict(self) -> str:
        """One sentence."""
        found = self.accuracy
        interval = f"95 % interval {100 * found.low:+.1f} to {100 * found.high:+.1f}"
        detectable = f"{100 * found.detectable:.1f} points"
        tasks = f"{found.num_tasks} tasks"
        if not found.differs:
            return (
                f"A and B cannot be told apart on {tasks}: B - A is {100 * found.value:+.1f} points ({interval}), and "
                f"a difference of {detectable} would have been found in four of five such comparisons."
            )
        better, worse = ("B", "A") if found.value > 0 else ("A", "B")
        return (
            f"{better} is better than {worse} by {100 * abs(found.value):.1f} points on {tasks} (B - A {interval}); a "
            f"difference of {detectable} would have been found in four of five such comparisons."
        )

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        result = self.accuracy
        named = "none" if not result.differs else "B" if result.value > 0 else "A"
        return {
            "verdict": self.verdict,
            "better": named,
            "a": str(self.before),
            "b": str(self.after),
            "accuracy_a": self.accuracy_before,
            "accuracy_b": self.accuracy_after,
            "accuracy": _as_json(result),
            "reward": _as_json(self.reward) if self.reward else None,
            "by_source": {source: _as_json(each) for source, each in self.by_source.items()},
            "samples_per_task": list(self.samples),
            "unpaired_tasks": list(self.num_unpaired),
            "notes": list(self.notes),
        }


def _as_json(found: PairedDifference) -> dict[str, object]:
    return {**found._asdict(), "differs": found.differs}


def compare(first: Path, second: Path) -> Comparison:
    """Compare two files of kept results, or the newest ones of two runs: `first` is A, `second` B.

    Raises `ConfigError` where there are none, and `DataError` for files that cannot be read or compared.
    """
    before, after = find_evaluation(first), find_evaluation(second)
    if before.samefile(after):
        raise ConfigError(f"A and B are both {before}: name two evaluations")
    a, b = read_evaluation(before), read_evaluation(after)
    for name in _COMPARABLE:
        ours, theirs = (_without_folder(each.settings.get(name)) for each in (a, b))
        if ours != theirs:
            raise DataError(
                f"{before} and {after} measure different things ({name} is {ours!r} in A and {theirs!r} in B): "
                "evaluate both with the same run file"
            )
    old, new = ({task.id: task for task in each.tasks} for each in (a, b))
    pairs = [(task, new[name]) for name, task in old.items() if name in new]
    _check_pairs(pairs, before, after)
    return Comparison(
        before,
        after,
        _mean([task.accuracy for task, _ in pairs]),
        _mean([task.accuracy for _, task in pairs]),
        _of_accuracy(pairs),
        _of_reward(pairs),
        _by_source(pairs),
        (_samples(a), _samples(b)),
        (len(old) - len(pairs), len(new) - len(pairs)),
        tuple(_notes(a, b, old, new, len(pairs))),
    )


def _without_folder(value: Any) -> Any:
    """A setting without the folder of a file that it names, which may be another one on another machine."""
    return value.rpartition("/")[2] if isinstance(value, str) and ".py" in value else value


def _check_pairs(pairs: list[tuple[KeptTask, KeptTask]], before: Path, after: Path) -> None:
    if len(pairs) < _LEAST_TASKS:
        raise DataError(
            f"{before} and {after} have {len(pairs)} tasks in common, by id, and a comparison needs {_LEAST_TASKS}: "
            "evaluate both on the same tasks"
        )
    if other := next((old.id for old, new in pairs if old.prompt_digest != new.prompt_digest), None):
        raise DataError(
            f"task {other} has one prompt in {before} and another in {after}, so the two are different tasks: evaluate "
            "both on the same data, with the same environment.seed"
        )


def _of_accuracy(pairs: list[tuple[KeptTask, KeptTask]]) -> PairedDifference:
    return paired_difference([old.accuracy for old, _ in pairs], [new.accuracy for _, new in pairs])


def _of_reward(pairs: list[tuple[KeptTask, KeptTask]]) -> PairedDifference | None:
    graded = [
        (ours, theirs)
        for old, new in pairs
        if (ours := _reward(old)) is not None and (theirs := _reward(new)) is not None
    ]
    if len(graded) < _LEAST_TASKS:
        return None
    return paired_difference([old for old, _ in graded], [new for _, new in graded])


def _reward(task: KeptTask) -> float | None:
    rewards = [sample.reward for sample in task.samples if sample.outcome in ("done", "truncated")]
    return _mean(rewards) if rewards else None


def _by_source(pairs: list[tuple[KeptTask, KeptTask]]) -> dict[str, PairedDifference]:
    groups: dict[str, list[tuple[KeptTask, KeptTask]]] = {}
    for old, new in pairs:
        if old.source:
            groups.setdefault(old.source, []).append((old, new))
    return {source: _of_accuracy(group) for source, group in groups.items() if len(group) >= _LEAST_TASKS}


def _notes(
    a: KeptEvaluation, b: KeptEvaluation, old: dict[str, KeptTask], new: dict[str, KeptTask], num_pairs: int
) -> list[str]:
    notes = [
        f"{name} is {a.settings.get(name)!r} in A and {b.settings.get(name)!r} in B"
        for name in _WORTH_A_NOTE
        if a.settings.get(name) != b.settings.get(name)
    ]
    if left := (len(old) - num_pairs, len(new) - num_pairs) if len(old) + len(new) > 2 * num_pairs else None:
        notes.append(f"tasks in A only: {left[0]}, in B only: {left[1]}; they are left out")
    for name, each in (("A", a), ("B", b)):
        failed = sum(sample.outcome not in ("done", "truncated") for task in each.tasks for sample in task.samples)
        if failed:
            notes.append(f"samples of {name} that failed and count as wrong: {failed}")
    return notes


def _samples(evaluation: KeptEvaluation) -> int:
    return max((len(task.samples) for task in evaluation.tasks), default=0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
