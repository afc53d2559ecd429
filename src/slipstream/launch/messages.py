"""Messages of a run: warnings go to the terminal and to `events.jsonl`, log records of the trainer become events."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from slipstream.config import RunConfig
from slipstream.launch.preflight.model_folder import hub_id
from slipstream.progress import Progress
from slipstream.runlog import RunLog

_LOGGER = logging.getLogger("slipstream.trainer")


def warn(log: RunLog, progress: Progress, text: str) -> None:
    """Write a warning into `events.jsonl` and show it."""
    log.warning(text)
    progress.message(text, "warning")


def title_of(config: RunConfig) -> str:
    """The run's title in a terminal: model, algorithm and environment."""
    title = f"{Path(hub_id(config.model.path)).name} {config.algorithm.kind}"
    return title if config.environment is None else f"{title} {config.environment.name}"


class _EventHandler(logging.Handler):
    def __init__(self, log: RunLog, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._log, self._progress = log, progress

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.WARNING:
            self._log.event("trainer", message=text)
        else:
            warn(self._log, self._progress, text)


@contextmanager
def trainer_logs_as_events(log: RunLog, progress: Progress) -> Generator[None]:
    """Inside, log records of `slipstream.trainer` from level INFO on (which kernels compute, what falls back to another
    way) become events; warnings are shown too."""
    handler, level = _EventHandler(log, progress), _LOGGER.level
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)
