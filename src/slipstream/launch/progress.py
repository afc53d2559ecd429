"""The terminal, as a run sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from slipstream.config import RunConfig
from slipstream.launch.preflight.model_folder import hub_id
from slipstream.runlog import RunLog


class Progress(Protocol):
    """The terminal, as a run uses it."""

    def start(self, title: str, total_steps: int, step: int = 0) -> None:
        """The run begins."""
        ...

    def ready(self) -> None:
        """All is loaded: the pace of the steps is counted from here."""
        ...

    def phase(self, name: str, total: int | None = None) -> None:
        """What is going on now."""
        ...

    def advance(self, n: int = 1) -> None:
        """Part of the phase is done."""
        ...

    def end_phase(self) -> None:
        """The calling thread's phase is over."""
        ...

    def step(self, step: int, metrics: Any) -> None:
        """A step is done."""
        ...

    def message(self, text: str, level: Any = "info") -> None:
        """Something worth reading."""
        ...

    def stop(self) -> None:
        """The run is over."""
        ...


def warn(log: RunLog, progress: Progress, text: str) -> None:
    """Tell it to people, now and afterwards."""
    log.warning(text)
    progress.message(text, "warning")


def title_of(config: RunConfig) -> str:
    """What a run is called in a terminal."""
    title = f"{Path(hub_id(config.model.path)).name} {config.algorithm.kind}"
    return title if config.environment is None else f"{title} {config.environment.name}"
