"""The run's settings: one strict tree. A field is documented once, below itself.

`slipstream plan` derives values for `"auto"` (or `None`), and says why. Types are strict: a text is never
read as a number, nor a number as a flag. Checks of several fields are in `checks/`. Nothing here imports
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, create_model

from slipstream.config import bounds
from slipstream.config.bounds import Auto, Section
from slipstream.config.environment import EnvironmentConfig
from slipstream.config.evaluation import EvaluationConfig
from slipstream.config.inference import InferenceConfig
from slipstream.config.methods import MethodSection, method_sections
from slipstream.config.sft import DataConfig, SFTConfig


class ModelConfig(Section):
    """The trained model."""

    path: str
    """A local folder in Hugging Face format, a hub id, or the folder of a run: its best checkpoint, or else its latest.
    `run:ID` and `run:ID/step-N` name a submitted run, here or in a store (docs/service.md). In a vision-language model
    the language model is trained, on text and images; the vision tower stays frozen unless `train_tower` is set."""
    revision: str | None = None
    """Commit, tag or branch of a hub id. Not set: the newest commit, recorded in the run's `resolved.toml`."""
    thinking: bool | None = None
    """Whether the model thinks before it answers, by the variable `enable_thinking` or `thinking` of its chat template;
    refused for a template without these. Not set: the template's default."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the model's chat template, set in every rendering: `reasoning_effort = "low"`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the live weights, the same in trainer and engine; `training.optimizer` sets the types of the optimizer's
    copies. `auto`: float32 on a CPU for models below 20 M parameters, otherwise bfloat16. `float16` has three bits more
    than bfloat16, so engine and trainer agree better (arXiv 2510.26788). Its range is smaller: the loss is scaled
    (`train/loss_scale`, `train/overflows`), and models with larger activations are refused."""
    fp32_head: bool | Auto = "auto"
    """Compute the logits in float32 in trainer and engine (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786).
    The weights stay as they are. The trainer computes the logits in chunks and keeps tensors for the backward pass in
    the model's dtype. `auto`: under RL in 16 bits on one GPU, for the tested architectures (Llama, Mistral, Qwen 2
    and 3, Gemma 3)."""
    fp32_residual: bool | Auto = "auto"
    """Add up the layers' outputs in float32, in trainer and engine; the inputs of matrix products stay in the model's
    dtype. With `fp32_head` this halves the difference of their log-probabilities or better
    (`probe/abs_logprob_diff`). `auto`: as `fp32_head`, and only if the engine compiles its layers
    (`inference.enforce_eager = false`), as the sums would take kernels of their own."""
    shared_kernels: bool | Auto = "auto"
    """Have trainer and engine compute with the same batch-invariant kernels: the log-probabilities of sampled tokens
    are equal bit for bit (BENCHMARKS.md). For full fine-tuning of Llama, Qwen 2 and 3 and Gemma 3 in bfloat16 on GPUs
    of compute capability 9 (H100, H200), in contexts not cut by a sliding window. `auto`: there, without critic or
    teacher, and in contexts of up to 8,192 tokens, as the engine's attention is not split over the keys."""
    replay_experts: bool | Auto = "auto"
    """In a mixture of experts, route each token in training to the engine's experts for it (R3, arXiv 2510.11370);
    their weights are the trainer's own. `auto`: under RL in 16 bits on a CPU, for Qwen 2 and 3 MoE. On a GPU it has not
    been tried: `true` asks for it, by vLLM's option `enable_return_routed_experts`."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Scale larger images down to so many pixels, in trainer and engine: an image's tokens and the tower's memory grow
    with them. Not set: the bound of the model's own image processor; it can only be lowered."""
    train_tower: bool = False
    """Train the vision tower and its projector too, on the images in the data; under [lora] by adapters of their linear
    layers."""
    trust_remote_code: bool = False
    """Let the model folder run its own Python code."""


SourceKind = Literal["environment", "reward", "tools", "data", "tokenizer", "algorithm"]
"""Sources of a run beside its settings and weights."""
Recipe = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "distill"]
CreditName = Literal["episode", "turn"]
AdvantageName = Literal["group_mean", "leave_one_out", "batch_mean", "gae", "none"]
LossName = Literal["clip", "gspo", "gspo_token", "cispo", "policy_gradient"]
Scale = Literal["std", "batch", "whiten", "none"]
Normalize = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "adamw_paged", "adamw_paged_8bit", "muon"]
Correction = Literal["truncated", "sequence_truncated", "masked", "sequence_masked", "none"]


