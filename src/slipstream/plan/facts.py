"""The facts that a plan is derived from, as plain numbers; `measure.py` measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.inference.lending import ServerFacts

SMALL_MODEL_PARAMETERS = 20_000_000
"""A model of fewer was made for its task, as by `slipstream model new`: no chat model has so few."""


@dataclass(frozen=True)
class ModelFacts:
    """The shape of a decoder."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    vocab_size: int
    dtype: str
    """Type of the weights in the folder."""
    tied_embeddings: bool = True
    """Whether the output head is the embedding."""
    num_experts: int = 0
    """In a layer; 0 for a dense model."""
    num_tower: int = 0
    """Of the parameters, those of an image tower."""
    num_frozen: int = 0
    """The same where it is not trained."""
    original_context: int = 0
    """For a longer context its rotary embedding has other factors (longrope); 0 where it has the same."""
    rotary: str = "default"
    """How the frequencies of its rotary embedding are scaled, as its configuration names it (`llama3`, `yarn`)."""
    window: int = 0
    """Tokens that the attention of some layers reaches back at most; 0 where all layers see the whole context."""
    scores: Literal["", "plain", "capped"] = ""
    """Whether attention materialises its score matrix (eager attention without packing), with soft-capping or not."""
    architecture: str = ""
    """The class of its network, as its configuration names it; empty where that brings its own code."""
    unpackable: str = ""
    """Why sequences cannot be packed into one row; empty where they can."""
    thinks: bool = False
    """Whether its chat template has a switch for thinking."""

    @property
    def says_only_answers(self) -> bool:
        """Whether completions are about as long as gold answers: a small model was made for its task."""
        return self.num_parameters < SMALL_MODEL_PARAMETERS

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return (self.num_parameters - self.num_tower - embeddings) // self.num_layers

    @property
    def num_decoding(self) -> int:
        """Parameters that can be trained: without an image tower that is not."""
        return self.num_parameters - self.num_frozen


@dataclass(frozen=True)
class TowerFacts:
    """The vision tower of a run whose training data have images, and these images."""

    model_type: str
    is_trained: bool
    num_parameters: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_elements: int
    """Numbers of a patch, before it is embedded."""
    merged: int
    """Patches that become a token."""
    token_outputs: int
    """Numbers that it gives for a token, those for the decoder's first layers included."""
    num_added: int
    """Layers whose outputs it gives beside its own (DeepStack)."""
    total_tokens: int
    """Of all images, each counted once."""
    image_tokens: int
    """Of the largest one."""
    row_tokens: int
    """Most in a conversation or prompt, all its images together."""


@dataclass(frozen=True)
class DataFacts:
    """Lengths in tokens, as the model's own tokenizer counts them."""

    num_train_tasks: int
    max_prompt_tokens: int
    """Longest prompt that the engine will get, of training and evaluation."""
    max_answer_tokens: int | None
    """Longest gold answer with its end token; None when there are none."""
    max_sequence_tokens: int | None = None
    """SFT: longest conversation, held-out ones included."""
    row_sequences: int = 1
    """SFT: sequences of a row, rounded up: 2 for a pair of preferences."""
    num_eval_rows: int = 0
    """SFT: held-out rows whose loss is measured."""
    num_requested_tasks: int | None = None
    """Training tasks that the environment was asked for; None without one."""
    num_eval_tasks: int | None = None
    """Held-out tasks that exist and fit; None if not counted."""
    max_turns: int = 1
    """Most turns of the model in an episode."""
    processes: tuple[int, str] = (0, "there is no environment")
    """Most processes for episodes (0: the run's own process is best), and why."""


@dataclass(frozen=True)
class AdapterFacts:
    """What [lora] adapts of this model."""

    num_parameters: int
    target_modules: tuple[str, ...]
    """Ends of the names of all layers that get an adapter, which no other layer has."""
    num_outputs: int = 0
    """Elements that its matrices output for a token, over all layers of the decoder."""
    num_unreached: int = 0
    """Parameters of matrices that are no linear layers and so cannot be adapted, such as fused experts."""
    unreached: tuple[str, ...] = ()
    """Their names within a layer."""


@dataclass(frozen=True)
class EngineFacts:
    """The vLLM that is installed, for the device that it will run on."""

    version: str
    """Empty where it does not say."""
    checked: tuple[str, ...] = ()
    """Fast paths (`inference.plugin.patches`) that were checked against its source."""
    unchecked: tuple[str, ...] = ()
    """Those that were not."""
    tool_parsers: tuple[str, ...] = ()
    """Names of its tool parsers; empty where they cannot be found."""
    returns_experts: bool = True
    """Whether it, or a patch of ours, can return which experts each token went to."""
    has_flash3: bool = False
    """Whether it brings FlashAttention 3 as a library."""


@dataclass(frozen=True)
class ToolFacts:
    """How the model is shown the tools of the environment."""

    template: str
    """Its chat template; of several, all of them."""
    is_rendered: bool
    """Whether the template renders tools."""
    model_type: str = ""
    """As the model's configuration names its architecture."""


@dataclass(frozen=True)
class Shortage:
    """An earlier process of this run ran out of memory; the values that it had planned."""

    run: str
    """Its name for people."""
    side: Literal["trainer", "engine"]
    row_tokens: int
    """`training.micro_batch_tokens`."""
    checkpointing: bool | Literal["selective"]
    """`training.gradient_checkpointing`."""
    max_num_seqs: int
    """`inference.max_num_seqs`; 0 without an engine."""


@dataclass(frozen=True)
class DiskFacts:
    """The disk that the run folder is on, or will be."""

    free_bytes: int
    own_bytes: int = 0
    """Of the run's own checkpoints and published versions, which new ones replace."""


@dataclass(frozen=True)
class Facts:
    """What was measured; without a GPU the run is planned for the CPU."""

    num_cpus: int
    memory_bytes: int
    model: ModelFacts
    data: DataFacts
    model_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The model's `config.json`, if there are servers."""
    num_gpus: int = 0
    gpu_memory_bytes: int = 0
    """Of one GPU."""
    gpu_capability: int = 0
    """Major compute capability of all GPUs; 0 where they differ."""
    gpu_name: str = ""
    gpu_held_bytes: int = 0
    """Held by other processes, on the GPU with the least free memory."""
    gpu_holders: tuple[str, ...] = ()
    """Those processes, for people."""
    adapter: AdapterFacts | None = None
    """None: all parameters are trained."""
    engine: EngineFacts | None = None
    """None where no vLLM is installed."""
    tools: ToolFacts | None = None
    """None if the environment has no tools."""
    tower: TowerFacts | None = None
    """None without images in the training data."""
    teacher: ModelFacts | None = None
    """Of the teacher that the run starts, if it does."""
    disk: DiskFacts | None = None
    """None if not measured."""
    servers: tuple[ServerFacts, ...] = ()
    """Of `inference.servers`."""
    blind_servers: tuple[str, ...] = ()
    """Addresses of servers without the run folder, if they need it."""
    shortages: tuple[Shortage, ...] = ()
    """Of the run that is planned again, the oldest first."""
    notices: tuple[str, ...] = ()
    """What there is to say of earlier runs; no value depends on it."""
