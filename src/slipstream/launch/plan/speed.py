"""How long training will take, roughly, and what is worth its time. Pure."""

from __future__ import annotations

from slipstream.config.schema import RLConfig, RunConfig
from slipstream.launch.plan.facts import Facts

GPU_FLOPS = 3e14
"""A data centre's GPU in bfloat16, as training really uses it."""
COMPILING_S = 60.0
"""What compiling takes at the start of the first of several runs that are alike; the others find what it made."""
LEAST_RUNS = 2
"""So many runs that are alike are expected."""
COMPILING_SAVES = 0.2
"""Part of the time of training that compiled layers save."""


def training_seconds(config: RunConfig, facts: Facts) -> float:
    """Of a whole run, by 6 N D, on as many GPUs as it has ranks: with completions of the length that the run file
    allows, or of half the model's context where it says none."""
    training, algorithm, data = config.training, config.algorithm, facts.data
    if isinstance(algorithm, RLConfig):
        allowed = config.sampling.max_tokens
        completion = facts.model.context_length // 2 if allowed == "auto" else allowed
        tokens = training.prompts_per_batch * algorithm.group_size * (data.max_prompt_tokens + completion)
    else:
        tokens = training.prompts_per_batch * (data.max_sequence_tokens or 0)
    passes = training.steps * training.epochs_per_batch
    return 6.0 * facts.model.num_decoding * tokens * passes / (GPU_FLOPS * training.ranks)


def compiling_pays(config: RunConfig, facts: Facts) -> tuple[bool, str]:
    """Whether to compile the trainer's layers, and why."""
    if not facts.num_gpus:
        return False, "on a CPU compiling takes longer than it saves"
    if not config.training.packing:
        return False, "rows of one sequence are short: there is little to fuse"
    if config.model.dtype == "float32":
        return False, "in float32 the matrix multiplications take the time"
    seconds = training_seconds(config, facts)
    pays = LEAST_RUNS * COMPILING_SAVES * seconds > COMPILING_S
    told = f"about {seconds:,.0f} s of training, of which it saves a fifth" if seconds >= 1 else "hardly any training"
    return pays, f"{told}; compiling takes about {COMPILING_S:.0f} s, and less where a run like it was made before"