class ArgumentsConfig(Section):
    """Arguments of the recipe: shaping of rewards, choice of completions, and details of its terms. Beside them stand
    the arguments of the class in `algorithm.hooks`, if there is one: numbers, texts and flags."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool | int | float | str] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    reward_threshold: float | None = None
    """Train on right or wrong: a reward of at least this counts as 1, a lower one as 0. Not set: on the reward."""
    overlong_buffer: bounds.Share | Auto = "auto"
    """Soft punishment of long completions (DAPO, equation 13): over this last part of `sampling.max_tokens` the reward
    falls by up to `overlong_penalty`. `auto`: 0.2 under `dapo`, otherwise 0."""
    overlong_penalty: bounds.Factor = 1.0
    """Reward lost by a completion of full length."""
    thinking_budget: bounds.NonNegativeItems | None = None
    """Tokens of thinking without cost in a turn, up to `</think>`. Beyond them the reward falls evenly, by up to
    `thinking_penalty` at `sampling.max_tokens`. Not set: thinking costs nothing."""
    thinking_penalty: bounds.Factor = 1.0
    """Reward lost by a turn of nothing but thinking."""
    length_penalty: bounds.NonNegativeFactor = 0.0
    """Weight of Kimi's length reward (arXiv 2501.12599, section 2.3.3): within a group, shorter right answers get more
    and longer ones less; needs `reward_threshold` to tell right from wrong."""
    best_of: bounds.GroupSize | None = None
    """Only so many completions of each group, with the highest rewards, carry loss; the others count in the baseline
    only. Not set: all."""
    clip_dual: Annotated[float, Field(gt=1.0, le=1e6)] | None = None
    """Dual clip (arXiv 1912.09729): under a negative advantage the ratio counts as this at most. Loss `clip` only."""
    kl_in: Literal["auto", "loss", "reward"] = "auto"
    """Add the KL divergence of `kl_coef` to the loss of each token (GRPO), or take its sum over a completion from the
    reward (RLOO); under `gae` each token's own from the token's reward."""
    kl_estimator: Auto | KLEstimator = "auto"
    """Estimator of this divergence (Schulman, "Approximating KL divergence"). `auto`: k3 in the loss, k1 in the
    reward."""
    importance_cap: bounds.Factor | Auto = "auto"
    """Largest weight of `importance_sampling`. `auto`: 2, and 5 for `masked`."""
    importance_floor: bounds.NonNegativeFactor | Auto = "auto"
    """Smallest one. `auto`: 0, and 0.5 for `masked`."""
    train_on_truncated: bool = True
    """Whether completions cut at `sampling.max_tokens`, or at an environment's own limit, carry loss; if
    not they are in the baseline only."""


class RLConfig(Section):
    """Reinforcement learning on groups of completions. `kind` is a recipe: it only chooses values for fields with
    `auto`, and any of them can be set. The table of recipes is in `config/recipes.py`; `slipstream plan` shows the
    value of each field."""

    kind: Recipe = "grpo"
    """`grpo` (this project's, with DAPO's token mean and clip-higher), `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`,
    `reinforce_pp`, `ppo` (with a critic, [critic]), `distill` (from a teacher, [teacher])."""
    group_size: bounds.GroupSize = 8
    """Completions for each prompt; their rewards make the baseline. 1 if nothing is compared within a group: `gae`,
    `batch_mean`."""
    advantage: Auto | AdvantageName | str = "auto"
    """Baseline of the rewards: `group_mean` (GRPO), `leave_one_out` (the group's other completions, RLOO), `batch_mean`
    (REINFORCE++), or a critic's prediction before each token (`gae`, PPO: arXiv 1506.02438, with the settings in
    [critic]). `none`: advantages are 0, only a teacher teaches. Or your own: `path/to/file.py:function` or an entry
    point of the group `slipstream.advantages`, called with rewards and group numbers."""
    scale_rewards: Auto | Scale = "auto"
    """Advantages are divided by the standard deviation of their group's rewards (`std`, GRPO) or of all the batch's
    rewards (`batch`). `whiten` (REINFORCE++): they are brought to mean 0 and standard deviation 1 over the batch, under
    `gae` over its tokens. `none` (Dr. GRPO): they are left."""
    loss: Auto | LossName | str = "auto"
    """`clip` (PPO), `gspo` and `gspo_token` (one ratio for a sequence), `cispo`, `policy_gradient` (the ratio,
    never clipped); or your own: `path/to/file.py:function` or an entry point of the group `slipstream.losses`, called
    with a `slipstream.algo.surrogate_losses.LossInputs`."""
    normalize: Auto | Normalize = "auto"
    """Average the loss over all tokens of the batch (`token`, DAPO), first within each rollout (`sequence`, GRPO), or
    divide each rollout's sum by `sampling.max_tokens` (`constant`, Dr. GRPO). A rollout weighs the same however many
    token sequences its episode has."""
    clip_low: bounds.Factor | Auto = "auto"
    """The ratio is clipped below 1 - clip_low."""
    clip_high: bounds.Factor | Auto = "auto"
    """The ratio is clipped above 1 + clip_high."""
    old_policy: Literal["trainer", "engine"] = "trainer"
    """Denominator of the ratio. `trainer`: the trainer's probabilities under the weights before the batch's first
    update; `importance_sampling` corrects for the engine (the decoupled objective, AReaL, arXiv 2505.24298). `engine`:
    the probabilities at sampling."""
    credit: CreditName | str | None = None
    """Your own advantages of a complete group: `path/to/file.py:function`. For rewards of turns: `episode`, their sum,
    or `turn`, the sum from this turn on, compared with the group's other episodes. Unset, they are refused."""
    hooks: str | None = None
    """Your own algorithm: a subclass of `slipstream.Algorithm`, `path/to/file.py:Class` or an entry point of the group
    `slipstream.algorithms`. The recipe does everything else."""
    arguments: ArgumentsConfig = ArgumentsConfig()
    """See [algorithm.arguments]."""
    kl_coef: bounds.NonNegativeFactor = 0.0
    """Weight of the KL divergence from the initial policy, with the adapter of `lora.path` if there is one; 0 keeps no
    reference model."""
    entropy_coef: bounds.NonNegativeFactor = 0.0
    """Weight of an entropy bonus: the policy's entropy, a mean over tokens, is raised."""
    importance_sampling: Auto | Correction = "auto"
    """Weights for the difference between engine and trainer: `truncated` at `importance_cap`, or `masked` (IcePop), 0
    outside `importance_floor` and cap; of tokens, or with `sequence_` before it of sequences."""
    max_refills: bounds.UpToThousand | Auto = "auto"
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups with equal rewards are left out, and further tasks
    are drawn in their place, at most so often. 0: never, and these groups stay. `auto`: 9 under `dapo`, otherwise
    0."""


class CriticConfig(Section):
    """The critic of `algorithm.advantage = "gae"`: a copy of the start model with a head for one number instead of the
    vocabulary. Before each token it predicts the reward still to come. The head starts at zero. The critic has an
    optimizer of its own; checkpoints hold it to resume from, not to deploy. Under [lora] an adapter of the same shape
    and the head are trained, on a frozen copy of their own."""

    learning_rate: bounds.Rate | Auto = "auto"
    """Constant; betas, weight decay and the bound of the gradient's norm come from [training]. `auto`:
    `training.learning_rate`."""
    warmup_steps: bounds.NonNegativeItems = 0
    """Number of first steps with the critic trained alone; the policy stays as it is."""
    value_clip: bounds.NonNegativeFactor = 0.2
    """Largest rewarded move of a prediction from its value before the batch's first update (PPO2); 0: no limit."""
    gamma: bounds.Fraction = 1.0
    """Discount of a reward for each token before it."""
    gae_lambda: bounds.Share = 0.95
    """Between one-step differences of the critic's predictions (0) and the rewards themselves, less the prediction
    (1)."""


