"""State of a run at the beginning of its training loop: at the start, or after the checkpoint of an earlier attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.data.curriculum import MixtureCurriculum
from slipstream.data.draws import Draws
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.checkpoints.manifest import Identity
from slipstream.trainer.critic import Critic
from slipstream.trainer.learner import Learner


@dataclass(frozen=True)
class Resumed:
    """The loop's state at its first step; the defaults are a new run's."""

    checkpoint: Path | None = None
    step: int = 0
    """Number of batches trained on."""
    draws: Draws = field(default_factory=Draws)
    """Trained or dropped draws of the task order, if batches do not follow it."""
    trained_steps: int = 0
    steps_without_signal: int = 0
    evaluations: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """State of `Evaluations`; empty for a new run."""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """See `Session.state`."""
    trained_s: float = 0.0
    """Seconds of `training.max_seconds` used by earlier attempts of the same command."""


def load_resumed(
    store: CheckpointStore,
    checkpoint: Path,
    learner: Learner,
    critic: Critic | None,
    identity: Identity,
    curriculum: MixtureCurriculum | None = None,
    *,
    prompts_per_batch: int,
) -> Resumed:
    """Load `checkpoint` into `learner`, `critic` and `curriculum`. Raises `ConfigError` for one of another run, and
    `DamagedCheckpoint`."""
    extra = store.load(checkpoint, learner, critic)
    identity.check(extra)
    step, drawn = int(extra["step"]), extra.get("draws")
    if curriculum is not None and "curriculum" in extra:
        curriculum.load(extra["curriculum"])
    return Resumed(
        checkpoint,
        step,
        Draws.of_state(drawn) if drawn else Draws(step * prompts_per_batch),
        trained_steps=int(extra["trained_steps"]),
        steps_without_signal=int(extra["quiet_steps"]),
        evaluations=extra,
        state=extra.get("state", {}),
    )
