"""Divides GPUs, and the memory of a GPU, between trainer and engine: pure arithmetic, in bytes.

A shared GPU holds two CUDA contexts, the trainer's state (weights, masters, moments, gradients) and the engine's
weights; activations and KV cache get the rest. If both do not fit side by side, the engine sleeps while the trainer
works: then the trainer has all memory but the sleeping engine's context, and while the engine is awake the trainer
holds its state and what the probe needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.plan.facts import Facts
from slipstream.plan.memory.sizes import GIB

USABLE = 0.96
"""Fraction of a GPU's memory that is planned with; the driver and fragmentation take the rest."""
ENGINE_RESERVE = 4 * GIB
"""vLLM without weights and KV cache: CUDA context, CUDA graphs, activations of a step, the buckets of `broadcast`."""
ASLEEP_RESERVE = 3 * GIB
"""What a sleeping engine keeps: CUDA context, CUDA graphs and their memory."""
TRAINER_RESERVE = 2 * GIB
"""The trainer's CUDA context and workspaces, the buckets of `broadcast`, and fragmentation."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of trainer and engines, by number."""

    trainer: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    """Of each engine."""


def place(
    *, ranks: int = 1, replicas: int = 1, tensor_parallel_size: int = 1, separate: bool, gpus_per_node: int = 0
) -> Placement:
    """Assign the first GPUs to the trainer's ranks, and to engines the next ones if `separate`, else the first ones,
    too. Nodes have `gpus_per_node` each, if it is not 0; an engine's are on one node."""
    first, engines = ranks if separate else 0, list[tuple[int, ...]]()
    for _ in range(replicas):
        if gpus_per_node and first % gpus_per_node + tensor_parallel_size > gpus_per_node:
            first += -first % gpus_per_node
        engines.append(tuple(range(first, first + tensor_parallel_size)))
        first += tensor_parallel_size
    return Placement(tuple(range(ranks)), tuple(engines))


def num_gpus_needed(placement: Placement) -> int:
    """How many GPUs `placement` needs."""
    return 1 + max(gpu for gpus in (placement.trainer, *placement.engines) for gpu in gpus)


def replicas_that_fit(num_gpus: int, *, ranks: int = 1, tensor_parallel_size: int = 1, gpus_per_node: int = 0) -> int:
    """How many engines the GPUs hold that the trainer's ranks leave."""
    if ranks >= num_gpus:
        return 0
    each = gpus_per_node or num_gpus
    beside_ranks, others = -ranks % each, (num_gpus - ranks) // each
    return beside_ranks // tensor_parallel_size + others * (each // tensor_parallel_size)


@dataclass(frozen=True)
class Needs:
    """What trainer and engine need to work at full speed, in bytes."""

    state: int
    """The trainer's weights, masters, moments and gradients."""
    activations: int
    """Of a row with the longest sequence at least."""
    probe: int
    """The trainer's forward pass over a sequence of the probe, while the engine is awake."""
    weights: int
    """The engine's."""
    cache: int
    """KV cache of all sequences that are worth generating at once."""
    teacher: int = 0
    """A teacher's engine on the same GPU as the policy's; it never sleeps."""


@dataclass(frozen=True)
class Split:
    """Most memory that each may have, in bytes."""

    cache: int
    activations: int
    sleeps: bool
    fits: bool
    """Whether all of `Needs` fits."""


def usable_bytes(facts: Facts) -> int:
    """Bytes of a GPU that a run is planned with."""
    return max(0, int(facts.gpu_memory_bytes * USABLE) - facts.gpu_held_bytes)


def split_gpu_memory(usable: int, needs: Needs, *, shared: bool, may_sleep: bool, must_sleep: bool = False) -> Split:
    """Divide the `usable` bytes of a GPU (of two if not `shared`); each side may have all that the other does not
    need."""
    engine, trainer = needs.weights + ENGINE_RESERVE, needs.state + TRAINER_RESERVE
    if not shared:
        return _split(usable - engine - needs.teacher, usable - trainer, needs, sleeps=False)
    usable -= needs.teacher
    left = usable - engine - trainer
    side_by_side = _split(left - needs.activations, left - needs.cache, needs, sleeps=False)
    if must_sleep or (may_sleep and not side_by_side.fits):
        return _split(left - needs.probe, usable - trainer - ASLEEP_RESERVE, needs, sleeps=True)
    if side_by_side.fits:
        return side_by_side
    cache = min(needs.cache, max(left - needs.activations, left // 4))
    return _split(cache, left - cache, needs, sleeps=False)


def _split(cache: int, activations: int, needs: Needs, *, sleeps: bool) -> Split:
    fits = cache >= needs.cache and activations >= needs.activations
    return Split(max(0, cache), max(0, activations), sleeps, fits)