class TeacherConfig(Section):
    """On-policy distillation: the policy samples, and a frozen teacher scores the very tokens. Each token's advantage
    grows by `coef` times the difference of its log-probabilities, teacher's less policy's: the gradient of the reverse
    KL divergence (GKD, arXiv 2306.13649). The recipe `distill` has this term only; any other recipe adds it to the
    advantages from rewards. The teacher chooses from all tokens, at `sampling.temperature`. Either `path` or `url`;
    neither with the environment `atropos`, if its groups bring the teacher's log-probabilities."""

    path: str | None = None
    """A model folder or a hub id, for an engine of its own, started by this run and never updated: in the type of
    `model.dtype`, with the tokenizer of `model.path`."""
    url: str | None = None
    """An OpenAI-compatible vLLM server outside this run, such as `http://host:8000/v1`. It scores at temperature 1
    only."""
    name: str = ""
    """The teacher's name on the server. Not set: the server's only model."""
    key_variable: str = ""
    """The environment variable with the server's API key. Not set: the server asks for none."""
    coef: bounds.Factor = 1.0
    """Weight of the teacher's part of an advantage; with `top_k`, of the divergence in the loss."""
    top_k: bounds.Items | None = None
    """Number of the teacher's likeliest tokens at each place. The loss is then a divergence over these, and all others
    as one more outcome. The vocabulary's size is exact. Not set: the sampled tokens alone."""
    jsd_beta: bounds.Share = 1.0
    """With `top_k`, the kind of divergence: 0 is KL(teacher || policy), 1 is KL(policy || teacher), and between them
    there is the generalized Jensen-Shannon divergence (GKD)."""


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): only small matrices beside the linear layers are trained; the model is frozen. The
    reference of `algorithm.kl_coef` then needs no second copy of it. Learning rates are usually ten times as high as in
    full fine-tuning."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Inner size of the two matrices."""
    alpha: bounds.Factor = 32.0
    """Their product is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all-linear"
    """Linear layers with adapters: ends of their names, such as `["q_proj", "v_proj"]`, or all but the output head.
    Layers of a vision tower and its projector only under `model.train_tower`: `["q_proj", "visual.merger.mlp.0"]`."""
    plus_ratio: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    """LoRA+ (arXiv 2402.12354): the second matrix, zero at the start, learns at so many times the rate of the first,
    `training.learning_rate`. The paper uses 16, with rates half as large."""
    dora: bool = False
    """DoRA (arXiv 2402.09353): beside the two matrices the length of each row of the weight is learnt. The engine gets
    the whole model with the adapter in it, by `disk`, `broadcast` or `restart`: vLLM loads no such adapter. Not over
    `training.ranks`."""
    path: str | None = None
    """An adapter to start from: a folder in PEFT's format, the folder of a run or checkpoint, `run:ID/step-N`, or
    `hub:OWNER/NAME@REVISION`. It must fit the settings above. Not set: a fresh adapter."""


AlgorithmConfig = Annotated[SFTConfig | RLConfig, Field(discriminator="kind")]


class SamplingConfig(Section):
    """How completions are drawn."""

    max_tokens: bounds.Tokens | Auto = "auto"
    """Longest completion. `auto`: half of the context, at most 2,048. A model of fewer than 20 M parameters says no
    more than the answer: its `auto` comes from the gold answers' lengths, or from the room left in the context. Under
    `auto` the longest prompts, one in 20 at most, are left out if they would make it shorter."""
    temperature: bounds.Temperature = 1.0
    """Logits are divided by it."""
    top_p: bounds.Fraction = 1.0
    """Draw from the likeliest tokens with this probability together (nucleus sampling)."""
    top_k: bounds.NonNegativeItems = 0
    """Draw from so many of the likeliest tokens; 0: no limit."""
    min_p: bounds.BelowOne = 0.0
    """Leave out tokens less likely than this part of the likeliest one's probability."""
    stop: bounds.Texts = ()
    """Stop strings, beside the model's own end tokens. Rewards and later turns see a turn's stop string."""


