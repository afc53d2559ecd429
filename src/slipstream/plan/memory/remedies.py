"""Advice for a run with too little memory: only steps beyond its settings."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config import RunConfig
from slipstream.config.traits import uses_engine
from slipstream.plan.facts import Facts
from slipstream.plan.memory.cards import has_bfloat16


def either(remedies: Sequence[str]) -> str:
    """One sentence of them."""
    *first, last = remedies
    return f"{', '.join(first)}, or {last}" if first else last


def ways_to_need_less(config: RunConfig, facts: Facts, *, of_trainer: bool = True, of_engine: bool = True) -> list[str]:
    """Ways for a planned `config` to need less memory: of the trainer, of the engine, or of either."""
    training, on_gpu = config.training, facts.num_gpus > 0
    found = ["use a smaller model"]
    if of_trainer and config.lora is None:
        found.append("set [lora]")
    if config.model.dtype == "float32":
        found.append(f'set model.dtype = "{"bfloat16" if has_bfloat16(facts) else "float16"}"')
    if of_trainer and training.optimizer == "adamw" and config.lora is None and on_gpu:
        found.append('set training.optimizer = "adamw_8bit"')
    if of_trainer and training.gradient_checkpointing in (False, "selective"):
        found.append("set training.gradient_checkpointing = true")
    if facts.gpu_held_bytes:
        found.append("end what holds the GPU's memory")
    if on_gpu and facts.num_gpus > training.ranks and of_trainer:
        found.append(f"raise training.ranks = {training.ranks}")
    if on_gpu and of_trainer and training.ranks > training.context_parallel:
        found.append(f"raise training.context_parallel = {training.context_parallel}")
    if on_gpu and of_engine and uses_engine(config) and facts.num_gpus > config.inference.tensor_parallel_size:
        found.append(f"raise inference.tensor_parallel_size = {config.inference.tensor_parallel_size}")
    cache, at_once = config.inference.kv_cache_gib, config.inference.max_num_seqs
    if of_engine and uses_engine(config) and isinstance(cache, float) and isinstance(at_once, int) and at_once > 1:
        found.append(f"lower inference.kv_cache_gib = {cache:g}")
    return [*found, f"take a {'GPU' if on_gpu else 'machine'} with more memory"]
