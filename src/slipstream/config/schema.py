"""The run's settings: one strict tree. A field is documented once, below itself.

`"auto"` (or `None`) means: derived by `slipstream plan`, which also says why. Types are strict: a text is
never read as a number, nor a number as a flag. What depends on several fields is in `checks.py`. Nothing
here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: unknown keys and infinite numbers are refused, values never change later."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """What is trained."""

    path: str
    """A local folder in Hugging Face format, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the live weights, the same in trainer and engine; the optimizer always keeps fp32 masters.
    `auto`: float32 on a CPU for models below 20 M parameters, otherwise bfloat16."""
    trust_remote_code: bool = False
    """Let the model folder run its own Python code."""


class EnvironmentConfig(Section):
    """Where tasks and rewards come from."""

    name: str
    """`reasoning_gym/<task>`, `path/to/file.py:Class`, or the name of an entry point in the group
    `slipstream.environments`."""
    settings: dict[str, Any] = {}
    """Passed to the environment as they are."""
    system_prompt: str = ""
    """Put before every conversation that has no system message of its own."""
    seed: int = 0
    """Seeds the tasks. In reasoning_gym a question's text alone decides whether it is held out, so no run of any
    seed trains on a held-out one; for an environment of your own `slipstream.envs.split_of` does the same."""
    num_train_tasks: PositiveInt = 10_000
    """Size of the training set; it repeats in a fresh shuffle when used up."""
    reward_timeout_s: PositiveFloat = 10.0
    """A reward call that takes longer is killed; the rollout is counted as `reward_timeout` and not
    trained on."""
    run_timeout_s: PositiveFloat = 300.0
    """How long the environment may take between two turns; then the rollout is counted as `environment_error` and not
    trained on."""
    max_reward_failures: Fraction = 0.1
    """The run stops when more than this part of a batch's rollouts fail, in the reward, the environment or the
    engine."""


class DataConfig(Section):
    """Training data from files (SFT only)."""

    path: str
    """A JSONL file: each line `{"messages": [{"role", "content"}, ...]}`, or `{"prompt", "completion"}`."""


class SFTConfig(Section):
    """Supervised fine-tuning: cross-entropy on the assistant's tokens only."""

    kind: Literal["sft"] = "sft"
    train_on: Literal["last", "all"] = "all"
    """Which assistant turns of a conversation carry loss."""


class GRPOConfig(Section):
    """Group relative policy optimization (arXiv 2402.03300) with the corrections that came after it."""

    kind: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions for each prompt; their mean reward is the baseline."""
    reward_threshold: float | None = None
    """Train on right or wrong: a reward of at least this counts as 1, a lower one as 0. Not set: on the reward."""
    scale_rewards: Literal["std", "none"] = "std"
    """Divide advantages by the group's standard deviation (GRPO), or not (Dr. GRPO, arXiv 2503.20783)."""
    normalize: Literal["token", "sequence"] = "token"
    """Average the loss over all tokens of the batch (DAPO), or first within each sequence (GRPO)."""
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped above 1 + clip_high (clip-higher, DAPO, arXiv 2503.14476)."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the initial model; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence (Schulman, "Approximating KL divergence")."""
    importance_sampling: Literal["truncated", "none"] = "truncated"
    """Correct for the difference between engine and trainer by truncated importance weights, which need the
    engine's log-probabilities."""
    importance_cap: PositiveFloat = 2.0
    """Largest importance weight of a token."""
    train_on_truncated: bool = True
    """Whether completions cut at `sampling.max_tokens` carry loss; if not they are in the baseline only."""


AlgorithmConfig = Annotated[SFTConfig | GRPOConfig, Field(discriminator="kind")]


class SamplingConfig(Section):
    """How completions are drawn."""

    max_tokens: PositiveInt | Literal["auto"] = "auto"
    """Longest completion. `auto`: from the gold answers' lengths, or what the context leaves."""
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0: no limit."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    stop: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Stop strings, beside the model's own end tokens."""