class TrainingConfig(Section):
    """The optimizer and its batches."""

    steps: bounds.Items | None = None
    """Number of batches to train on. Not set: as many as `epochs` are; one of the two must be set."""
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Passes over the training data, in the place of `steps`; 0.5 is half a pass. The last batch of a pass is filled
    from the next one."""
    max_seconds: Annotated[float, Field(gt=0.0, le=1e8)] | None = None
    """After this time the run ends in good order even if steps are left. Counted from the first step on, without
    the time before it and the last evaluation."""
    prompts_per_batch: bounds.Items = 32
    """Prompts (SFT: conversations) in a batch."""
    updates_per_batch: bounds.Items = 1
    """Optimizer steps in one batch, each on a part of it."""
    staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """How many versions older than the newest a batch's tokens may be. 0: generation and training take turns. More: the
    next batches are generated while this one is trained on, and new weights reach the engine between two tokens."""
    order: Literal["auto", "data", "ready"] = "auto"
    """Choice of a batch's groups. `data`: the next ones in the order of the data. The batch depends on seed and step
    alone, and the engine waits for the longest completion of each batch. `ready`, with a staleness of 1 or more: the
    first ones to finish, while groups for up to `staleness` further batches are generated; none is dropped for its age.
    """
    overprovision: Annotated[float, Field(ge=0.0, le=4.0)] = 0.0
    """Under `order = "ready"`, groups generated beyond the need of the batches, as a part of `prompts_per_batch`. A
    batch does not wait for as many; groups that no later batch could take are cancelled. This is faster if few
    completions are much longer than all others, and trains on fewer of the long ones."""
    epochs_per_batch: bounds.Times = 1
    """Passes over a batch."""
    optimizer: OptimizerName = "adamw"
    """`adamw`: AdamW, with fp32 masters of the weights. `adamw_bf16`: AdamW on bfloat16 weights alone, with stochastic
    rounding to keep small updates; four bytes a parameter less. `adamw_8bit`: `adamw` with 8-bit optimizer states
    (arXiv 2110.02861), by bitsandbytes; six bytes a parameter less. `adamw_paged`: `adamw` with moments in the CPU's
    memory as far as the GPU has too little room (CUDA moves them, arXiv 2305.14314), by bitsandbytes; up to eight bytes
    a parameter less. `adamw_paged_8bit`: both, six bytes less and up to two more. `muon` (Jordan 2024; arXiv
    2502.16982), with masters: matrices move by their momentum made orthogonal, at AdamW's learning rates; AdamW updates
    embeddings, head, vectors, and experts stored in one parameter of a layer. It keeps one moment for two. Over
    `training.ranks` only `adamw` and `adamw_bf16`."""
    muon_momentum: bounds.BelowOne = 0.95
    """Decay of Muon's momentum (Nesterov's)."""
    learning_rate: bounds.Rate | Auto = "auto"
    """Peak, reached at the end of the warm-up. `auto`: for all parameters 1e-6 in reinforcement learning and 1e-5 in
    SFT, for [lora] 1e-4; more for models of less than 500 M parameters, up to 1e-3, 4e-3 and 1e-2 at 1 M."""
    tower_learning_rate: bounds.Rate | None = None
    """Peak for a vision tower and its projector (`model.train_tower`), on the same schedule. Not set: `learning_rate`.
    """
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or decaying to zero at the last step."""
    warmup_steps: bounds.NonNegativeItems = 0
    """Optimizer steps of the learning rate's rise from zero; a batch makes `updates_per_batch` of them."""
    weight_decay: bounds.NonNegativeFactor = 0.0
    """Decoupled weight decay, of matrices only."""
    adam_beta1: bounds.BelowOne = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: bounds.BelowOne = 0.95
    """Decay of the running mean of its square."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: bounds.Tokens | Auto = "auto"
    """Tokens in one forward-backward pass, of all `context_parallel` ranks together: a memory knob, without effect on
    the objective."""
    packing: bool | Auto = "auto"
    """Put several sequences in one row with block-diagonal attention; off: one sequence a row. `auto`: unless the
    sequences would see one another in the model's layers (recurrent ones), or its attention cannot keep them apart."""
    ranks: bounds.Processes = 1
    """Trainer processes on this machine, each with a share of weights, gradients and optimizer state (FSDP2) and of
    each step's micro-batches. On GPUs one each, before the engine's; on a CPU they share its cores. The same losses and
    gradients but for rounding."""
    context_parallel: bounds.Processes = 1
    """Neighbouring ranks for each row, with an equal part of its tokens each: for sequences too long for one GPU
    (Ulysses, arXiv 2309.14509). It divides the `ranks` of a node and the attention heads."""
    sharding: Literal["full", "hybrid", "auto"] = "auto"
    """Over nodes: weights, gradients and optimizer state are sharded over all ranks (`"full"`), or over a node's, with
    a copy on each node (`"hybrid"`, HSDP). `auto`: `"hybrid"` on GPUs with room for it."""
    reshard: Literal["layer", "step", "auto"] = "auto"
    """Over ranks: how long each keeps a layer's all-gathered weights. `"layer"`: while the layer computes, in every
    micro-batch anew, and gradients are reduce-scattered after each. `"step"`: until a step's last micro-batch, and
    gradients are reduce-scattered once, as always for embeddings and LM head; this takes 6 bytes more for each
    parameter in bfloat16. `auto`: `"step"` if the GPUs have room for it."""
    rank_timeout_s: bounds.Seconds = 600.0
    """How long the trainer's processes may wait for one of them."""
    gradient_checkpointing: bool | Literal["auto", "selective"] = "auto"
    """Recomputation in the backward pass, with the same bits. `true`: all but each layer's input, about a third more
    time. `"selective"`: all but the outputs of matrix multiplications and attention (selective activation
    checkpointing); compiled layers do this by themselves. `auto`: the least recomputation with room for the longest
    sequence."""
    offload_activations: bool = False
    """Keep the inputs of layers in CPU memory until the backward pass; the copies overlap with computation. For long
    sequences on a GPU; implies `gradient_checkpointing = true`."""
    compile: bool | Auto = "auto"
    """Fuse the operations between a layer's matrix multiplications and its attention (torch.compile), for rows of any
    length; the last digits round otherwise. If the compiler fails the run ends, because layers without compilation need
    more memory. `auto`: on a GPU, if training is long enough to win back the time for compiling; if the compiler fails,
    the run is planned again without it, and says so."""


