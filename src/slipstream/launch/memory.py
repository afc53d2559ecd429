"""How much memory a model, its optimizer, its activations and its KV cache take. Pure arithmetic, in bytes.

The figures are estimates from shapes: allocator slack, Python and its libraries come on top.
"""

from __future__ import annotations

from typing import Literal

from slipstream.config.schema import OptimizerName
from slipstream.launch.measured import ModelFacts

Checkpointing = bool | Literal["auto", "selective"]
"""`training.gradient_checkpointing`; as long as it is "auto", as if nothing were computed again."""
GIB = 1 << 30
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_BLOCK_TOKENS = 128
"""vLLM's KV cache block on a CPU; a sequence takes whole blocks."""
GPU_BLOCK_TOKENS = 16
_ROUNDING_BYTES = 10
"""Of each number of the parameter that `adamw_bf16` rounds: its new value, the noise, and the rounded one."""
EIGHT_BIT_BLOCK = 256
"""Numbers that share a scale in bitsandbytes' 8-bit moments."""


def weights_bytes(model: ModelFacts, dtype: str) -> int:
    """The live weights."""
    return model.num_parameters * BYTES_OF[dtype]


def training_state_bytes(
    model: ModelFacts,
    dtype: str,
    *,
    with_reference: bool,
    num_adapter_parameters: int | None = None,
    optimizer: OptimizerName = "adamw",
    paged: bool = False,
) -> int:
    """Live weights, what the optimizer keeps, and what is there for a moment: the gradients of the layer that is in its
    backward pass, or under `adamw_bf16` one parameter's new values and their noise (each gradient goes when its new
    weights, which are smaller, come). Where products add up gradients themselves a layer has none, but whether they do
    is settled when the run has begun, and an embedding's is mostly the largest. And, where there is a KL term, the
    frozen reference. Under LoRA the frozen weights, which are the reference too, and the rest for the adapter alone. If
    `paged`, without the moments of whole matrices that the CPU's memory takes where there is no room."""
    weights = weights_bytes(model, dtype)
    if num_adapter_parameters is not None:
        kept = optimizer_bytes(optimizer, num_adapter_parameters, None)
        return weights + num_adapter_parameters * 2 * BYTES_OF[dtype] + kept
    kept = optimizer_bytes(optimizer, model.num_decoding, model)
    kept -= paged_bytes(optimizer, model) if paged else 0
    # A gradient in the model's dtype becomes part of the fp32 one as soon as it is whole; a tied head has two.
    passing = max(2 * model.vocab_size * model.hidden_size, model.num_decoding // model.num_layers) * BYTES_OF[dtype]
    if optimizer == "adamw_bf16":
        passing = max(passing, _ROUNDING_BYTES * model.vocab_size * model.hidden_size)
    passing = min(passing, weights)
    return weights + passing + kept + (weights if with_reference else 0)


def optimizer_bytes(optimizer: OptimizerName, num_parameters: int, model: ModelFacts | None) -> int:
    """fp32 gradients, fp32 masters but for `adamw_bf16`, and what the rule remembers: two moments, under `muon` one of
    all but the vocabulary's matrices, under `adamw_8bit` a byte for each and two scales for each block. `model` is None
    for an adapter's parameters."""
    masters = 0 if optimizer == "adamw_bf16" else 4
    if optimizer == "muon":
        vocabulary = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2) if model else 0
        return (4 + masters + 4) * num_parameters + 4 * vocabulary
    if optimizer == "adamw_8bit":
        return (4 + masters + 2) * num_parameters + 2 * 4 * num_parameters // EIGHT_BIT_BLOCK
    return (4 + masters + 8) * num_parameters


def paged_bytes(optimizer: OptimizerName, model: ModelFacts) -> int:
    """Moments that may leave a GPU."""
    return 8 * model.num_decoding if optimizer == "adamw_paged" else 0


def gathered_bytes(model: ModelFacts, dtype: str) -> int:
    """What a rank of several has whole at once, as FSDP2 gathers it: embedding, head and two layers, with their
    gradients, which are added up over the ranks in fp32."""
    vocabulary = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    layer = max(0, model.num_decoding - vocabulary) // model.num_layers
    return (vocabulary + 2 * layer) * (2 * BYTES_OF[dtype] + 4)


def activation_bytes_per_token(
    model: ModelFacts,
    dtype: str,
    *,
    checkpointing: Checkpointing = False,
    compiled: bool = False,
    offload: bool = False,
) -> int:
    """What one trained token keeps until its backward pass.

    Every layer keeps what `layer_elements` says; where it is computed again, its input (which `offload` moves away, but
    for two), and one layer at a time the rest. Logits: as if every token carried loss.
    """
    whole = layer_elements(model, compiled=compiled)
    if checkpointing is True:
        inputs = 2 if offload else model.num_layers
        elements = inputs * model.hidden_size + whole
    elif checkpointing == "selective" and not compiled:
        elements = model.num_layers * layer_elements(model, selective=True) + whole
    else:
        elements = model.num_layers * whole
    return elements * BYTES_OF[dtype] + logits_bytes_per_token(model, dtype)


def layer_elements(model: ModelFacts, *, compiled: bool = False, selective: bool = False) -> int:
    """Numbers that a layer keeps of a token.

    As it comes: eight vectors of the hidden size (the residual stream twice, both norms with their fp32 copies, the two
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


def logits_bytes_per_token(model: ModelFacts, dtype: str) -> int:
    """What a scored token takes at the end of a forward pass: its logits and their gradient, in the model's dtype; fp32
    is there in small chunks only."""
    return 2 * BYTES_OF[dtype] * model.vocab_size


def kv_bytes_per_sequence(
    model: ModelFacts,
    dtype: str,
    max_model_len: int,
    block_tokens: int = CPU_BLOCK_TOKENS,
    tensor_parallel_size: int = 1,
) -> int:
    """Keys and values of one sequence of full length, in whole blocks, in each worker; a head is in one at least."""
    num_heads = max(1, model.num_kv_heads // tensor_parallel_size)
    per_token = 2 * model.num_layers * num_heads * model.head_dim * BYTES_OF[dtype]
    return round_up(max_model_len, block_tokens) * per_token


def round_up(number: int, multiple: int) -> int:
    """The next multiple at or above `number`."""
    return -(-number // multiple) * multiple


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / GIB:.2f} GiB"