class TrainingConfig(Section):
    """The optimizer and its batches."""

    steps: PositiveInt
    """Number of batches to train on."""
    max_seconds: PositiveFloat | None = None
    """After this time the run ends in good order even if steps are left. Counted from the first step; what comes
    before it and the last evaluation are not included."""
    prompts_per_batch: PositiveInt = 32
    """Prompts (SFT: conversations) in a batch."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps that one batch is split into."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """How many versions older than the newest a batch's tokens may be. 0: generation and training take turns. 1: the
    next batch is generated while this one is trained on, and new weights reach the engine between two tokens."""
    epochs_per_batch: PositiveInt = 1
    """How often a batch is gone through."""
    learning_rate: PositiveFloat = 1e-5
    """Peak, reached at the end of the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or decaying to zero at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from zero; a batch makes `updates_per_batch` of them."""
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens in one forward-backward pass: a memory knob that never changes what is optimized."""
    packing: bool = True
    """Put several sequences in one row with block-diagonal attention; off: one sequence a row."""


class InferenceConfig(Section):
    """The engine."""

    max_model_len: PositiveInt | Literal["auto"] = "auto"
    """Longest prompt plus completion. `auto`: what the tasks need, within the model's context."""
    max_num_seqs: PositiveInt | Literal["auto"] = "auto"
    """Sequences generated at once."""
    kv_cache_gib: PositiveFloat | Literal["auto"] = "auto"
    """Memory for the KV cache on a CPU."""
    gpu_memory_utilization: Fraction = 0.45
    """Part of the card's memory that vLLM takes, on a GPU."""
    enforce_eager: bool | Literal["auto"] = "auto"
    """No compilation. `auto`: on a CPU yes, on a GPU no."""
    start_timeout_s: PositiveFloat = 300.0
    """How long the engine may take to start, to its first answer."""
    request_timeout_s: PositiveFloat = 300.0
    """How long one completion may take."""
    max_restarts: NonNegativeInt = 1
    """How often a dead engine is started again on the last published version before the run fails."""
    options: dict[str, Any] = {}
    """Passed on to vLLM's engine arguments."""


class WeightsConfig(Section):
    """How new weights reach the engine, and how that is proved."""

    bridge: Literal["disk", "broadcast", "restart"] = "disk"
    """`disk`: files loaded in place into the running engine. `broadcast`: from memory to memory over a process group.
    `restart`: the engine is started anew."""
    apply_timeout_s: PositiveFloat = 300.0
    """How long the engine may take to load a version and to verify it."""
    probe_tasks: PositiveInt = 8
    """Prompts that engine and trainer both score after every apply."""
    probe_warn: PositiveFloat = 0.05
    """Mean absolute log-probability difference per token that is reported as a warning."""
    probe_stop: PositiveFloat = 0.2
    """... and that ends the run."""


class EvaluationConfig(Section):
    """Held-out accuracy: the part of tasks whose reward reaches `threshold`."""

    num_tasks: PositiveInt = 500
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    at_start: bool = True
    """Also evaluate before the first step: what the starting model can do."""
    temperature: NonNegativeFloat | Literal["auto"] = "auto"
    """0 is greedy. `auto`: the same as `sampling.temperature`."""
    threshold: float = 1.0
    """A completion is right when its reward is at least this."""
    seed: int = 1_000_003
    """Seeds the draws of every evaluation, so that two of them differ only by their weights."""


class RunSection(Section):
    """Where the run keeps its files and how it repeats."""

    folder: Annotated[Path | None, Field(strict=False)] = None
    """The run folder. Default: `runs/<name of the run file>-<time>`."""
    seed: int = 0
    """Seeds the data order and the engine's draws."""
    checkpoint_every: PositiveInt | Literal["auto"] = "auto"
    """Steps between checkpoints. `auto`: ten in a run."""
    keep_checkpoints: PositiveInt = 2
    """Older ones are removed; the last is always kept."""
    save_samples: PositiveInt = 4
    """Rollouts kept in `samples.jsonl` for each step and for each evaluation."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of trainer and engine. `auto`: all cores this process may use."""
    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False)] = ()
    """Where each step's metrics go beside the run folder; each is an extra to install."""
    max_steps_without_signal: PositiveInt = 20
    """Consecutive steps in which no group had any reward variance, after which the run fails."""


class RunConfig(Section):
    """One run: everything that `slipstream train` needs."""

    model: ModelConfig
    environment: EnvironmentConfig | None = None
    data: DataConfig | None = None
    algorithm: AlgorithmConfig
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig
    inference: InferenceConfig = InferenceConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig | None = EvaluationConfig()
    """`evaluation = false` turns it off."""
    run: RunSection = RunSection()