class WeightsConfig(Section):
    """How new weights reach the engine, and the proof of it."""

    bridge: Literal["auto", "disk", "broadcast", "restart", "lora", "single_copy"] = "auto"
    """`disk`: files loaded in place into the running engine. `broadcast`: from memory to memory over a process group.
    `restart`: the engine is started anew. `lora`: the engine keeps the base and loads the adapter beside it.
    `single_copy`: the trainer trains the engine's own tensors, in the memory of one CPU or GPU; each of
    `training.ranks` trains the tensors of one of as many workers (`inference.tensor_parallel_size`). The engine stands
    still while they are written. Under [lora] they share the base, and the adapter travels as under `lora`. `auto`:
    `broadcast` to `inference.servers`; else `lora` when [lora] is set (not for DoRA or a trained tower of Gemma 3).
    Otherwise `broadcast` if engines have GPUs of their own, `single_copy` on a shared GPU, and `disk` on a CPU. On a
    shared GPU, too, `disk` is chosen with several engines, unequal numbers of ranks and workers, DoRA or such a tower,
    `delta`, or weights in another form in vLLM. It is also chosen if trainer and engine do not fit side by side and
    `inference.sleep` leaves more room. Under [lora] `disk`, `broadcast` and `restart` publish the whole model with the
    adapter merged into it."""
    delta: bool = False
    """Under `disk` and `broadcast`: send only the changed elements of a new version, each with its position, to an
    engine with the version before it. Otherwise, and if this saves less than half, the whole version is sent. In
    bfloat16 most elements stay the same in a step, in float32 nearly none. The trainer keeps one more copy of the
    weights for it."""
    every: bounds.Items = 1
    """Publish the weights after so many steps, and after the last one. The steps between train on tokens of older
    versions: `training.staleness` must allow for them. Versions for an evaluation are published, too."""
    in_flight: Literal["recompute", "keep", "drain"] = "recompute"
    """Treatment of running completions when a new version comes, with a staleness of 1 or more. `recompute`: they pause
    and continue with the new weights. These prefill the context again, so each token's log-probability comes from one
    version. `keep`: they continue at once, on the KV cache of the old weights; this adds to the difference between
    engine and trainer. `drain`: the version waits until they have ended, and new ones wait for it. Adapters need none
    of it: a completion keeps its first adapter."""
    apply_timeout_s: bounds.Seconds | Auto = "auto"
    """How long the engine may take to load a version and to verify it; under `drain` after the last completion. `auto`:
    by the size of the weights, on a slow disk; at least 300."""
    probe_tasks: Annotated[int, Field(gt=0, le=10_000)] = 8
    """Prompts for engine and trainer to score after every apply."""
    probe_tokens: bounds.Tokens = 8
    """Longest completion of the probe. A step ends after it. `mismatch/...` compares all tokens of the rollouts."""
    probe_warn: PositiveFloat | Auto = "auto"
    """Largest mean absolute log-probability difference per token without a warning; the warning names a likely cause.
    `auto`, by `model.dtype`: 0.01 in float32, 0.02 in float16, 0.05 in bfloat16, more than rounding was seen to make
    (BENCHMARKS.md); 0.001 under `model.shared_kernels`."""
    probe_stop: PositiveFloat | Auto = "auto"
    """A larger mean difference ends the run. `auto`: four times `probe_warn`; under `model.shared_kernels` four times
    0.05."""


