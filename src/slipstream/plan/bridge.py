"""Chooses `weights.bridge`, and whether an engine can evaluate while others go on. Pure.

On a shared GPU the default is `single_copy`: the trainer trains the engine's own tensors, no update moves a byte, and
the weights are in memory once. `disk` is the only other bridge there; under it the engine can sleep while the trainer
works. It is chosen if trainer and engine do not fit side by side and it leaves more memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.traits import keeps_versions
from slipstream.errors import ConfigError
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.memory.gpu_shares import Needs, Split
from slipstream.plan.memory.sizes import gib
from slipstream.plan.memory.split import memory_needs, memory_split
from slipstream.plan.placement import one_copy_obstacle

NOT_ADAPTED = ("Gemma3ForConditionalGeneration",)
"""Models with different names for the vision tower's layers in transformers and vLLM."""


def plan_bridge(builder: PlanBuilder) -> None:
    """Derive `weights.bridge`, after lengths, placement and `training.compile`."""
    if builder["weights.bridge"] == "auto":
        builder.derive("weights.bridge", *_choice(builder))
    if (obstacle := _adapter_obstacle(builder)) and builder["weights.bridge"] in ("lora", "single_copy"):
        raise ConfigError(
            f'weights.bridge = "{builder["weights.bridge"]}" publishes the adapter alone, and {obstacle}: use "disk" '
            'or "broadcast", which merge it, or set model.train_tower = false'
        )
    if builder["weights.bridge"] == "lora" and builder["model.dtype"] == "float32" and not builder.on_cpu:
        raise ConfigError(
            'model.dtype = "float32" does not go with weights.bridge = "lora" on a GPU, where vLLM has adapters '
            'in 16 bits: use model.dtype = "bfloat16", or weights.bridge = "disk", which merges them'
        )


def _choice(builder: PlanBuilder) -> tuple[str, str]:
    lora, obstacle = builder.original.lora, _adapter_obstacle(builder)
    if builder.facts.servers:
        return "broadcast", "from memory to memory: servers may see no folder of the run"
    if obstacle:
        how = f"the adapter is merged into the model: {obstacle}"
        return ("broadcast" if builder["run.placement"] == "separate" else "disk"), how
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


def _adapter_obstacle(builder: PlanBuilder) -> str:
    """Why vLLM cannot have the adapter beside the model; empty if it can, or without one."""
    kind, config = builder.facts.model.architecture, builder.original
    if config.lora is not None and config.model.train_tower and kind in NOT_ADAPTED:
        return f"vLLM has other names for the layers of {kind}'s vision tower"
    return ""


def plan_beside(builder: PlanBuilder) -> None:
    """Derive `evaluation.beside`, after the bridge, replicas and sleep. Raises ConfigError if it is requested and
    impossible."""
    evaluation = builder.original.evaluation
    if evaluation is None:
        return
    if obstacle := _beside_obstacle(builder):
        if evaluation.beside is True:
            raise ConfigError(
                f"evaluation.beside = true needs an engine that can stay on its version: {obstacle}; change that, or "
                "leave evaluation.beside out, and training waits for evaluations"
            )
        builder.derive_auto("evaluation.beside", False, f"training waits for evaluations: {obstacle}")
        return
    if not builder.original.training.staleness:
        reason = "training waits for evaluations: without training.staleness the course of a run depends on no timing"
        builder.derive_auto("evaluation.beside", False, f"{reason}; true would have one engine evaluate meanwhile")
        return
    for name in ("stop_at", "patience"):
        if getattr(evaluation, name) is not None:
            reason = f"training waits for evaluations: evaluation.{name} may end the run by what they say"
            builder.derive_auto("evaluation.beside", False, f"{reason}; true would end it some steps later")
            return
    others = builder["inference.replicas"] - 1
    them = "the other goes" if others == 1 else f"the other {others} go"
    builder.derive_auto("evaluation.beside", True, f"one engine stays on the version and evaluates it, {them} on")


def _beside_obstacle(builder: PlanBuilder) -> str:
    """Why no engine can evaluate while others go on; empty if one can."""
    bridge, replicas = builder["weights.bridge"], builder["inference.replicas"]
    if replicas == 1:
        each = "each orchestrator" if builder.original.run.orchestrators > 1 else "the run"
        return f"{each} has inference.replicas = 1 engine, and two or more are needed"
    if builder["inference.sleep"] is True:
        return "under inference.sleep = true all engines sleep while a batch is trained on"
    if not keeps_versions(bridge):
        return f'weights.bridge = "{bridge}" brings a version to all engines at once, "disk" or "lora" would not'
    return ""


@dataclass(frozen=True)
class _Left:
    """Memory left by a bridge on a shared GPU for KV cache and activations, beside their needs."""

    needs: Needs
    split: Split

    @property
    def fraction(self) -> float:
        """The smaller of the two fractions of the needs, at most 1."""
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
