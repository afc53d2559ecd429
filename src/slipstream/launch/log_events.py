"""What the trainer's modules log, as events of the run: which kernels compute, and what falls back to another way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from slipstream.runlog import RunLog

_LOGGER = logging.getLogger("slipstream.trainer")


class _Events(logging.Handler):
    def __init__(self, log: RunLog, show: Callable[[str, str], None]) -> None:
        super().__init__(logging.INFO)
        self._log, self._show = log, show

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.WARNING:
            self._log.event("trainer", message=text)
            return
        self._log.warning(text)
        self._show(text, "warning")


@contextmanager
def logged_as_events(log: RunLog, show: Callable[[str, str], None]) -> Generator[None]:
    """Inside, what is logged from level INFO on is in `events.jsonl`, and warnings are shown too (`show`: text and
    level)."""
    handler, level = _Events(log, show), _LOGGER.level
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)
