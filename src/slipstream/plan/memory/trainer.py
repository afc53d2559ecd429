"""How much memory a trainer keeps between steps, and its rows while they are trained on: counted from shapes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slipstream.algo.custom import reads_reference
from slipstream.config import RLConfig, RunConfig
from slipstream.config.recipes import resolved
from slipstream.config.traits import keeps_copy, shares_weights, uses_critic
from slipstream.plan.facts import Facts, ModelFacts
from slipstream.plan.memory.sizes import (
    BYTES_OF,
    activation_bytes_per_token,
    gathered_bytes,
    training_state_bytes,
    weights_bytes,
)
from slipstream.plan.memory.teacher import TOP_BYTES
from slipstream.plan.memory.tower import feature_bytes, tower_bytes
from slipstream.plan.rank_layout import num_copies

ACTIVATION_MARGIN = 0.6
"""Fraction of the memory left for activations to plan with: the estimate has no workspaces or fragmentation."""
_VOCABULARY_BLOCK = 64
"""vLLM pads the vocabulary to a multiple of it before it shards it."""


def training_state(config: RunConfig, dtype: str, facts: Facts) -> int:
    """Bytes kept by the trainer between steps, without those shared with the engine. Over ranks: of each rank on
    GPUs, of all ranks on a CPU, with the weights of an all-gather for a layer or a step."""
    copy = weights_bytes(facts.model, dtype) if keeps_copy(config) else 0
    state = model_state(config, dtype, facts, with_reference=needs_reference(config))
    state += model_state(config, dtype, facts) if uses_critic(config) else 0
    state -= _shared_bytes(config, dtype, facts.model)
    features = _features(config, dtype, facts)
    if (ranks := config.training.ranks) == 1:
        return copy + state + features
    num_kept = None
    if config.training.reshard == "step":
        num_kept = facts.adapter.num_parameters if facts.adapter else facts.model.num_decoding
    # A frozen tower is whole on each rank, the policy's, a critic's and a reference's.
    towers = 1 + uses_critic(config) + (needs_reference(config) and facts.adapter is None)
    of_towers = towers * facts.model.num_frozen * BYTES_OF[dtype]
    sharded = replace(facts.model, num_parameters=facts.model.num_decoding, num_tower=0, num_frozen=0)
    whole = of_towers + features + gathered_bytes(sharded, dtype, num_kept=num_kept)
    state -= of_towers
    # For a delta rank 0 gathers the whole model.
    num_shards = ranks // num_copies(config)
    return 2 * copy + (-(-state // num_shards) + whole if facts.num_gpus else state + ranks * whole)


def _features(config: RunConfig, dtype: str, facts: Facts) -> int:
    """Bytes of the kept features of images: of the policy's tower, a critic's and a reference's."""
    if facts.tower is None:
        return 0
    num_bytes = feature_bytes(facts.tower, dtype, config.training.prompts_per_batch) * (1 + uses_critic(config))
    if needs_reference(config) and (facts.tower.is_trained or facts.adapter is None):
        num_bytes += feature_bytes(replace(facts.tower, is_trained=False), dtype, 0)
    return num_bytes


def needs_reference(config: RunConfig) -> bool:
    """Whether the run keeps a reference model: for a KL term, a method of SFT, or a hook with its
    log-probabilities."""
    algorithm = config.algorithm
    if isinstance(algorithm, RLConfig):
        return reads_reference(algorithm)
    return config.method is not None and config.method.reads_reference


def _shared_bytes(config: RunConfig, dtype: str, model: ModelFacts) -> int:
    """Bytes of the weights shared by trainer and engine. vLLM pads the vocabulary to blocks; ranks with different
    shards of embedding and LM head then have their own."""
    if not shares_weights(config):
        return 0
    num = model.num_parameters
    if config.training.ranks > 1:
        num -= model.num_frozen
    if config.training.ranks > 1 and model.vocab_size % _VOCABULARY_BLOCK:
        num -= model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return weights_bytes(replace(model, num_parameters=num), dtype)


def model_state(config: RunConfig, dtype: str, facts: Facts, *, with_reference: bool = False) -> int:
    """Bytes of one trained model with its optimizer state, on one rank."""
    num_adapter_parameters = facts.adapter.num_parameters if facts.adapter else None
    trained = num_adapter_parameters or facts.model.num_decoding
    has_initial_adapter = with_reference and config.lora is not None and config.lora.path is not None
    initial_adapter = trained * BYTES_OF[dtype] if has_initial_adapter else 0
    return initial_adapter + training_state_bytes(
        facts.model,
        dtype,
        with_reference=with_reference,
        num_adapter_parameters=num_adapter_parameters,
        optimizer=config.training.optimizer,
        on_gpu=facts.num_gpus > 0,
    )


@dataclass(frozen=True)
class RowMemory:
    """Memory of the trainer's rows while they are trained on, in bytes."""

    each: int
    """A token's, on each rank of its row."""
    state: int
    """The trainer's between steps."""
    margin: float = 1.0
    """Fraction of the memory left for activations to plan with."""
    tower: int = 0
    """A vision tower's while it computes: before a row, or after all of them."""

    def num_bytes(self, tokens: int) -> int:
        """A row's of `tokens` tokens, or the tower's if more."""
        return max(self.each * tokens, self.tower)

    def needed(self, tokens: int) -> float:
        """Memory to leave for it."""
        return self.num_bytes(tokens) / self.margin

    def fitting(self, budget: float, most: int) -> int:
        """Tokens of the longest row that fits into `budget` bytes, at most `most`."""
        return max(0, min(most, int(self.margin * budget // self.each)))


def _longest(config: RunConfig, facts: Facts) -> int:
    """Tokens of the longest training sequence."""
    if not isinstance(config.algorithm, RLConfig):
        return facts.data.max_sequence_tokens or 0
    length = config.inference.max_model_len
    return facts.model.context_length if length == "auto" else length


def _top_bytes_per_token(config: RunConfig, facts: Facts) -> int:
    """Under `teacher.top_k`: the teacher's tokens, and eight tensors of as many float32 numbers of both distributions
    and their divergence. With advantages there is another gradient of the logits, too."""
    if config.teacher is None or not config.teacher.top_k or not isinstance(config.algorithm, RLConfig):
        return 0
    has_other = resolved(config.algorithm).advantage != "none"
    logits = BYTES_OF[config.model.dtype] * facts.model.vocab_size if has_other else 0
    return config.teacher.top_k * (TOP_BYTES + 8 * 4) + logits


def row_memory(config: RunConfig, facts: Facts, *, checkpointing: Any) -> RowMemory:
    """Memory of rows under `config` with `checkpointing` for `training.gradient_checkpointing`."""
    training, dtype = config.training, config.model.dtype
    each = activation_bytes_per_token(
        facts.model,
        dtype,
        checkpointing=checkpointing,
        compiled=training.compile is True,
        offload=training.offload_activations,
        adapter_outputs=facts.adapter.num_outputs if facts.adapter else 0,
        dora=config.lora is not None and config.lora.dora,
        longest=_longest(config, facts),
        fp32_residual=config.model.fp32_residual is True,
        masked=facts.num_gpus > 0 and facts.tower is not None and facts.tower.model_type == "gemma3",
        context_parallel=training.context_parallel,
    )
    each += _top_bytes_per_token(config, facts)
    each = -(-each // training.context_parallel)
    tower = tower_bytes(facts.tower, dtype) if facts.tower is not None else 0
    return RowMemory(each, training_state(config, dtype, facts), ACTIVATION_MARGIN if facts.num_gpus else 1.0, tower)
