"""What a trainer keeps and what its rows take: counted from shapes, and corrected by what earlier runs took. Pure.

The count knows every tensor and nothing of an allocator: rows of all lengths leave blocks that the next row cannot use,
and what is held is what an engine on the same card cannot have. So where an earlier run differs from this one in
nothing that decides memory but the length of its rows (`memory_settings`), what it held is compared with what is
counted for it today, and the difference belongs to this run too. One figure does not say which part of the difference
grows with the rows, so the dearer of both answers is taken: what was more is expected of shorter rows whole and of
longer ones in proportion, what was less of longer rows whole and of shorter ones in proportion. Of several such runs
that one counts which makes this one's rows largest. So no plan expects less because a run held more, and a run that
kept to a corrected plan does not undo the correction.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from slipstream import __version__
from slipstream.config import RLConfig, RunConfig
from slipstream.config.traits import keeps_copy, shares_weights, uses_critic, uses_engine
from slipstream.launch.plan.facts import Facts, ModelFacts, Peak
from slipstream.launch.plan.memory.sizes import (
    activation_bytes_per_token,
    gathered_bytes,
    gib,
    training_state_bytes,
    weights_bytes,
)

ACTIVATION_MARGIN = 0.6
"""Part of a GPU's room for activations that is planned with: the estimate knows no workspaces and no fragments."""
MOST_LESS = 0.2
"""Part of the counted activations that a run can take away from them; the rest of a trainer is counted exactly."""
MOST_MORE = 0.25
"""Part of all that is counted which a run can add: beyond it an allocator keeps blocks because nobody wants them."""
MOST_STRETCH = 2.0
"""What was more is at most doubled for longer rows: short ones say little of them."""
WAYS = (False, "selective", True)
"""Of `training.gradient_checkpointing`."""
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


def memory_settings(config: RunConfig, facts: Facts) -> dict[str, Any]:
    """All that decides how much a trainer takes of its GPU, but the length of its rows: the card, the libraries, the
    model, and what is trained how. Where it is a setting it has its name. Numbers, text and truth values only; of a
    config without any `auto` in these."""
    training, adapter = config.training, facts.adapter
    model = dataclasses.asdict(facts.model)
    for name in ("context_length", "original_context", "thinks", "dtype"):
        del model[name]
    return {
        "card": facts.card,
        "card_bytes": facts.gpu_memory_bytes,
        "torch": facts.torch,
        "slipstream": __version__,
        **model,
        "adapter_parameters": adapter.num_parameters if adapter else 0,
        "model.dtype": config.model.dtype,
        "model.fp32_head": config.model.fp32_head,
        "lora.dora": config.lora is not None and config.lora.dora,
        "algorithm": "sft" if config.algorithm.kind == "sft" else "rl",
        "reference": _has_reference(config),
        "critic": uses_critic(config),
        "weights.bridge": config.weights.bridge if uses_engine(config) else "none",
        "weights.delta": keeps_copy(config),
        "training.reshard": training.reshard if training.ranks > 1 else "none",
        **{
            f"training.{name}": getattr(training, name)
            for name in (
                "optimizer",
                "ranks",
                "packing",
                "compile",
                "gradient_checkpointing",
                "offload_activations",
            )
        },
    }


@dataclass(frozen=True)
class Rows:
    """What rows of the trainer take while they are trained on."""

    each: int
    """Bytes of a token, as counted."""
    state: int
    """What the trainer keeps beside them, as counted."""
    peaks: tuple[Peak, ...] = ()
    """Of runs that differ in nothing but the length of their rows."""
    margin: float = 1.0
    """Part of the room that may be planned with."""

    def num_bytes(self, tokens: int) -> int:
        """Of a row of so many tokens."""
        return self.each * tokens + max((self._beyond(peak, tokens) for peak in self.peaks), default=0)

    def needed(self, tokens: int) -> float:
        """How much room there must be for such a row. Where a run had rows as long, that is what it held, and what is
        left of the room is not asked for."""
        needed = self.num_bytes(tokens) / self.margin
        seen = [
            max(self.num_bytes(peak.row_tokens), peak.held - self.state)
            for peak in self.peaks
            if peak.row_tokens >= tokens
        ]
        return min(needed, max(seen, default=needed))

    def fitting(self, room: float, most: int) -> int:
        """Tokens of the longest row that `room` has place for, at most so many."""
        return bisect.bisect_right(range(1, most + 1), self.margin * room, key=self.num_bytes)

    def told(self, tokens: int) -> str:
        """What corrects rows of so many tokens; empty when nothing does."""
        if not self.peaks:
            return ""
        peak = max(self.peaks, key=lambda peak: self._beyond(peak, tokens))
        counted = self.state + self.each * peak.row_tokens
        return (
            f"corrected by {peak.run}: with rows of {peak.row_tokens} tokens its trainer took {gib(peak.held)} of this "
            f"card where {gib(counted)} are counted"
        )

    def _beyond(self, peak: Peak, tokens: int) -> int:
        """What the run of `peak` adds to the count of a row, or takes away from it."""
        activations, stretch = self.each * peak.row_tokens, tokens / peak.row_tokens
        difference = peak.held - self.state - activations
        if difference < 0:
            return int(max(difference, -MOST_LESS * activations) * min(1.0, stretch))
        return int(min(difference, MOST_MORE * (self.state + activations)) * min(MOST_STRETCH, max(1.0, stretch)))


def _longest(config: RunConfig, facts: Facts) -> int:
    """Tokens of the longest sequence that is trained on."""
    if not isinstance(config.algorithm, RLConfig):
        return facts.data.max_sequence_tokens or 0
    length = config.inference.max_model_len
    return facts.model.context_length if length == "auto" else length


def rows_of(config: RunConfig, facts: Facts, *, checkpointing: Any) -> Rows:
    """Rows as they are computed under `config`, in which nothing but `training.gradient_checkpointing` need be decided
    of what `memory_settings` asks for."""
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
    settings = memory_settings(config, facts) | {"training.gradient_checkpointing": checkpointing}
    return Rows(
        each,
        training_state(config, dtype, facts),
        tuple(peak for peak in facts.peaks if peak.settings == settings),
        ACTIVATION_MARGIN if facts.num_gpus else 1.0,
    )
