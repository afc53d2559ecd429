"""How much memory a model, its optimizer, its activations and its KV cache take. Pure arithmetic, in bytes.

The figures are estimates from shapes: allocator slack, Python and its libraries come on top.
"""

from __future__ import annotations

from typing import Literal

from slipstream.config.bounds import GIB
from slipstream.config.planned import PlannedConfig
from slipstream.config.schema import OptimizerName
from slipstream.plan.facts import ModelFacts

Checkpointing = bool | Literal["auto", "selective"]
"""`training.gradient_checkpointing`; "auto" counts as False."""
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_BLOCK_TOKENS = 128
"""vLLM's KV cache block on a CPU; a sequence takes whole blocks."""
GPU_BLOCK_TOKENS = 16
EIGHT_BIT_BLOCK = 256
"""Elements with a common scale in bitsandbytes' 8-bit optimizer states."""


def weights_bytes(model: ModelFacts, dtype: str) -> int:
    """The live weights."""
    return model.num_parameters * BYTES_OF[dtype]


def engine_bytes_per_gpu(config: PlannedConfig, model: ModelFacts) -> int:
    """Weights and KV cache of an engine on each of its GPUs, as torch counts them there: without the CUDA context."""
    weights = -(-weights_bytes(model, config.model.dtype) // config.inference.tensor_parallel_size)
    return weights + int(config.inference.kv_cache_gib * GIB)


def training_state_bytes(
    model: ModelFacts,
    dtype: str,
    *,
    with_reference: bool,
    num_adapter_parameters: int | None = None,
    optimizer: OptimizerName = "adamw",
    on_gpu: bool = False,
) -> int:
    """Bytes of the live weights, the optimizer's states, and, beside a row's activations, gradients in the model's
    dtype: the head's, or all of a layer; products that add up gradients themselves need none. They then become part of
    the fp32 ones, on a CPU by way of an fp32 copy. (A tied head has three for a moment, after its larger row has gone;
    nor does an update take as much.) With a KL term, also the frozen reference. Under LoRA the frozen weights, also the
    reference, and the rest for the adapter alone. If `on_gpu`, without the moments of whole matrices: they can move to
    the CPU's memory."""
    weights = weights_bytes(model, dtype)
    if num_adapter_parameters is not None:
        kept = optimizer_bytes(optimizer, num_adapter_parameters, None)
        return weights + num_adapter_parameters * 2 * BYTES_OF[dtype] + kept
    kept = optimizer_bytes(optimizer, model.num_decoding, model)
    kept -= paged_bytes(optimizer, model) if on_gpu else 0
    head = model.vocab_size * model.hidden_size
    passing = max(head, _layer_parameters(model)) * BYTES_OF[dtype]
    if not on_gpu and dtype != "float32":
        passing += 4 * head
    return weights + passing + kept + (weights if with_reference else 0)


def optimizer_bytes(optimizer: OptimizerName, num_parameters: int, model: ModelFacts | None) -> int:
    """fp32 gradients, fp32 masters (not for `adamw_bf16`) and optimizer state: two moments; for `muon` one, and two of
    embeddings and LM head; with 8 bits a byte each and two scales a block. `model` is None for an adapter."""
    masters = 0 if optimizer == "adamw_bf16" else 4
    if optimizer == "muon":
        vocabulary = _vocabulary_parameters(model) if model else 0
        return (4 + masters + 4) * num_parameters + 4 * vocabulary
    if optimizer in ("adamw_8bit", "adamw_paged_8bit"):
        return (4 + masters + 2) * num_parameters + 2 * 4 * num_parameters // EIGHT_BIT_BLOCK
    return (4 + masters + 8) * num_parameters


def paged_bytes(optimizer: OptimizerName, model: ModelFacts) -> int:
    """Bytes of optimizer moments that can move from a GPU to the CPU's memory."""
    return {"adamw_paged": 8, "adamw_paged_8bit": 2}.get(optimizer, 0) * model.num_decoding


def gathered_bytes(model: ModelFacts, dtype: str, *, num_kept: int | None = None) -> int:
    """Bytes FSDP2 all-gathers on a rank at once: embeddings, LM head and two layers, with their gradients
    (reduce-scattered in fp32). With `num_kept`, whole weights stay through a step: all of them, and the fp32 gradients
    of the `num_kept` trained parameters."""
    passing = (_vocabulary_parameters(model) + 2 * _layer_parameters(model)) * (2 * BYTES_OF[dtype] + 4)
    return passing if num_kept is None else passing + weights_bytes(model, dtype) + 4 * num_kept


def _vocabulary_parameters(model: ModelFacts) -> int:
    return model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)


def _layer_parameters(model: ModelFacts) -> int:
    tower = max(model.num_tower, model.num_frozen)
    return max(0, model.num_parameters - tower - _vocabulary_parameters(model)) // model.num_layers