class RunSection(Section):
    """The run's files, processes and reproducibility."""

    folder: Annotated[Path | None, Field(strict=False)] = None
    """The run folder. Default: `runs/<name of the run file>-<time>`."""
    seed: bounds.Seed = 0
    """Seeds the data order and the engine's draws."""
    exact: bool = False
    """Repeat a run to the last digit on one kind of GPU: `model.shared_kernels`, and backward passes with one order of
    addition. Any difference between the log-probabilities of engine and trainer ends the run. At temperature 1, with
    `training.staleness = 0`."""
    checkpoint_every: bounds.Items | Literal["auto", "10min"] = "auto"
    """Steps between checkpoints; or `10min`: one every ten minutes of training, at a step's end. If they take more than
    3 % of the time from training, they get rarer, with a warning. The last step always has one. `auto`: `10min`."""
    keep_checkpoints: bounds.Items = 1
    """How many of the newest checkpoints can be resumed from. The last one is replaced only when the next is whole, so
    one is enough; each takes many times the space of its weights."""
    keep_weights: bounds.Items = 2
    """How many of the newest checkpoints keep their weights, for `chat`, `eval` and `export`; under
    `evaluation.patience` the best one keeps them, too. At least as many as `keep_checkpoints`."""
    keep_batches: bounds.UpToThousand = 3
    """How many of the last trained batches are kept, for `slipstream replay`. The batches after the start model and
    after each checkpoint to resume from are kept, too. A token takes about 20 bytes. 0: none."""
    async_checkpoints: bool | Auto = "auto"
    """Write checkpoints beside training, from a copy in the machine's memory; `false`: training waits. `auto`: with
    one rank, if the machine has memory for the copy."""
    max_restarts: bounds.UpToThousand = 3
    """How often the command goes on from the last checkpoint by itself, after a wait of 2 s, doubled each time up to
    120 s. It does so if an engine died with the only copy of the weights, under `single_copy` and `broadcast`, but not
    if one died at the same step before. With `streams` it also does so if the orchestrator died, the trainer was
    killed, or a failure may be gone the next time, as `exit.json` says. 0: never, and the run ends."""
    allow_changes: Annotated[tuple[SourceKind, ...], Field(strict=False)] = ()
    """Changes since the checkpoint to allow in `--resume`: without it, another environment, reward, tool, data file,
    tokenizer, or loss or advantage of your own (`algorithm`) is refused. `provenance.json` records an allowed change.
    """
    grace_s: bounds.Seconds = 30.0
    """After SIGTERM, and after SIGUSR1 (a scheduler's warning of a job's end), the run writes a checkpoint and the
    process ends within so many seconds. If the step under way or the write takes longer, it ends on the last whole
    checkpoint. Ctrl-C waits for both."""
    save_samples: bounds.Items = 4
    """Rollouts kept in `samples.jsonl` for each step and for each evaluation."""
    save_failures: bounds.NonNegativeItems = 4
    """Failed rollouts kept there beside these, with their error and the conversation so far, for each step and for each
    evaluation; and as many graded ones with a failed call of a tool."""
    streams: Literal["memory", "files", "redis"] = "memory"
    """How batches and commands travel between trainer and orchestrator. `memory`: they share a process. `files`: the
    orchestrator has a process of its own, and environments and tokenizers do not slow the trainer; over files in the
    run folder. `redis`: the same over the server of [redis]."""
    orchestrators: bounds.Processes = 1
    """Processes for rollouts, each with `inference.replicas` engines, reward workers and a ledger of its own, and with
    an equal part of the prompts of each batch. Use more if the event loop of one is too slow for its environments or
    its engines; more than one need `streams`. The first one also makes the evaluations."""
    placement: Literal["auto", "shared", "separate"] = "auto"
    """GPUs of trainer and engines. `shared`: both begin at the first. `separate`: the trainer is on the first, the
    engines are on the next ones, each on `inference.tensor_parallel_size` of them. `auto`: separate if there are enough
    GPUs and `single_copy` is not set."""
    threads: bounds.Threads | Auto = "auto"
    """CPU threads of the trainer, and of all engines together; the engines' processes share them out. `auto`: all cores
    this process may use."""
    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False)] = ()
    """Targets of each step's metrics beside the run folder; each is an extra to install."""
    sink_samples: bool = True
    """Send the kept rollouts there too, with each evaluation: a table in W&B and Trackio, text in TensorBoard."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Serve the newest metrics for Prometheus at `http://127.0.0.1:<port>/metrics`, for this machine only, while the
    run lives; 0: any free port, shown by the run. Not set: no server."""
    project: str = ""
    """Project in W&B and Trackio. Not set: WANDB_PROJECT or TRACKIO_PROJECT, or else `slipstream`."""
    name: str = ""
    """The run's name there, and its label for Prometheus. Not set: WANDB_NAME in W&B, or else the name of the run
    folder."""
    entity: str = ""
    """Team or user in W&B. Not set: WANDB_ENTITY, or else your default one."""
    max_steps_without_signal: bounds.Items = 20
    """The run fails after so many consecutive steps without a signal from rewards: no group's differed, or under
    `batch_mean` no two in the batch. A critic (`ppo`) and a teacher find something to teach in every batch."""


