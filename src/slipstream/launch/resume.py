"""What is looked at before a run is resumed: whether anything is left to do, and which settings changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.config import RunConfig
from slipstream.errors import ConfigError


def refuse_to_resume(folder: Path, config: RunConfig) -> None:
    """Raises `ConfigError` for a run that cannot go on or has nothing left to do, before anything of it is touched."""
    from slipstream.trainer.checkpoint import CheckpointStore
    from slipstream.trainer.early_stop import EarlyStop

    latest = CheckpointStore(folder / "checkpoints").latest()
    if latest is None:
        return
    CheckpointStore.check_format(latest)
    extra = CheckpointStore.read_extra(latest)
    step, watch = int(extra["step"]), EarlyStop(config.evaluation)
    watch.load(extra.get("early_stop", {}))
    # A run that was stopped in its last evaluation still has that to do.
    is_evaluated = config.evaluation is None or int(extra["evaluated_step"]) >= step
    if step >= config.training.steps and is_evaluated:
        raise ConfigError(f"run {folder} has already made its {step} steps: raise training.steps to go on")
    if watch.reason:
        raise ConfigError(f"run {folder} has ended at step {step}, as {watch.reason}: change that setting to go on")


def changed_settings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Which settings two resolved configs differ in."""
    names = [name for name in {**before, **after} if name != "run.folder" and before.get(name) != after.get(name)]
    return [f"{name} was {before.get(name, 'not set')} and is {after.get(name, 'not set')}" for name in names]
