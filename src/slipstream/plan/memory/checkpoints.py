"""Derives when and how checkpoints are written, from the memory of a copy. Pure arithmetic, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.config import PlannedConfig
from slipstream.config.traits import uses_critic
from slipstream.errors import ConfigError
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.decided import planned_config
from slipstream.plan.facts import Facts
from slipstream.plan.memory.sizes import BYTES_OF, GIB, gib, optimizer_bytes, weights_bytes
from slipstream.plan.summary import Note, host_bytes

SNAPSHOT_PART = 1 / 2
"""Fraction of the memory left by the run; reward workers, libraries and the page cache need the rest."""
BY_CLOCK = "10min"


@dataclass(frozen=True)
class Saved:
    """Bytes of one checkpoint."""

    weights: int
    """The deployable part: the model, or an adapter."""
    state: int
    """The part for resuming."""

    @property
    def total(self) -> int:
        """Of both; a copy takes as much memory."""
        return self.weights + self.state


def saved_bytes(config: PlannedConfig, facts: Facts) -> Saved:
    """Its state is the optimizer's states without gradients, with the weights if the optimizer has no masters."""
    dtype, optimizer, adapter, model = config.model.dtype, config.training.optimizer, facts.adapter, facts.model
    trained = model.num_decoding if adapter is None else adapter.num_parameters
    state = optimizer_bytes(optimizer, trained, model if adapter is None else None) - 4 * trained
    state += BYTES_OF[dtype] * trained if optimizer == "adamw_bf16" else 0
    weights = weights_bytes(model, dtype) if adapter is None else BYTES_OF[dtype] * trained
    return Saved(weights, state * (2 if uses_critic(config) else 1))


def plan_checkpoints(builder: PlanBuilder) -> None:
    """`run.checkpoint_every` and `run.async_checkpoints`; all other uses of memory are decided."""
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
    how += f"; {run.keep_checkpoints} kept to resume from, the weights of {num_weights(config)}"
    yield Note("size of a checkpoint", round(saved.total / GIB, 2), "GiB of disk", how)


def num_weights(config: PlannedConfig) -> int:
    """Number of checkpoints with their weights kept."""
    return max(config.run.keep_weights, config.run.keep_checkpoints)