class RedisConfig(Section):
    """The Redis server, of version 6.2 or later, for batches and commands under `run.streams = "redis"`."""

    url: str
    """`redis://host:port/database`, `rediss://` with TLS, or `unix:///path`, without a password; off this machine it
    needs TLS."""
    password_variable: str = ""
    """The environment variable with the server's password. Only a private Unix socket needs none."""


class ClusterConfig(Section):
    """Nodes of the run. The trainer's ranks are on the first ones and engines on the last; all else is on this host.
    Agents start the processes on other nodes (`slipstream node`), with the token in SLIPSTREAM_CLUSTER_TOKEN. Run
    folder and model are at one path on all nodes. torchrun and srun give number, address and id of their own
    (docs/cluster.md)."""

    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Nodes, this host included."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] | Auto = "auto"
    """`auto`: as many as this host has."""
    launcher: Literal["manual", "ray"] = "manual"
    """How agents are started: by `slipstream node` on each node, or by the Ray cluster of this host or RAY_ADDRESS."""
    address: str = ""
    """`HOST:PORT` of this host for agents to join. Under `ray` by default its address in Ray, and a free port."""
    run_id: str = ""
    """Agents must name it. Not set: the name of the run folder."""
    join_timeout_s: bounds.Seconds = 600.0
    """How long to wait for all agents."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """`address`, which must be one."""
        host, _, port = self.address.rpartition(":")
        return host, int(port)


class _Sections(Section):
    """One run: all sections of its file."""

    model: ModelConfig
    environment: EnvironmentConfig | None = None
    data: DataConfig | None = None
    algorithm: AlgorithmConfig
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig | None = None
    """Not set: rewards are the only signal."""
    lora: LoraConfig | None = None
    """Not set: all parameters are trained."""
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    inference: InferenceConfig = InferenceConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig | None = EvaluationConfig()
    """`evaluation = false` turns it off."""
    run: RunSection = RunSection()
    cluster: ClusterConfig = ClusterConfig()
    redis: RedisConfig | None = None
    """Not set: no server is used."""

    @property
    def methods(self) -> dict[str, MethodSection]:
        """The set sections of methods, by name; the checks allow one."""
        found = {name: getattr(self, name) for name in method_sections()}
        return {name: section for name, section in found.items() if section is not None}

    @property
    def method(self) -> MethodSection | None:
        """How SFT trains, if a plug-in says it; None: by cross-entropy alone."""
        return next(iter(self.methods.values()), None)


if TYPE_CHECKING:
    RunConfig = _Sections
else:
    RunConfig = create_model(
        "RunConfig",
        __base__=_Sections,
        __doc__=_Sections.__doc__,
        __module__=__name__,
        **{name: (section | None, None) for name, section in method_sections().items()},
    )
    """With a section for each method."""
