"""Who gets how much of a GPU's memory: pure arithmetic on a draft of the plan's numbers, in bytes.

A shared card holds, beside two CUDA contexts, the trainer's state (weights, masters, moments, gradients) and the
engine's weights, and what is left goes to activations and KV cache. Where both do not fit side by side they take turns:
while the engine sleeps the trainer has all but the context of it, and while it is awake the trainer keeps its state and
what the probe needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.launch.plan.memory.sizes import GIB

USABLE = 0.96
"""Part of a card that is planned with: the rest is the driver's, and what allocators cannot use."""
ENGINE_RESERVE = 4 * GIB
"""vLLM beside weights and KV cache: CUDA context, CUDA graphs, one step's activations, the buckets of `broadcast`."""
ASLEEP_RESERVE = 3 * GIB
"""What stays of a sleeping engine: its context, its CUDA graphs and their memory."""
TRAINER_RESERVE = 2 * GIB
"""CUDA context and workspaces, the buckets of `broadcast`, and blocks that the allocator cannot use."""


@dataclass(frozen=True)
class Placement:
    """Whose each card is, by its number."""

    trainer: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    """Of each engine."""


def place(*, ranks: int = 1, replicas: int = 1, tensor_parallel_size: int = 1, separate: bool) -> Placement:
    """The first cards are the trainer's, one for each of its ranks. Engines have theirs after them, or where they are
    not `separate` from the first on."""
    first = ranks if separate else 0
    cards = range(first, first + replicas * tensor_parallel_size)
    starts = range(0, len(cards), tensor_parallel_size)
    engines = tuple(tuple(cards[start : start + tensor_parallel_size]) for start in starts)
    return Placement(tuple(range(ranks)), engines)


def num_cards(placement: Placement) -> int:
    """How many there must be."""
    return 1 + max(card for cards in (placement.trainer, *placement.engines) for card in cards)


def replicas_beside(num_cards: int, *, ranks: int = 1, tensor_parallel_size: int = 1) -> int:
    """How many engines the cards hold that the trainer leaves."""
    return max(0, num_cards - ranks) // tensor_parallel_size


@dataclass(frozen=True)
class Needs:
    """What the two would like to have."""

    state: int
    """The trainer's weights, masters, moments and gradients."""
    activations: int
    """Of the longest sequence, at least."""
    probe: int
    """The trainer's forward pass over one sequence of the probe, while the engine is awake."""
    weights: int
    """The engine's."""
    cache: int
    """KV cache of all sequences that are worth generating at once."""
    teacher: int = 0
    """All of a teacher's engine on the same card as the policy's; it never sleeps."""


@dataclass(frozen=True)
class Split:
    """What each may have at most."""

    cache: int
    activations: int
    sleeps: bool
    fits: bool
    """Whether everything that `Needs` names is there."""


def split_card(card: int, needs: Needs, *, shared: bool, may_sleep: bool, must_sleep: bool = False) -> Split:
    """Divide one card of `card` bytes (two, when not `shared`), of which each side may take all that the other
    cannot use."""
    usable = int(card * USABLE)
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
