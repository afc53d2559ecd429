"""Memory and GPU of a teacher's engine: pure arithmetic on a planned config, in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.config import PlannedConfig
from slipstream.config.planned import PlannedRL
from slipstream.config.traits import engine_workers, starts_teacher
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts
from slipstream.plan.memory.cards import held_by_others
from slipstream.plan.memory.gpu_shares import ENGINE_RESERVE, usable_bytes
from slipstream.plan.memory.sizes import (
    CPU_BLOCK_TOKENS,
    GPU_BLOCK_TOKENS,
    gib,
    kv_bytes_per_sequence,
    round_up,
    weights_bytes,
)

SEQUENCES = 16
"""Sequences scored at once; scoring is prefill, so more would be no faster."""
STEP_TOKENS = 2048
"""Tokens of a step; the memory of scoring is their logits, twice in float32."""

TOP_BYTES = 12
"""A token's id and its log-probability."""
_MOST_TOP_BYTES = {"redis": 1 << 29}
_MOST = 1 << 30
"""The largest batch: it is one value of Redis, 512 MiB, or one message between processes, 1 GiB."""


@dataclass(frozen=True)
class TeacherMemory:
    """How to start a teacher's engine, and its memory."""

    max_model_len: int
    max_num_seqs: int
    weights: int
    cache: int
    reserve: int
    """Contexts and workspaces of a GPU, and the logits of a step."""
    gpu: int | None
    """The number of its GPU among those that are visible; None on a CPU."""
    has_own_gpu: bool = False
    gpu_memory_utilization: float = 0.45
    """vLLM's `gpu_memory_utilization`; without effect on a CPU."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.cache + self.reserve

    @property
    def where(self) -> str:
        """Where it is, for people."""
        if self.gpu is None:
            return "in the machine's memory, with the threads of run.threads while the policy's engine waits for it"
        return f"on GPU {self.gpu}, {'its own' if self.has_own_gpu else 'which it shares'}"


def top_bytes(config: PlannedConfig) -> int:
    """The teacher's likeliest tokens in a batch of completions as long as allowed; 0 without `teacher.top_k`."""
    if config.teacher is None or not config.teacher.top_k or not isinstance(config.algorithm, PlannedRL):
        return 0
    num_rollouts = config.training.prompts_per_batch * config.algorithm.group_size
    return num_rollouts * config.sampling.max_tokens * config.teacher.top_k * TOP_BYTES


def check_top_k(config: PlannedConfig, facts: Facts) -> None:
    """Raise ConfigError for a `teacher.top_k` beyond the vocabulary, or with batches that are too large."""
    if not (taken := top_bytes(config)):
        return
    assert config.teacher is not None
    assert config.teacher.top_k is not None
    top_k, most = config.teacher.top_k, _MOST_TOP_BYTES.get(config.run.streams, _MOST)
    if top_k > facts.model.vocab_size:
        raise ConfigError(
            f"teacher.top_k = {top_k} is more than the vocabulary of {facts.model.vocab_size} tokens: lower it"
        )
    if taken > most:
        raise ConfigError(
            f"teacher.top_k = {top_k} makes batches of up to {gib(taken)}, and {gib(most)} is the most: lower it to "
            f"{max(1, top_k * most // taken)}, or training.prompts_per_batch or sampling.max_tokens"
        )


def planned_teacher(config: PlannedConfig, facts: Facts) -> TeacherMemory | None:
    """The teacher's engine, once lengths, engines and placement are decided; None if the run starts none. Raises
    ConfigError if it cannot score the run's sequences."""
    model = facts.teacher
    if model is None or not starts_teacher(config):
        return None
    length, separate, dtype = config.inference.max_model_len, config.run.placement == "separate", config.model.dtype
    num_used_gpus = engine_workers(config) + separate * config.training.ranks
    if model.context_length <= length:
        raise ConfigError(
            f"teacher.path has a context of {model.context_length} tokens, and scoring sequences of "
            f"inference.max_model_len = {length} takes one more than that: lower sampling.max_tokens, or use another "
            "teacher"
        )
    longest = min(model.context_length, round_up(length + 1, GPU_BLOCK_TOKENS))
    on_cpu = facts.num_gpus == 0
    block = CPU_BLOCK_TOKENS if on_cpu else GPU_BLOCK_TOKENS
    each = kv_bytes_per_sequence(model, dtype, longest + block, block)
    logits = 2 * 4 * STEP_TOKENS * model.vocab_size
    assert config.teacher is not None
    # Ids are sorted as int64, in vLLM and in its answer.
    logits += STEP_TOKENS * (config.teacher.top_k or 0) * 2 * TOP_BYTES
    own = not on_cpu and facts.num_gpus > num_used_gpus
    weights, cache = weights_bytes(model, dtype), SEQUENCES * each
    reserve = logits + (0 if on_cpu else ENGINE_RESERVE)
    part = 0.45 if on_cpu else min(1.0, math.ceil(100 * (weights + cache + reserve) / facts.gpu_memory_bytes) / 100)
    teacher = TeacherMemory(
        max_model_len=longest,
        max_num_seqs=SEQUENCES,
        weights=weights,
        cache=cache,
        reserve=reserve,
        gpu=None if on_cpu else num_used_gpus if own else config.training.ranks * separate,
        has_own_gpu=own,
        gpu_memory_utilization=part,
    )
    if not on_cpu and teacher.total > usable_bytes(facts):
        raise ConfigError(
            f"the teacher takes about {gib(teacher.total)}, and a GPU has {gib(facts.gpu_memory_bytes)}"
            f"{held_by_others(facts)}: use a smaller "
            "teacher, or serve it elsewhere and give teacher.url"
        )
    return teacher
