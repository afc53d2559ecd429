"""Checks that the disk of the run folder holds the planned checkpoints. Pure arithmetic, in bytes."""

from __future__ import annotations

from slipstream.config import PlannedConfig
from slipstream.config.traits import uses_engine
from slipstream.plan.facts import Facts
from slipstream.plan.memory.checkpoints import num_weights, saved_bytes
from slipstream.plan.memory.sizes import gib, weights_bytes

NEARLY_FULL = 0.9
"""Fraction of the free disk space; beyond it there is a warning."""
_VERSIONS = 3
"""Published versions on disk: the two newest, and the next while it is written; one more is evaluated beside
training."""


def check_disk(config: PlannedConfig, facts: Facts) -> tuple[list[str], list[str]]:
    """Warnings of a disk possibly too full, and refusals of one certainly too full: with the checkpoints
    of every run."""
    disk = facts.disk
    if disk is None:
        return [], []
    every, steps, saved = config.run.checkpoint_every, config.training.steps, saved_bytes(config, facts)
    surely = -(-steps // every) if isinstance(every, int) else 1
    least, most = _on_disk(config, facts, surely), _on_disk(config, facts, steps + 1)
    free = disk.free_bytes + disk.own_bytes
    sizes = f"{gib(saved.total)} each, {gib(saved.weights)} of it weights"
    several = [name for name in ("keep_checkpoints", "keep_weights") if getattr(config.run, name) > 1]
    remedy = " or ".join(["make room, or name another run.folder", *(f"lower run.{name}" for name in several)])
    where = f"of the disk of the run folder ({sizes}), and {gib(free)} are free there: {remedy}"
    if least > free:
        return [], [f"checkpoints and published versions take {gib(least)} {where}"]
    if most > NEARLY_FULL * free:
        return [f"checkpoints and published versions may take {gib(most)} {where}"], []
    return [], []


def _on_disk(config: PlannedConfig, facts: Facts, num_made: int) -> int:
    """Most bytes there in a run with so many checkpoints: of the kept ones, and of one being written."""
    saved, kept = saved_bytes(config, facts), num_weights(config)
    num_whole = min(num_made, config.run.keep_checkpoints + 1)
    num_bare = min(num_made - num_whole, kept - config.run.keep_checkpoints)
    beside = config.evaluation is not None and config.evaluation.beside
    if config.evaluation is not None and config.evaluation.patience is not None:
        num_bare += num_made > kept + 1  # the best one
        num_bare += beside and num_made > kept + 2  # a possible best one
    published = weights_bytes(facts.model, config.model.dtype)
    published *= uses_engine(config) and config.weights.bridge in ("disk", "restart")
    versions = min(_VERSIONS + beside, config.training.steps + 1) * published
    return num_whole * saved.total + num_bare * saved.weights + versions
