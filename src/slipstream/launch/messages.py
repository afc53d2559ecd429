"""Messages of a run: its title, and the trainer's log records as events."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from slipstream.config import RunConfig
from slipstream.names import model_name
from slipstream.runlog import RunLog

_LOGGER = logging.getLogger("slipstream.trainer")


def title_of(config: RunConfig) -> str:
    """The run's title in a terminal: model, algorithm and environment."""
    title = f"{model_name(config.model.path)} {config.algorithm.kind}"
    return title if config.environment is None else f"{title} {config.environment.name}"


class _EventHandler(logging.Handler):
    def __init__(self, log: RunLog) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.WARNING:
            self._log.event("trainer", message=text)
        else:
            self._log.warning(text)


@contextmanager
def trainer_logs_as_events(log: RunLog) -> Generator[None]:
    """Inside, log records of `slipstream.trainer` from level INFO on (which kernels compute, what falls back to another
    way) become events, or warnings of the run."""
    handler, level = _EventHandler(log), _LOGGER.level
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)
