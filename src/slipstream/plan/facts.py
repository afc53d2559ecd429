"""The facts behind a plan, as plain numbers; `measure.py` measures them."""

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
    """Parameters of an image tower among them."""
    num_frozen: int = 0
    """The same if it is not trained."""
    original_context: int = 0
    """For a longer context its rotary embedding has other factors (longrope); 0 if it has the same."""
    rotary: str = "default"
    """How the frequencies of its rotary embedding are scaled, as its configuration names it (`llama3`, `yarn`)."""
    window: int = 0
    """Most tokens the attention of some layers reaches back; 0 if all layers see the whole context."""
    scores: Literal["", "plain", "capped"] = ""
    """Whether attention materialises its score matrix (eager attention without packing), with soft-capping or not."""
    architecture: str = ""
    """The class of its network, as its configuration names it; empty for code of its own."""
    unpackable: str = ""
    """Why sequences cannot be packed into one row; empty if they can."""
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
        """Trainable parameters: without an untrained image tower."""
        return self.num_parameters - self.num_frozen


@dataclass(frozen=True)
class TowerFacts:
    """The vision tower of a run with images in its training data, and these images."""

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
    """Patches merged into a token."""
    token_outputs: int
    """Numbers it outputs for a token, those for the decoder's first layers included."""
    num_added: int
    """Layers with outputs beside its own (DeepStack)."""
    total_tokens: int
    """Tokens of all images, each counted once."""
    image_tokens: int
    """Tokens of the largest one."""
    row_tokens: int
    """Most in a conversation or prompt, all its images together."""


@dataclass(frozen=True)
class DataFacts:
    """Lengths in tokens, as the model's own tokenizer counts them."""

    num_train_tasks: int
    max_prompt_tokens: int
    """Longest prompt for the engine, of training and evaluation."""
    max_answer_tokens: int | None
    """Longest gold answer with its end token; None when there are none."""
    max_sequence_tokens: int | None = None
    """SFT: longest conversation, held-out ones included."""
    row_sequences: int = 1
    """SFT: sequences of a row, rounded up: 2 for a pair of preferences."""
    num_eval_rows: int = 0
    """SFT: held-out rows with a measured loss."""
    num_requested_tasks: int | None = None
    """Training tasks requested of the environment; None without one."""
    num_eval_tasks: int | None = None
    """Existing held-out tasks that fit; None if not counted."""
    max_turns: int = 1
    """Most turns of the model in an episode."""
    processes: tuple[int, str] = (0, "there is no environment")
    """Most processes for episodes (0: the run's own process is best), and why."""


@dataclass(frozen=True)
class AdapterFacts:
    """The parts of this model adapted by [lora]."""

    num_parameters: int
    target_modules: tuple[str, ...]
    """Ends of the names of all adapted layers; no other layer has them."""
    num_outputs: int = 0
    """Elements output by its matrices for a token, over all layers of the decoder."""
    num_unreached: int = 0
    """Parameters of matrices outside linear layers, such as fused experts: they cannot be adapted."""
    unreached: tuple[str, ...] = ()
    """Their names within a layer."""


@dataclass(frozen=True)
class EngineFacts:
    """The installed vLLM, for the device of its run."""

    version: str
    """Empty if unknown."""
    checked: tuple[str, ...] = ()
    """Fast paths (`inference.plugin.patches`) checked against its source."""
    unchecked: tuple[str, ...] = ()
    """Fast paths not checked against it."""
    tool_parsers: tuple[str, ...] = ()
    """Names of its tool parsers; empty if they cannot be found."""
    returns_experts: bool = True
    """Whether it, or a patch of ours, can return each token's experts."""
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
    """An earlier process of this run ran out of memory; its planned values."""

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
    """The disk of the run folder, present or future."""

    free_bytes: int
    own_bytes: int = 0
    """Bytes of the run's own checkpoints and published versions; new ones replace them."""


@dataclass(frozen=True)
class Facts:
    """Measurements; without a GPU the run is planned for the CPU."""

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
    """Major compute capability of all GPUs; 0 if they differ."""
    gpu_name: str = ""
    gpu_held_bytes: int = 0
    """Held by other processes, on the GPU with the least free memory."""
    gpu_holders: tuple[str, ...] = ()
    """The processes, for people."""
    adapter: AdapterFacts | None = None
    """None: all parameters are trained."""
    engine: EngineFacts | None = None
    """None without an installed vLLM."""
    tools: ToolFacts | None = None
    """None if the environment has no tools."""
    tower: TowerFacts | None = None
    """None without images in the training data."""
    teacher: ModelFacts | None = None
    """Facts of the run's own teacher, if it starts one."""
    disk: DiskFacts | None = None
    """None if not measured."""
    servers: tuple[ServerFacts, ...] = ()
    """Facts of `inference.servers`."""
    blind_servers: tuple[str, ...] = ()
    """Addresses of servers without the run folder, if they need it."""
    shortages: tuple[Shortage, ...] = ()
    """Shortages of the run planned again, the oldest first."""
    notices: tuple[str, ...] = ()
    """Sentences on earlier runs; no value depends on them."""
