"""Derives when and how checkpoints are written, from the memory of a copy and the space on the disk of the run folder.
Pure arithmetic, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.config import PlannedConfig
from slipstream.config.traits import planned_config, uses_critic, uses_engine
from slipstream.errors import ConfigError
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.facts import Facts
from slipstream.plan.memory.sizes import BYTES_OF, GIB, gib, optimizer_bytes, weights_bytes
from slipstream.plan.summary import Note, host_bytes

SNAPSHOT_PART = 1 / 2
"""Fraction of the memory that the run leaves; reward workers, libraries and the page cache need the rest."""
NEARLY_FULL = 0.9
"""Fraction of the free disk space beyond which there is a warning."""
BY_CLOCK = "10min"
_VERSIONS = 3
"""Published versions on disk: the two newest, and the next while it is written; one more is evaluated beside
training."""


@dataclass(frozen=True)
class Saved:
    """Bytes of one checkpoint."""

    weights: int
    """What can be deployed: the model, or an adapter."""
    state: int
    """What resuming needs."""

    @property
    def total(self) -> int:
        """Of both; as much memory as a copy takes."""
        return self.weights + self.state


def saved_bytes(config: PlannedConfig, facts: Facts) -> Saved:
    """The optimizer's state is what it keeps, but for the gradients, and with
    the weights where it has no masters."""
    dtype, optimizer, adapter, model = config.model.dtype, config.training.optimizer, facts.adapter, facts.model
    trained = model.num_decoding if adapter is None else adapter.num_parameters
    state = optimizer_bytes(optimizer, trained, model if adapter is None else None) - 4 * trained
    state += BYTES_OF[dtype] * trained if optimizer == "adamw_bf16" else 0
    weights = weights_bytes(model, dtype) if adapter is None else BYTES_OF[dtype] * trained
    return Saved(weights, state * (2 if uses_critic(config) else 1))


def plan_checkpoints(builder: PlanBuilder) -> None:
    """`run.checkpoint_every` and `run.async_checkpoints`; everything else that takes memory is decided."""
    reason = "one every ten minutes of training, rarer while they take more than 3 % of the time; and the last"
    builder.derive_auto("run.checkpoint_every", BY_CLOCK, reason)
    config, facts, asked = planned_config(builder.config()), builder.facts, builder["run.async_checkpoints"]
    needed, ranks = saved_bytes(config, facts).total, config.training.ranks
    if ranks > 1:
        if asked is True:
            raise ConfigError(
                f"run.async_checkpoints = true goes with one rank, and each of training.ranks = {ranks} writes its own "
                "share while training waits: remove it"
            )
        builder.derive_auto(
            "run.async_checkpoints", False, f"training waits while each of {ranks} ranks writes its share"
        )
        return
    left = facts.memory_bytes - host_bytes(config, facts)
    budget = max(0, left) * SNAPSHOT_PART
    if asked is True and needed > left:
        builder.refusals.append(
            f"run.async_checkpoints = true needs {gib(needed)} of the machine's memory for a copy of what is saved, "
            f"and {gib(max(0, left))} are left: remove it"
        )
    fits = needed <= budget
    reason = f"a copy of what is saved takes {gib(needed)} of the machine's memory, of which {gib(budget)} can be used"
    builder.derive_auto(
        "run.async_checkpoints", fits, reason if fits else f"{reason}: training waits for each checkpoint"
    )


def checkpoint_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """Size and number of checkpoints."""
    saved, run = saved_bytes(config, facts), config.run
    how = f"weights {gib(saved.weights)}, resume state {gib(saved.state)}; "
    if run.async_checkpoints is True:
        how += f"written while training goes on, from a copy in the machine's memory ({gib(saved.total)})"
    else:
        how += "training waits while it is written"
    how += f"; {run.keep_checkpoints} kept to resume from, the weights of {_num_weights(config)}"
    yield Note("size of a checkpoint", round(saved.total / GIB, 2), "GiB of disk", how)


def check_disk(config: PlannedConfig, facts: Facts) -> tuple[list[str], list[str]]:
    """Warnings of a disk that may get too full, and refusals of one that certainly gets too full: with the checkpoints
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


def _num_weights(config: PlannedConfig) -> int:
    return max(config.run.keep_weights, config.run.keep_checkpoints)


def _on_disk(config: PlannedConfig, facts: Facts, num_made: int) -> int:
    """The most that lies there in a run of so many checkpoints: those that are kept, and one that is being written."""
    saved, num_weights = saved_bytes(config, facts), _num_weights(config)
    num_whole = min(num_made, config.run.keep_checkpoints + 1)
    num_bare = min(num_made - num_whole, num_weights - config.run.keep_checkpoints)
    beside = config.evaluation is not None and config.evaluation.beside
    if config.evaluation is not None and config.evaluation.patience is not None:
        num_bare += num_made > num_weights + 1  # the best one
        num_bare += beside and num_made > num_weights + 2  # one that may be it
    published = weights_bytes(facts.model, config.model.dtype)
    published *= uses_engine(config) and config.weights.bridge in ("disk", "restart")
    versions = min(_VERSIONS + beside, config.training.steps + 1) * published
    return num_whole * saved.total + num_bare * saved.weights + versions
