"""What a finished run leaves, and where."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.launch.prepare import Prepared
    from slipstream.orchestrator.evaluate import Evaluation


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves."""

    folder: Path
    steps: int
    evaluation: Evaluation | None
    checkpoint: Path | None
    """Deployable weights of the last step."""
    best: Path | None = None
    """With `evaluation.patience`: those of the most accurate step."""


def run_folder_of(prepared: Prepared, name: str) -> Path:
    """`run.folder`, or a new one below `runs/` named after the run file and the time."""
    folder = prepared.config.run.folder
    return folder if folder is not None else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
