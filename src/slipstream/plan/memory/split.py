"""Derives what depends on memory: KV cache, rows of the trainer, activation checkpointing, compilation.

The sizes are computed in `sizes.py` and `trainer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from slipstream.config import PlannedConfig, RLConfig, RunConfig, with_values
from slipstream.config.traits import rolls_out, uses_engine
from slipstream.errors import ConfigError
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.facts import Facts
from slipstream.plan.memory.cards import held_by_others
from slipstream.plan.memory.gpu_shares import (
    ASLEEP_RESERVE,
    ENGINE_RESERVE,
    TRAINER_RESERVE,
    Needs,
    Split,
    split_gpu_memory,
    usable_bytes,
)
from slipstream.plan.memory.remedies import either, ways_to_need_less
from slipstream.plan.memory.shortages import fewer_sequences, fewer_tokens, must_compute_again
from slipstream.plan.memory.sizes import (
    CPU_BLOCK_TOKENS,
    GIB,
    GPU_BLOCK_TOKENS,
    gib,
    kv_bytes_per_sequence,
    logits_bytes_per_token,
    round_up,
    weights_bytes,
)
from slipstream.plan.memory.tower import patches_at_once
from slipstream.plan.memory.trainer import ACTIVATION_MARGIN, RowMemory, row_memory, training_state
from slipstream.plan.placement import teacher_bytes
from slipstream.plan.rank_layout import hybrid_obstacle
from slipstream.plan.summary import Note

MAX_SEQUENCES = 256
MAX_MICRO_BATCH_TOKENS = 16_384
"""Rows of so many tokens saturate a GPU; longer ones take memory and save nothing."""
MAX_CPU_MICRO_BATCH_TOKENS = 8_192
"""Fastest of 1,024 to 36,000 on a CPU, measured with a model of 0.8 M parameters: longer rows miss its cache."""
MIN_KV_CACHE_GIB = 0.25
MIN_ROW_TOKENS = 4096
"""Fewer tokens at once leave a GPU idle: the engine sleeps if it takes that to have so many."""
MAX_KV_PART, MAX_ACTIVATION_PART = 1 / 4, 1 / 8
"""Fractions of the memory of a machine without GPU."""
GPU_FLOPS = 3e14
"""FLOP/s that training achieves on a data-centre GPU in bfloat16."""
COMPILING_S = 60.0
"""Compiling in the first of several equal runs; the others find its result in the cache."""
LEAST_RUNS = 2
"""Equal runs that are expected."""
TRAINING_TIME = "training time"
COMPILING_SAVES = 0.2
"""Fraction of the training time that compiled layers save."""
SMALL_LAYER, SMALL_LAYER_ROWS = 6e6, 8192
"""Parameters of a decoder layer, and tokens of a row. With fewer a CPU's launches set the time: compiling saved none
with SmolLM2-135M, and CUDA graphs half of a step or more (`trainer/model/decoder_graphs.py`)."""


def sequences_wanted(builder: PlanBuilder) -> tuple[int, str]:
    """How many sequences each engine can generate at once at most, and why."""
    replicas, orchestrators = builder["inference.replicas"], builder.original.run.orchestrators
    wanted: list[tuple[int, str]] = []
    """For each engine."""
    algorithm = builder.original.algorithm
    if isinstance(algorithm, RLConfig):
        prompts = builder["training.prompts_per_batch"]
        what = f"{prompts} prompts x {algorithm.group_size} completions"
        wanted.append(_divided(prompts * algorithm.group_size, what, replicas * orchestrators))
    elif rolls_out(builder.original):
        prompts = builder["training.prompts_per_batch"]
        wanted.append(_divided(prompts, f"{prompts} prompts of a step with rollouts", replicas))
    if builder.original.evaluation is not None:
        tasks, samples = builder["evaluation.num_tasks"], builder.original.evaluation.samples_per_task
        of_each = f", {samples} completions of each" if samples > 1 else ""
        wanted.append(_divided(tasks * samples, f"the tasks of an evaluation{of_each}", replicas))
    each, reason = max(wanted, key=lambda found: found[0])
    if each > MAX_SEQUENCES:
        each, reason = MAX_SEQUENCES, f"at most {MAX_SEQUENCES}; there are {each}: {reason}"
    shared = builder.on_cpu or (builder["run.placement"] != "separate" and builder["inference.sleep"] is not True)
    each, why = fewer_sequences(builder.facts.shortages, each, _least_row(builder), shared=shared)
    return each, why or reason


def _divided(number: int, what: str, engines: int) -> tuple[int, str]:
    """How many sequences each engine has, and of what."""
    return -(-number // engines), what + (f", divided among {engines} engines" if engines > 1 else "")


def plan_cpu_cache(builder: PlanBuilder) -> None:
    """Derive `inference.max_num_seqs` and `inference.kv_cache_gib` on a CPU."""
    if builder["inference.sleep"] is True:
        raise ConfigError("inference.sleep = true frees a GPU's memory, and there is no GPU: remove it")
    builder.derive_auto("inference.sleep", False, "there is no GPU")
    builder.derive_auto("inference.gpu_memory_utilization", 0.45, "has no effect on a CPU")
    memory, length = builder.facts.memory_bytes, builder["inference.max_model_len"]
    size = builder["inference.tensor_parallel_size"]
    replicas = builder["inference.replicas"] * builder.original.run.orchestrators
    each = kv_bytes_per_sequence(builder.facts.model, builder["model.dtype"], length, tensor_parallel_size=size)
    # vLLM keeps one block to itself.
    spare = each * CPU_BLOCK_TOKENS // round_up(length, CPU_BLOCK_TOKENS)
    given = builder["inference.kv_cache_gib"]
    budget = memory * MAX_KV_PART / (replicas * size) if given == "auto" else given * GIB
    part = "a quarter of the memory" + (f" for {replicas * size} processes" if replicas * size > 1 else "")
    source = f"{part} ({gib(budget)})" if given == "auto" else f"kv_cache_gib = {given:g}"
    fitting = int((budget - spare) // each)
    if fitting < 1:
        builder.refusals.append(
            f"one sequence of inference.max_model_len = {length} tokens takes "
            f"{gib(each + spare)} of KV cache, more than {source}: lower sampling.max_tokens"
            + (" or set inference.kv_cache_gib" if given == "auto" else " or raise inference.kv_cache_gib")
        )
        fitting, budget = 1, each + spare
    wanted, reason = sequences_wanted(builder)
    if wanted > fitting:
        reason = f"as many sequences of {length} tokens as {source} holds"
    builder.derive_auto("inference.max_num_seqs", min(wanted, fitting), reason)
    num_sequences = builder["inference.max_num_seqs"]
    if given != "auto":
        return
    need = num_sequences * each + spare
    if need > budget:
        builder.refusals.append(
            f"{num_sequences} sequences of {length} tokens take {gib(need)} of KV cache, "
            f"more than {source}: use inference.max_num_seqs = {fitting}, or set inference.kv_cache_gib"
        )
    builder.derive(
        "inference.kv_cache_gib",
        max(MIN_KV_CACHE_GIB, math.ceil(need / GIB * 16) / 16),
        f"{num_sequences} sequences of {length} tokens at {each / length / 1024:.3g} KiB a token, "
        f"at least {MIN_KV_CACHE_GIB:g}",
    )


def plan_gpu_memory(builder: PlanBuilder) -> None:
    """Derive `inference.max_num_seqs`, `kv_cache_gib`, `gpu_memory_utilization` and `sleep` on a GPU."""
    gpu_bytes, length = builder.facts.gpu_memory_bytes, builder["inference.max_model_len"]
    weights, each = _engine_weights_per_gpu(builder), _cache_per_sequence(builder)
    wanted, reason = sequences_wanted(builder)
    split = memory_split(builder, builder["weights.bridge"])
    share = builder["inference.gpu_memory_utilization"]
    budget = split.cache if share == "auto" else min(split.cache, int(share * gpu_bytes) - weights - ENGINE_RESERVE)
    given = builder["inference.kv_cache_gib"]
    budget = budget if given == "auto" else int(given * GIB)
    fitting = budget // each
    if fitting < 1:
        teacher = teacher_bytes(builder, trainer=False)
        beside = f" beside the teacher's {gib(teacher)}" if teacher else ""
        left = f"the GPU's {gib(gpu_bytes)}{held_by_others(builder.facts)}{beside}"
        remedies = ways_to_need_less(builder.config(), builder.facts) if given == "auto" else []
        raised = [] if given == "auto" else ["raise inference.kv_cache_gib"]
        builder.refusals.append(
            f"one sequence of {length} tokens takes {gib(each)} of KV cache, and {left} leave {gib(max(0, budget))}: "
            + either([*raised, *remedies, "lower sampling.max_tokens"])
        )
        fitting, budget = 1, max(each, budget)
    if wanted > fitting:
        reason = f"as many sequences of {length} tokens as {gib(budget)} hold"
    builder.derive_auto("inference.max_num_seqs", min(wanted, fitting), reason)
    need = builder["inference.max_num_seqs"] * each
    if need > budget and given == "auto":
        builder.refusals.append(
            f"{builder['inference.max_num_seqs']} sequences of {length} tokens take {gib(need)} of KV cache, and there "
            f"is memory for {gib(budget)}: use inference.max_num_seqs = {fitting}"
        )
    builder.derive_auto(
        "inference.kv_cache_gib",
        math.ceil(need / GIB * 16) / 16,
        f"{builder['inference.max_num_seqs']} sequences of {length} tokens; up to {gib(budget)} would fit",
    )
    total = weights + ENGINE_RESERVE + int(builder["inference.kv_cache_gib"] * GIB)
    builder.derive_auto(
        "inference.gpu_memory_utilization",
        min(1.0, math.ceil(100 * total / max(1, gpu_bytes)) / 100),
        f"weights {gib(weights)}, KV cache, and {gib(ENGINE_RESERVE)} for graphs and activations, of {gib(gpu_bytes)}",
    )
    reason = "trainer and engine fit side by side"
    if split.sleeps:
        reason = "trainer and engine do not fit side by side: the engine frees its memory while the trainer works"
    elif builder["run.placement"] == "separate":
        reason = "the engine has a GPU of its own"
    elif not split.fits and builder["weights.bridge"] == "single_copy":
        reason = "the engine's weights are the trainer's, which needs them while it works"
    elif not split.fits:
        reason = "with staleness the engine works while the trainer does"
    builder.derive_auto("inference.sleep", split.sleeps, reason)


def _engine_weights_per_gpu(builder: PlanBuilder) -> int:
    """Bytes of the engine's weights on each of its GPUs."""
    return -(-weights_bytes(builder.facts.model, builder["model.dtype"]) // builder["inference.tensor_parallel_size"])


def _cache_per_sequence(builder: PlanBuilder) -> int:
    """Bytes of a sequence's KV cache on each GPU, with a block for vLLM's own use."""
    length, size = builder["inference.max_model_len"] + GPU_BLOCK_TOKENS, builder["inference.tensor_parallel_size"]
    return kv_bytes_per_sequence(builder.facts.model, builder["model.dtype"], length, GPU_BLOCK_TOKENS, size)


def memory_needs(builder: PlanBuilder, bridge: str) -> Needs:
    """What trainer and engine need of the GPU that they share, or of one each, under `bridge`."""
    training, facts, dtype = builder.original.training, builder.facts, builder["model.dtype"]
    checkpointing = training.gradient_checkpointing
    if checkpointing == "auto":
        checkpointing = training.offload_activations
    config, row = with_values(builder.config(), {"weights.bridge": bridge}), builder["training.micro_batch_tokens"]
    if training.reshard == "auto":  # the one that needs least memory
        config = with_values(config, {"training.reshard": "layer"})
    rows = row_memory(config, facts, checkpointing=checkpointing)
    tokens = max(_longest(builder), MIN_ROW_TOKENS if row == "auto" else row)
    num_sequences = builder["inference.max_num_seqs"]
    sequences = sequences_wanted(builder)[0] if num_sequences == "auto" else num_sequences
    return Needs(
        state=rows.state,
        activations=int(rows.needed(tokens)),
        probe=builder["inference.max_model_len"] * logits_bytes_per_token(facts.model, dtype),
        weights=_engine_weights_per_gpu(builder),
        cache=_cache_per_sequence(builder) * sequences,
        teacher=teacher_bytes(builder, trainer=False),
    )


def memory_split(builder: PlanBuilder, bridge: str) -> Split:
    """How trainer and engine divide that memory."""
    sleep, separate = builder["inference.sleep"], builder["run.placement"] == "separate"
    if sleep is True and separate:
        raise ConfigError("inference.sleep = true has no use: the engine has a GPU of its own; remove it")
    return split_gpu_memory(
        usable_bytes(builder.facts),
        memory_needs(builder, bridge),
        shared=not separate,
        may_sleep=sleep == "auto" and not builder.original.training.staleness and bridge != "single_copy",
        must_sleep=sleep is True,
    )


def _longest(builder: PlanBuilder) -> int:
    """Tokens of the longest sequence that is trained on."""
    if isinstance(builder.original.algorithm, RLConfig):
        return builder["inference.max_model_len"]
    longest = builder.facts.data.max_sequence_tokens or 0
    if rolls_out(builder.original):  # a rollout, and all that it missed
        return min(builder.facts.model.context_length, builder["inference.max_model_len"] + longest)
    return longest


def _least_row(builder: PlanBuilder) -> int:
    """Tokens of the shortest rows that can be planned."""
    row = builder.original.training.micro_batch_tokens
    return _longest(builder) if row == "auto" else max(_longest(builder), row)


def plan_micro_batch(builder: PlanBuilder) -> None:
    """Derive `training.reshard`, `training.gradient_checkpointing` and `training.micro_batch_tokens`."""
    model, data = builder.facts.model, builder.facts.data
    longest = data.max_sequence_tokens or 0
    if longest > model.context_length:
        raise ConfigError(
            f"the longest training conversation has {longest} tokens, more than the model's context of "
            f"{model.context_length}: shorten it or use a model with a longer context"
        )
    longest = _longest(builder)
    _plan_sharding(builder, longest)
    _plan_reshard(builder, longest)
    if builder.on_cpu:
        ranks = builder.original.training.ranks
        budget, source = builder.facts.memory_bytes * MAX_ACTIVATION_PART / ranks, "an eighth of the memory"
        source += f" for each of {ranks} ranks" if ranks > 1 else ""
    else:
        budget = _activation_budget(builder, builder.config())
        source = f"{ACTIVATION_MARGIN:g} of what the GPU has left for activations"
    rows = _plan_checkpointing(builder, longest, budget, source)
    builder.warnings += _tower_warnings(builder.facts, rows, budget, source)
    most = MAX_CPU_MICRO_BATCH_TOKENS if builder.on_cpu else MAX_MICRO_BATCH_TOKENS
    if not builder.on_cpu and _has_small_layers(builder.original, builder.facts):
        most = SMALL_LAYER_ROWS
    if (together := builder.original.training.context_parallel) > 1:
        most *= together
        source += f", on each of the {together} ranks of a row"
    fitting = rows.fitting(budget, max(most, longest))
    if fitting >= longest:
        value = max(longest, fitting // 256 * 256, 1)
        reason = f"{rows.each / 1024:.3g} KiB a token in {source}, at most {most}"
    else:
        value, reason = longest, f"the longest sequence, although {source} holds only {fitting} tokens"
        if builder["training.micro_batch_tokens"] == "auto":
            builder.warnings.append(f"training.micro_batch_tokens = {value}: {reason}")
    value, why = fewer_tokens(builder.facts.shortages, value, longest)
    builder.derive_auto("training.micro_batch_tokens", value, why or reason)


def _tower_warnings(facts: Facts, rows: RowMemory, budget: float, source: str) -> Iterator[str]:
    """A vision tower that takes more memory while it computes than there is for a row."""
    if facts.tower is not None and rows.tower > rows.margin * budget:
        remedy = ", or model.train_tower = false" if facts.tower.is_trained else ""
        yield (
            f"the vision tower takes {gib(rows.tower)} for {patches_at_once(facts.tower):,} patches of images at once, "
            f"more than {source} ({gib(rows.margin * budget)}): lower model.max_pixels{remedy}"
        )


def _plan_sharding(builder: PlanBuilder, longest: int) -> None:
    """Derive `training.sharding`. Raises ConfigError if nodes cannot have a copy each."""
    training = builder.original.training
    if builder.original.cluster.nodes == 1:
        return
    if obstacle := hybrid_obstacle(builder.config()):
        if training.sharding == "hybrid":
            raise ConfigError(f'training.sharding = "hybrid" is not possible ({obstacle}): use "full"')
        builder.derive_auto("training.sharding", "full", obstacle)
        return
    if builder.on_cpu:
        builder.derive_auto("training.sharding", "full", "not by default on CPUs")
        return
    config = with_values(builder.config(), {"training.sharding": "hybrid"})
    if training.reshard == "auto":  # the one that needs least memory
        config = with_values(config, {"training.reshard": "layer"})
    rows, budget, tokens, needed = _row_and_budget(builder, config, longest)
    reason = f"with a copy on each node {gib(max(0.0, rows.margin * budget))} are left for activations, and {needed}"
    builder.derive_auto("training.sharding", "hybrid" if rows.needed(tokens) <= budget else "full", reason)


def _row_and_budget(builder: PlanBuilder, config: RunConfig, longest: int) -> tuple[RowMemory, float, int, str]:
    """Memory of rows, bytes left for them, tokens of the longest one and its bytes as a sentence, under a `config` with
    decided sharding."""
    training, row = builder.original.training, builder["training.micro_batch_tokens"]
    given = training.gradient_checkpointing
    checkpointing = training.offload_activations if given == "auto" else given
    rows, budget = row_memory(config, builder.facts, checkpointing=checkpointing), _activation_budget(builder, config)
    tokens = max(longest, MIN_ROW_TOKENS if row == "auto" else row)
    return rows, budget, tokens, f"a row of {tokens} tokens takes {gib(rows.num_bytes(tokens))}"


def _plan_reshard(builder: PlanBuilder, longest: int) -> None:
    """Derive `training.reshard`."""
    if builder.original.training.ranks == 1:
        return
    if builder.on_cpu:
        builder.derive_auto("training.reshard", "layer", "the ranks share one memory")
        return
    config = with_values(builder.config(), {"training.reshard": "step"})
    rows, budget, tokens, needed = _row_and_budget(builder, config, longest)
    reason = f"with whole weights and gradients {gib(max(0.0, rows.margin * budget))} are left for activations, and "
    builder.derive_auto("training.reshard", "step" if rows.needed(tokens) <= budget else "layer", reason + needed)


def _activation_budget(builder: PlanBuilder, config: RunConfig) -> float:
    """Bytes left for activations on the trainer's GPU, under a config with a decided `training.reshard`."""
    usable = usable_bytes(builder.facts)
    if uses_engine(builder.original):
        usable -= teacher_bytes(builder, trainer=True)
    state = training_state(config, builder["model.dtype"], builder.facts) + TRAINER_RESERVE
    if not uses_engine(builder.original) or builder["run.placement"] == "separate":
        return usable - state
    if builder["inference.sleep"]:
        return usable - state - ASLEEP_RESERVE
    cache = builder["inference.kv_cache_gib"] * GIB
    return usable - state - _engine_weights_per_gpu(builder) - ENGINE_RESERVE - cache


def _plan_checkpointing(builder: PlanBuilder, longest: int, budget: float, source: str) -> RowMemory:
    """Derive `training.gradient_checkpointing`; the memory of rows with it."""
    training, row = builder.original.training, builder["training.micro_batch_tokens"]
    tokens = longest if row == "auto" else max(longest, row)
    config = builder.config()

    def rows(checkpointing: Any) -> RowMemory:
        return row_memory(config, builder.facts, checkpointing=checkpointing)

    whole, selective = rows(False), rows("selective")
    room = whole.margin * budget
    fits = whole.each * tokens <= room
    reason = f"{tokens} tokens at {whole.each / 1024:.3g} KiB {'fit' if fits else 'do not fit'} into {source} "
    reason += f"({gib(room)})"
    choice: Any = not fits
    if training.offload_activations:
        choice, reason = True, "training.offload_activations moves the inputs of layers that are computed again"
    elif not fits and not builder["training.compile"] and selective.each * tokens <= room:
        choice = "selective"
        reason += f", at {selective.each / 1024:.3g} they do"
    if choice is not True and (why := must_compute_again(builder.facts.shortages, _least_row(builder))):
        choice, reason = True, why
    builder.derive_auto("training.gradient_checkpointing", choice, reason)
    return rows(builder["training.gradient_checkpointing"])


def plan_compile(builder: PlanBuilder) -> None:
    """Derive `training.compile`. Raises ConfigError for offloading without a GPU."""
    if builder.original.training.offload_activations and builder.on_cpu:
        raise ConfigError(
            "training.offload_activations = true moves activations from a GPU to the CPU's memory, and there is no GPU:"
            " remove it"
        )
    config = with_values(builder.original, {"training.packing": builder["training.packing"]})
    pays, reason = _compiling_pays(config, builder.facts, builder["training.steps"])
    builder.derive_auto("training.compile", pays, reason)


def _training_seconds(config: RunConfig, facts: Facts, num_steps: int) -> float:
    """Estimated training time by 6 N D FLOPs, with completions of `sampling.max_tokens`, or half the context if that is
    `auto`; one GPU per rank."""
    training, algorithm, data = config.training, config.algorithm, facts.data
    if isinstance(algorithm, RLConfig):
        allowed = config.sampling.max_tokens
        completion = facts.model.context_length // 2 if allowed == "auto" else allowed
        tokens = training.prompts_per_batch * algorithm.group_size * (data.max_prompt_tokens + completion)
    else:
        tokens = training.prompts_per_batch * data.row_sequences * (data.max_sequence_tokens or 0)
    passes = num_steps * training.epochs_per_batch
    return 6.0 * facts.model.num_decoding * tokens * passes / (GPU_FLOPS * training.ranks)


def time_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """How long training takes, without generation; nothing on a CPU, whose speed is unknown."""
    if facts.num_gpus:
        minutes = _training_seconds(config, facts, config.training.steps) / 60
        how = f"{GPU_FLOPS:.0e} FLOP/s on each of {config.training.ranks} GPUs, as a data-centre GPU has; generation "
        how += "comes on top"
        yield Note(TRAINING_TIME, float(f"{minutes:.2g}"), "min", how)


def _has_small_layers(config: RunConfig, facts: Facts) -> bool:
    return config.lora is None and config.training.ranks == 1 and facts.model.layer_parameters < SMALL_LAYER


def _compiling_pays(config: RunConfig, facts: Facts, num_steps: int) -> tuple[bool, str]:
    """Whether compiling the trainer's layers saves time, and why."""
    if not facts.num_gpus:
        return False, "on a CPU compiling takes longer than it saves"
    if not config.training.packing:
        return False, "rows of one sequence are short: there is little to fuse"
    if config.model.dtype == "float32":
        return False, "in float32 the matrix multiplications take the time"
    if _has_small_layers(config, facts):
        return False, "layers as small as these train faster as CUDA graphs"
    seconds = _training_seconds(config, facts, num_steps)
    pays = LEAST_RUNS * COMPILING_SAVES * seconds > COMPILING_S
    gain = f"about {seconds:,.0f} s of training, of which it saves a fifth" if seconds >= 1 else "hardly any training"
    return pays, f"{gain}; compiling takes about {COMPILING_S:.0f} s, and less where a run like it was made before"
