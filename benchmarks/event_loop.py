"""Calls into the event loop of another thread."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from slipstream.orchestrator.thread import EventLoopThread, wait_for

T = TypeVar("T")


def call(
    thread: EventLoopThread, work: Coroutine[Any, Any, T], timeout_s: float, waits_for: str, *, may_stop: bool = True
) -> T:
    """Run `work` in the event loop and wait for its result; see `wait_for`."""
    return wait_for(thread.submit(work), timeout_s, waits_for, should_stop=thread.should_stop, may_stop=may_stop)
