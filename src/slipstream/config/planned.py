"""The settings of a run as planned: the same tree without any `auto`.

`plan.decided.planned_config` makes it from a `RunConfig`. Each class narrows the fields of its base that may be
`auto`; their defaults stand where a field has no effect in the run. A field's documentation is in `config.schema`.
"""

# Sections are frozen, so a narrower field is sound; pyright takes pydantic's fields for mutable ones.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.schema import (
    ArgumentsConfig,
    ClusterConfig,
    Correction,
    CriticConfig,
    EvaluationConfig,
    InferenceConfig,
    KLEstimator,
    ModelConfig,
    Normalize,
    RLConfig,
    RunConfig,
    RunSection,
    SamplingConfig,
    Scale,
    TrainingConfig,
    WeightsConfig,
)
from slipstream.config.sft import SFTConfig


class PlannedModel(ModelConfig):
    """[model]."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    fp32_head: bool = False
    fp32_residual: bool = False
    shared_kernels: bool = False
    replay_experts: bool = False


class PlannedEnvironment(EnvironmentConfig):
    """[environment]."""

    max_turns: int = 1
    num_train_tasks: int = 0
    processes: int = 0
    reward_workers: int = 1


class PlannedArguments(ArgumentsConfig):
    """[algorithm.arguments]."""

    overlong_buffer: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KLEstimator = "k3"
    importance_cap: float = 0.0
    importance_floor: float = 0.0


class PlannedRL(RLConfig):
    """[algorithm] of reinforcement learning, as its recipe has it: see `config.recipes.resolved`."""

    scale_rewards: Scale = "none"
    normalize: Normalize = "token"
    clip_low: float = 0.0
    clip_high: float = 0.0
    arguments: PlannedArguments = PlannedArguments()
    importance_sampling: Correction = "none"
    max_refills: int = 0


class PlannedCritic(CriticConfig):
    """[critic]."""

    learning_rate: float = 0.0


class PlannedSampling(SamplingConfig):
    """[sampling]."""

    max_tokens: int = 0


class PlannedTraining(TrainingConfig):
    """[training]."""

    steps: int = 0
    order: Literal["data", "ready"] = "data"
    learning_rate: float = 0.0
    micro_batch_tokens: int = 0
    sharding: Literal["full", "hybrid"] = "full"
    reshard: Literal["layer", "step"] = "layer"
    gradient_checkpointing: bool | Literal["selective"] = False
    compile: bool = False
    packing: bool = True


class PlannedInference(InferenceConfig):
    """[inference]."""

    replicas: int = 1
    max_model_len: int = 0
    max_num_seqs: int = 0
    kv_cache_gib: float = 0.0
    gpu_memory_utilization: float = 0.0
    sleep: bool = False
    enforce_eager: bool = True
    start_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    tool_parser: str = "none"
    patches: Literal["checked", "required", "all"] = "checked"


class PlannedWeights(WeightsConfig):
    """[weights]."""

    bridge: Literal["disk", "broadcast", "restart", "lora", "single_copy"] = "disk"
    apply_timeout_s: float = 0.0
    probe_warn: float = 0.0
    probe_stop: float = 0.0


class PlannedEvaluation(EvaluationConfig):
    """[evaluation]."""

    beside: bool = False
    temperature: float = 0.0


class PlannedRun(RunSection):
    """[run]."""

    checkpoint_every: int | Literal["10min"] = "10min"
    async_checkpoints: bool = False
    placement: Literal["shared", "separate"] = "shared"
    threads: int = 1


class PlannedCluster(ClusterConfig):
    """[cluster]."""

    gpus_per_node: int = 0


class PlannedConfig(RunConfig):
    """One run, everything decided."""

    model: PlannedModel
    environment: PlannedEnvironment | None = None
    algorithm: Annotated[SFTConfig | PlannedRL, Field(discriminator="kind")]
    critic: PlannedCritic = PlannedCritic()
    sampling: PlannedSampling = PlannedSampling()
    training: PlannedTraining = PlannedTraining()
    inference: PlannedInference = PlannedInference()
    weights: PlannedWeights = PlannedWeights()
    evaluation: PlannedEvaluation | None = None
    run: PlannedRun = PlannedRun()
    cluster: PlannedCluster = PlannedCluster()
