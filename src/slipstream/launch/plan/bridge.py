"""Chooses `weights.bridge`. Pure.

On a shared GPU the default is `single_copy`, under which the trainer trains the engine's own tensors: no update moves a
byte, and the weights are in memory once. `disk` is the only other bridge there, and the engine can sleep under it while
the trainer works; it is chosen if trainer and engine do not fit side by side and it leaves more memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.launch.plan.builder import PlanBuilder
from slipstream.launch.plan.memory.gpu_shares import Needs, Split
from slipstream.launch.plan.memory.sizes import gib
from slipstream.launch.plan.memory.split import memory_needs, memory_split
from slipstream.launch.plan.placement import one_copy_obstacle


def plan_bridge(builder: PlanBuilder) -> None:
    """Derive `weights.bridge`, after lengths, placement and `training.compile`."""
    if builder["weights.bridge"] == "auto":
        builder.derive("weights.bridge", *_choice(builder))
    if builder["weights.bridge"] == "lora" and builder["model.dtype"] == "float32" and not builder.on_cpu:
        raise ConfigError(
            'model.dtype = "float32" does not go with weights.bridge = "lora" on a GPU, where vLLM has adapters '
            'in 16 bits: use model.dtype = "bfloat16", or weights.bridge = "disk", which merges them'
        )


def _choice(builder: PlanBuilder) -> tuple[str, str]:
    lora = builder.original.lora
    if lora is not None and not lora.dora:
        return "lora", "[lora] is set: only the adapter is published"
    if builder["run.placement"] == "separate":
        return "broadcast", "from GPU to GPU"
    files = "files loaded into the running engine"
    if builder.on_cpu:
        return "disk", f"{files}; there is no GPU"
    if obstacle := one_copy_obstacle(builder):
        return "disk", f"{files}; not single_copy, as {obstacle}"
    one, two = (_Left(memory_needs(builder, name), memory_split(builder, name)) for name in ("single_copy", "disk"))
    what = "trainer and engine have one copy of the weights, and nothing moves in an update"
    if one.split.fits or not two.split.sleeps or builder.original.training.ranks > 1:
        return "single_copy", f"{what}; it leaves {one.text}"
    both = f"single_copy leaves {one.text}; disk, where the engine sleeps while the trainer works, {two.text}"
    if one.fraction >= two.fraction:
        return "single_copy", f"{what}: {both}"
    return "disk", f"{files}, as that leaves more memory: {both}"


@dataclass(frozen=True)
class _Left:
    """Memory that a bridge leaves on a shared GPU for KV cache and activations, beside what they need."""

    needs: Needs
    split: Split

    @property
    def fraction(self) -> float:
        """The smaller of the two fractions of what is needed, at most 1."""
        return min(
            1.0,
            self.split.cache / max(1, self.needs.cache),
            self.split.activations / max(1, self.needs.activations),
        )

    @property
    def text(self) -> str:
        cache, activations = (
            f"{gib(there)} of {gib(wanted)}" if there < wanted else f"{gib(there)}"
            for there, wanted in (
                (self.split.cache, self.needs.cache),
                (self.split.activations, self.needs.activations),
            )
        )
        return f"up to {cache} for KV cache and {activations} for activations"