def activation_bytes_per_token(
    model: ModelFacts,
    dtype: str,
    *,
    checkpointing: Checkpointing = False,
    compiled: bool = False,
    offload: bool = False,
    adapter_outputs: int = 0,
    dora: bool = False,
    longest: int = 0,
    fp32_residual: bool = False,
    masked: bool = False,
    context_parallel: int = 1,
) -> int:
    """Bytes kept for a trained token until its backward pass; `longest`: tokens of the longest row, for
    `score_bytes_per_token`.

    Every layer keeps its `layer_elements`. If it is computed again, it keeps its input (`offload` moves all but two
    inputs away), and one layer at a time the rest. An adapter's matrices give `adapter_outputs` numbers, all layers
    together, kept with products (`selective`); DoRA keeps as many more to multiply. Logits: as if every token
    carried loss. `masked`: attention has a mask, see `masked_elements`. `context_parallel`: see `exchanged_elements`;
    the bytes are those of all its ranks.
    """
    # The residual stream twice in a layer, and once as its input, with two more bytes.
    wider = model.hidden_size * 2 // BYTES_OF[dtype] if fp32_residual else 0
    whole = layer_elements(model, compiled=compiled) + 2 * wider + (masked_elements(model, dtype) if masked else 0)
    whole += exchanged_elements(model, context_parallel)
    beside = adapter_outputs if dora else 0
    if checkpointing is True:
        inputs = 2 if offload else model.num_layers
        elements = inputs * (model.hidden_size + wider) + whole + beside // model.num_layers
    elif checkpointing == "selective" and not compiled:
        elements = model.num_layers * (layer_elements(model, selective=True) + wider) + adapter_outputs + whole
    else:
        elements = model.num_layers * whole + beside
    scores = score_bytes_per_token(model, dtype, longest, checkpointing=checkpointing)
    return elements * BYTES_OF[dtype] + logits_bytes_per_token(model, dtype) + scores


def score_bytes_per_token(model: ModelFacts, dtype: str, longest: int, *, checkpointing: Checkpointing = False) -> int:
    """Bytes kept by eager attention for a token of a row of `longest` tokens, for each of these and in every head:
    the probability in fp32, also in the model's dtype if different, and the soft-capped score. While a layer
    computes, the score and its gradient too. Under `selective` checkpointing layers keep the score only."""
    if not model.scores:
        return 0
    size = BYTES_OF[dtype]
    kept = 4 + (size if size < 4 else 0) + (size if model.scores == "capped" else 0)
    passing = 4 + size
    if checkpointing is True:
        pair = kept + passing
    elif checkpointing == "selective":
        pair = model.num_layers * size + kept + passing
    else:
        pair = model.num_layers * kept + passing
    return model.num_heads * longest * pair


def layer_elements(model: ModelFacts, *, compiled: bool = False, selective: bool = False) -> int:
    """Elements kept by a layer for a token.

    Uncompiled: eight vectors of the hidden size (the residual stream twice, both norms with their fp32 copies, the two
    projections' outputs), q, k and v before and after the rotation, the attention's output, and four vectors of the
    MLP's size. Compiled: the residual stream twice, both norms' outputs, q, k and v after the rotation, the attention's
    output, and three of the MLP. `selective`: the input, and the outputs of q, k, v, attention, all projections.
    """
    queries, keys = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    if selective:
        return 3 * model.hidden_size + 2 * queries + keys + 2 * model.intermediate_size
    if compiled:
        return 4 * model.hidden_size + 2 * queries + keys + 3 * model.intermediate_size
    return 8 * model.hidden_size + 3 * queries + 2 * keys + 4 * model.intermediate_size


def masked_elements(model: ModelFacts, dtype: str) -> int:
    """A layer's further elements for a token if a GPU's attention has a mask. Padded q, k and v, each with all query
    heads, replace its own. The output is padded, too, and the scores' log-sum-exp is kept."""
    queries, keys = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    return 3 * queries - keys + 4 // BYTES_OF[dtype] * model.num_heads


def exchanged_elements(model: ModelFacts, context_parallel: int) -> int:
    """A layer's further elements for a token when ranks exchange heads: attention's output in a second layout, and
    copies of keys and values with fewer heads than ranks."""
    if context_parallel == 1:
        return 0
    copies = max(0, context_parallel - model.num_kv_heads)
    return (model.num_heads + 2 * copies) * model.head_dim


def logits_bytes_per_token(model: ModelFacts, dtype: str) -> int:
    """Bytes of a scored token's logits and their gradient in the model's dtype; fp32 copies come in small chunks."""
    return 2 * BYTES_OF[dtype] * model.vocab_size


def kv_bytes_per_sequence(
    model: ModelFacts,
    dtype: str,
    max_model_len: int,
    block_tokens: int = CPU_BLOCK_TOKENS,
    tensor_parallel_size: int = 1,
) -> int:
    """KV cache of a sequence of full length in each worker, in whole blocks; each worker has at least one head."""
    num_heads = max(1, model.num_kv_heads // tensor_parallel_size)
    per_token = 2 * model.num_layers * num_heads * model.head_dim * BYTES_OF[dtype]
    return round_up(max_model_len, block_tokens) * per_token


def round_up(number: int, multiple: int) -> int:
    """The next multiple at or above `number`."""
    return -(-number // multiple) * multiple


def gib(num_bytes: float) -> str:
    """`num_bytes` in GiB, for people."""
    return f"{num_bytes / GIB:.2f} GiB"
