"""The part of the plan that chooses the bridge. Pure.

On one card the trainer trains the engine's own tensors (`single_copy`) wherever nothing is in the way: then no byte
moves and the weights are in memory once. Only `disk` lets the engine sleep while the trainer works, so where both sides
do not fit beside each other the one that leaves more room is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.launch.plan.builder import Draft
from slipstream.launch.plan.memory.gpu_shares import Needs, Split
from slipstream.launch.plan.memory.sizes import gib
from slipstream.launch.plan.memory.split import needs_of, split_of
from slipstream.launch.plan.placement import one_copy_obstacle


def plan_bridge(draft: Draft) -> None:
    """`weights.bridge`; lengths, placement and `training.compile` are decided."""
    if draft["weights.bridge"] == "auto":
        draft.derive("weights.bridge", *_choice(draft))
    if draft["weights.bridge"] == "lora" and draft["model.dtype"] == "float32" and not draft.on_cpu:
        raise ConfigError(
            'model.dtype = "float32" does not go with weights.bridge = "lora" on a GPU, where vLLM has adapters '
            'in 16 bits: use model.dtype = "bfloat16", or weights.bridge = "disk", which merges them'
        )


def _choice(draft: Draft) -> tuple[str, str]:
    lora = draft.original.lora
    if lora is not None and not lora.dora:
        return "lora", "[lora] is set: only the adapter is published"
    if draft["run.placement"] == "separate":
        return "broadcast", "from GPU to GPU"
    files = "files loaded into the running engine"
    if draft.on_cpu:
        return "disk", f"{files}; there is no GPU"
    if obstacle := one_copy_obstacle(draft):
        return "disk", f"{files}; not single_copy, as {obstacle}"
    one, two = _room(draft, "single_copy"), _room(draft, "disk")
    what = "trainer and engine have one copy of the weights, and nothing moves in an update"
    if one.split.fits or not two.split.sleeps or draft.original.training.ranks > 1:
        return "single_copy", f"{what}; it leaves {one.told}"
    both = f"single_copy leaves {one.told}; disk, where the engine sleeps while the trainer works, {two.told}"
    if one.part >= two.part:
        return "single_copy", f"{what}: {both}"
    return "disk", f"{files}, as that leaves more room: {both}"


@dataclass(frozen=True)
class _Room:
    """What a bridge leaves on a shared card."""

    needs: Needs
    split: Split

    @property
    def part(self) -> float:
        """Of what is wanted of the scarcer of the two, at most 1."""
        return min(
            1.0,
            self.split.cache / max(1, self.needs.cache),
            self.split.activations / max(1, self.needs.activations),
        )

    @property
    def told(self) -> str:
        cache, activations = (
            f"{gib(there)} of {gib(wanted)}" if there < wanted else f"{gib(there)}"
            for there, wanted in (
                (self.split.cache, self.needs.cache),
                (self.split.activations, self.needs.activations),
            )
        )
        return f"up to {cache} for KV cache and {activations} for activations"


def _room(draft: Draft, bridge: str) -> _Room:
    return _Room(needs_of(draft, bridge), split_of(draft, bridge))
