"""vLLM's coordinator of several engine cores, a process without plugins, ends with its parent.

A killed server would leave it behind.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc

from slipstream.processes import lifeline

_run_of_vllm = DPCoordinatorProc.run_coordinator


def run_coordinator(*arguments: Any, **named: Any) -> None:
    """Be the coordinator."""
    lifeline.follow_parent()
    _run_of_vllm(*arguments, **named)


def follow_parent() -> None:
    """Have coordinators end with this process."""
    setattr(DPCoordinatorProc, "run_coordinator", staticmethod(run_coordinator))  # noqa: B010
