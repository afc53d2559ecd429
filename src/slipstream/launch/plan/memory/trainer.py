"""How much memory a trainer keeps between steps, and its rows while they are trained on: counted from shapes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import RLConfig, RunConfig
from slipstream.config.traits import keeps_copy, shares_weights, uses_critic
from slipstream.launch.plan.facts import Facts, ModelFacts
from slipstream.launch.plan.memory.sizes import (
    activation_bytes_per_token,
    gathered_bytes,
    training_state_bytes,
    weights_bytes,
)

ACTIVATION_MARGIN = 0.6
"""Part of a GPU's room for activations that is planned with: the estimate knows no workspaces and no fragments."""
_WORD_BLOCK = 64
"""vLLM fills the vocabulary up to a multiple of it before it divides it."""


def training_state(config: RunConfig, dtype: str, facts: Facts) -> int:
    """Bytes of what the trainer keeps between steps, beside what it shares with the engine: of several ranks, on GPUs
    what each keeps, and on a CPU all together, in both cases with what is gathered for a layer, or a step, to
    compute."""
    copy = weights_bytes(facts.model, dtype) if keeps_copy(config) else 0
    state = model_state(config, dtype, facts, with_reference=_has_reference(config))
    state += model_state(config, dtype, facts) if uses_critic(config) else 0
    state -= _shared_bytes(config, dtype, facts.model)
    if (ranks := config.training.ranks) == 1:
        return copy + state
    num_kept = None
    if config.training.reshard == "step":
        num_kept = facts.adapter.num_parameters if facts.adapter else facts.model.num_decoding
    # For a delta all of it comes together in rank 0.
    copy, together = 2 * copy, gathered_bytes(facts.model, dtype, num_kept=num_kept)
    return copy + (-(-state // ranks) + together if facts.num_gpus else state + ranks * together)


def _has_reference(config: RunConfig) -> bool:
    return isinstance(config.algorithm, RLConfig) and config.algorithm.kl_coef > 0


def _shared_bytes(config: RunConfig, dtype: str, model: ModelFacts) -> int:
    """What trainer and engine have together. Workers have words in blocks; ranks that would divide them otherwise have
    their own."""
    if not shares_weights(config):
        return 0
    num = model.num_parameters
    if config.training.ranks > 1 and model.vocab_size % _WORD_BLOCK:
        num -= model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return weights_bytes(replace(model, num_parameters=num), dtype)


def model_state(config: RunConfig, dtype: str, facts: Facts, *, with_reference: bool = False) -> int:
    """The same of one model that is trained, all of it."""
    num_adapter_parameters = facts.adapter.num_parameters if facts.adapter else None
    return training_state_bytes(
        facts.model,
        dtype,
        with_reference=with_reference,
        num_adapter_parameters=num_adapter_parameters,
        optimizer=config.training.optimizer,
        on_gpu=facts.num_gpus > 0,
    )


@dataclass(frozen=True)
class Rows:
    """What rows of the trainer take while they are trained on."""

    each: int
    """Bytes of a token, as counted."""
    state: int
    """What the trainer keeps beside them, as counted."""
    margin: float = 1.0
    """Part of the room that may be planned with."""

    def num_bytes(self, tokens: int) -> int:
        """Of a row of so many tokens."""
        return self.each * tokens

    def needed(self, tokens: int) -> float:
        """How much room there must be for such a row."""
        return self.num_bytes(tokens) / self.margin

    def fitting(self, room: float, most: int) -> int:
        """Tokens of the longest row that `room` has place for, at most so many."""
        return max(0, min(most, int(self.margin * room // self.each)))


def _longest(config: RunConfig, facts: Facts) -> int:
    """Tokens of the longest sequence that is trained on."""
    if not isinstance(config.algorithm, RLConfig):
        return facts.data.max_sequence_tokens or 0
    length = config.inference.max_model_len
    return facts.model.context_length if length == "auto" else length


def rows_of(config: RunConfig, facts: Facts, *, checkpointing: Any) -> Rows:
    """Rows as they are computed under `config`, in which `training.gradient_checkpointing` need not be decided."""
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
    )
    return Rows(each, training_state(config, dtype, facts), ACTIVATION_MARGIN if facts.num_gpus else 1.0)
