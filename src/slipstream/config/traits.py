"""Facts about a config, for several users of it. Pure."""

from __future__ import annotations

from typing import Any

from slipstream.config.environment import AGENT
from slipstream.config.planned import PlannedConfig
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig, RunConfig

BY_BITSANDBYTES = frozenset({"adamw_8bit", "adamw_paged", "adamw_paged_8bit"})
"""Optimizers in need of this library."""


def uses_engine(config: RunConfig) -> bool:
    """Whether the run generates anything at all."""
    evaluates = config.evaluation is not None and config.environment is not None
    return isinstance(config.algorithm, RLConfig) or evaluates or rolls_out(config)


def agent_settings(config: RunConfig) -> list[dict[str, Any]]:
    """`environment.settings` of each agent: of the environment, or of parts of a mixture."""
    section = config.environment
    if section is None:
        return []
    return [each.settings for each in (section, *section.mixture.values()) if each.name == AGENT]


def serves_agents(config: RunConfig) -> bool:
    """Whether engines answer the requests of agents."""
    return bool(agent_settings(config))


def reasoning_parser(config: RunConfig) -> str:
    """vLLM's parser of thinking for answers to agents; empty: thinking stays in the text."""
    return next((str(each["reasoning_parser"]) for each in agent_settings(config) if "reasoning_parser" in each), "")


def rolls_out(config: RunConfig) -> bool:
    """Whether SFT also trains on rollouts, by the section of a method."""
    return config.method is not None and config.method.rolls_out


def generates_for(config: PlannedConfig, step: int) -> bool:
    """Whether a step trains on samples of the engine from the weights before it."""
    if config.method is None:
        return config.algorithm.kind != "sft"
    return step < config.training.steps and config.method.rolls_out_at(step)


def drawn_at(config: RunConfig) -> tuple[float, str]:
    """The temperature of rollouts that are trained on, and the section with it."""
    if config.method is None or (temperature := config.method.draws_at) is None:
        return config.sampling.temperature, "sampling"
    return temperature, next(iter(config.methods))


def measures_loss(config: RunConfig) -> bool:
    """Whether the loss of held-out rows is measured."""
    is_sft = not isinstance(config.algorithm, RLConfig)
    return is_sft and config.evaluation is not None and config.data is not None and config.data.has_eval


def publishes_adapter(config: RunConfig) -> bool:
    """Whether a version is an adapter alone, loaded by the engine beside a constant base."""
    return config.lora is not None and config.weights.bridge in ("lora", "single_copy")


def bridge_of(config: RunConfig) -> str:
    """`weights.bridge`, or the value of its `auto` under an adapter for vLLM."""
    by_itself = config.lora is not None and not config.lora.dora
    return "lora" if config.weights.bridge == "auto" and by_itself else config.weights.bridge


def keeps_versions(bridge: str) -> bool:
    """Whether this bridge's versions are files for an engine to load later than the others, in the running engine:
    it may stay on its version for a while."""
    return bridge in ("disk", "lora")


def apply_timeout_s(config: PlannedConfig) -> float:
    """Time limit of an update, with the completions it waits for under `drain`."""
    waits = config.weights.in_flight == "drain" and config.training.staleness > 0
    return config.weights.apply_timeout_s + waits * config.inference.request_timeout_s


def keeps_copy(config: RunConfig) -> bool:
    """Whether the trainer keeps a copy of the published weights, to find changes."""
    return config.weights.delta and uses_engine(config)


def shares_weights(config: RunConfig) -> bool:
    """Whether the trainer's parameters are the engine's tensors."""
    return config.weights.bridge == "single_copy" and uses_engine(config)


def begins_early(config: PlannedConfig) -> bool:
    """Whether the engine may take a batch's requests while the trainer makes their version. The engine is paused then
    in any case, and the tasks do not depend on this step's training."""
    if not shares_weights(config) or config.lora is not None or not isinstance(config.algorithm, RLConfig):
        return False
    is_in_order = config.training.order == "data" and not config.training.staleness
    return is_in_order and config.weights.in_flight == "recompute" and not has_curriculum(config)


def uses_critic(config: RunConfig) -> bool:
    """Whether advantages are a critic's."""
    return isinstance(config.algorithm, RLConfig) and resolved(config.algorithm).advantage == "gae"


def has_curriculum(config: RunConfig) -> bool:
    """Whether the weights of a mixture follow the learning."""
    environment = config.environment
    return isinstance(config.algorithm, RLConfig) and environment is not None and environment.curriculum == "adaptive"


def num_replicas(config: RunConfig) -> int:
    """How many engines each orchestrator has; 1 while nobody has decided."""
    if servers := config.inference.servers:
        return len(servers)
    replicas = config.inference.replicas
    return replicas if isinstance(replicas, int) else 1


def num_engines(config: RunConfig) -> int:
    """How many engines all orchestrators have."""
    return num_replicas(config) * config.run.orchestrators


def asks_teacher(config: RunConfig) -> bool:
    """Whether the run asks a teacher itself. Otherwise rollouts from outside bring its log-probabilities."""
    return config.teacher is not None and not (config.teacher.path is None and config.teacher.url is None)


def starts_teacher(config: RunConfig) -> bool:
    """Whether a second engine of ours, the teacher's, belongs to the run."""
    return config.teacher is not None and config.teacher.path is not None


def starts_engines(config: RunConfig) -> bool:
    """Whether engines are processes of the run."""
    return uses_engine(config) and not config.inference.servers


def engine_workers(config: RunConfig) -> int:
    """How many GPUs, or processes on a CPU, all engines have together."""
    return num_engines(config) * config.inference.tensor_parallel_size


def update_phase(config: RunConfig) -> str:
    """The terminal's name for bringing a new version to the engine."""
    return "start vLLM on the new weights" if config.weights.bridge == "restart" else "update weights"


def usual_reward_workers(num_cpus: int) -> int:
    """`environment.reward_workers` if it is `auto`: one core is left to the rest."""
    return max(1, num_cpus - 1)
