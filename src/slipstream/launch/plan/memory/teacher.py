"""What a teacher's engine takes and where it is: pure arithmetic on a planned config, in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.config import PlannedConfig, RunConfig
from slipstream.config.traits import engine_workers, starts_teacher
from slipstream.errors import ConfigError
from slipstream.launch.plan.facts import Facts
from slipstream.launch.plan.memory.gpu_shares import ENGINE_RESERVE, USABLE
from slipstream.launch.plan.memory.sizes import (
    CPU_BLOCK_TOKENS,
    GPU_BLOCK_TOKENS,
    gib,
    kv_bytes_per_sequence,
    round_up,
    weights_bytes,
)

SEQUENCES = 16
"""Scored at once; scoring is one pass over many tokens, and more would make it no faster."""
STEP_TOKENS = 2048
"""Tokens of one step: their logits, in float32 twice, are the working memory of scoring."""


@dataclass(frozen=True)
class TeacherRoom:
    """How a teacher's engine is to be started, and what it then holds."""

    max_model_len: int
    max_num_seqs: int
    weights: int
    cache: int
    reserve: int
    """Contexts and workspaces of a GPU, and the logits of a step."""
    gpu: int | None
    """The number of its GPU among those that are visible; None on a CPU."""
    has_own_gpu: bool = False
    gpu_part: float = 0.45
    """The part of its GPU's memory that it may use, as vLLM wants to know it; without effect on a CPU."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.cache + self.reserve

    @property
    def where(self) -> str:
        """For people."""
        if self.gpu is None:
            return "in the machine's memory, with the threads of run.threads while the policy's engine waits for it"
        return f"on GPU {self.gpu}, {'its own' if self.has_own_gpu else 'which it shares'}"


def planned_teacher(config: PlannedConfig, facts: Facts) -> TeacherRoom | None:
    """That of a planned run."""
    length, separate = config.inference.max_model_len, config.run.placement == "separate"
    if not starts_teacher(config):
        return None
    used = engine_workers(config) + separate * config.training.ranks
    return teacher_room(config, facts, length=length, dtype=config.model.dtype, separate=separate, used_cards=used)


def teacher_room(
    config: RunConfig, facts: Facts, *, length: int, dtype: str, separate: bool, used_cards: int
) -> TeacherRoom | None:
    """For sequences of up to `length` tokens in `dtype`; None where the run starts no teacher. `separate`: trainer and
    engine have a GPU each; `used_cards` is how many the two have together. Raises ConfigError for a teacher that cannot
    score them."""
    model = facts.teacher
    if model is None or not starts_teacher(config):
        return None
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
    own = not on_cpu and facts.num_gpus > used_cards
    weights, cache = weights_bytes(model, dtype), SEQUENCES * each
    reserve = logits + (0 if on_cpu else ENGINE_RESERVE)
    part = 0.45 if on_cpu else min(1.0, math.ceil(100 * (weights + cache + reserve) / facts.gpu_memory_bytes) / 100)
    room = TeacherRoom(
        max_model_len=longest,
        max_num_seqs=SEQUENCES,
        weights=weights,
        cache=cache,
        reserve=reserve,
        gpu=None if on_cpu else used_cards if own else config.training.ranks * separate,
        has_own_gpu=own,
        gpu_part=part,
    )
    if not on_cpu and room.total > USABLE * facts.gpu_memory_bytes:
        raise ConfigError(
            f"the teacher takes about {gib(room.total)}, and a GPU has {gib(facts.gpu_memory_bytes)}: use a smaller "
            "teacher, or serve it elsewhere and give teacher.url"
        )
    return room
