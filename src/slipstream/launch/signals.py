"""Handles Ctrl-C and SIGTERM: the first asks the run to stop at the next safe point, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context in which the first signal sets a flag and calls `on_first`; `at_once` is called before a second one
    ends the process."""

    def __init__(self, at_once: Callable[[], None] = lambda: None, on_first: Callable[[], None] = lambda: None) -> None:
        self.at_once = at_once
        self.on_first = on_first
        self._requested = threading.Event()
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self._requested.is_set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested.is_set():
            self.at_once()
            os._exit(128 + number)
        self._requested.set()
        self.on_first()

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._before[number])  # pyright: ignore[reportArgumentType]
