"""Computes the headline numbers of a run: accuracy before and after, the gain, and the cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from slipstream.commands.differences import difference_interval
from slipstream.names import model_name
from slipstream.report.series import value_of
from slipstream.runlog import RunRecord
from slipstream.runlog.files import Row


@dataclass(frozen=True)
class Accuracy:
    """A held-out accuracy with its 95 % interval."""

    step: int
    value: float
    low: float
    high: float
    num_tasks: int

    @property
    def measured(self) -> tuple[float, float, float]:
        """Value and interval."""
        return self.value, self.low, self.high


@dataclass(frozen=True)
class Headline:
    """Numbers at the top of a report; None where the run has not recorded one."""

    before: Accuracy | None
    after: Accuracy | None
    """The last evaluation; None if only the start model was evaluated."""
    gained: tuple[float, float, float] | None
    """Difference of the accuracies, with its interval: too wide rather, as both are on the same tasks."""
    reward: tuple[float, float] | None
    """Of the first and the last step."""
    probe: float | None
    """Largest mean difference of any step."""
    dropped: int
    """Rollouts that could not be trained on."""
    skipped: int
    """Steps without any signal."""
    digest: str
    """Digest of the last version that the engine proved to hold."""


def headline(record: RunRecord) -> Headline:
    """Computes the headline from a run's rows and events."""
    measured = [found for row in record.rows if (found := _accuracy(row)) is not None]
    before = measured[0] if len(measured) > 1 or (measured and measured[0].step == 0) else None
    after = measured[-1] if measured and measured[-1] is not before else None
    rewards = _values(record, "reward/mean")
    applied = [event for event in record.events if event["kind"] == "apply"]
    version = applied[-1] if applied else {}
    return Headline(
        before=before,
        after=after,
        gained=difference_interval(before.measured, after.measured) if before and after else None,
        reward=(rewards[0], rewards[-1]) if rewards else None,
        probe=max(_values(record, "probe/abs_logprob_diff"), default=None),
        dropped=round(math.fsum(value_of(row, name) or 0.0 for row in record.rows for name in row if _is_loss(name))),
        skipped=round(sum(_values(record, "train/skipped"))),
        digest=f"{version.get('version', '')} {version.get('digest', '')}".strip(),
    )


def _is_loss(name: str) -> bool:
    """Whether it counts dropped rollouts, but for those of skipped steps, which are counted as such."""
    return name.startswith("dropped/") and name != "dropped/skipped"


def setting(record: RunRecord, name: str) -> str:
    """A setting as text, without the quotes of TOML; empty when it is not set."""
    value = next((item.value for item in record.settings if item.name == name and item.applies), "")
    return value[1:-1] if value.startswith('"') and value.endswith('"') else value


def identity(record: RunRecord) -> list[tuple[str, str]]:
    """Model, environment, data and algorithm."""
    named = [("environment", setting(record, "environment.name"))]
    if data := setting(record, "data.path"):
        named.append(("data", data))
    named.append(("algorithm", setting(record, "algorithm.kind")))
    shown = [(name, _short(value) if name != "algorithm" else value) for name, value in named if value]
    model = setting(record, "model.path")
    return [("model", model_name(model)), *shown] if model else shown


def _short(path: str) -> str:
    """The end of a long path, which distinguishes models."""
    parts = Path(path).parts
    return path if len(parts) <= 3 and not path.startswith("/") else "…/" + "/".join(parts[-3:])


def _accuracy(row: Row) -> Accuracy | None:
    value, low, high, tasks = (
        value_of(row, f"eval/{name}") for name in ("accuracy", "accuracy_low", "accuracy_high", "num_tasks")
    )
    if value is None:
        return None
    return Accuracy(row["step"], value, value if low is None else low, value if high is None else high, int(tasks or 0))


def _values(record: RunRecord, name: str) -> list[float]:
    return [value for row in record.rows if (value := value_of(row, name)) is not None]
