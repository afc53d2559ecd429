"""The part of the plan that divides memory: KV cache, rows of the trainer, and what their layers keep.

The formulas are those of `memory.py`; here is what is chosen by them, and why.
"""

from __future__ import annotations

import math
from typing import Any

from slipstream.config import RLConfig, RunConfig, with_values
from slipstream.config.traits import uses_engine
from slipstream.errors import ConfigError
from slipstream.launch.plan.builder import Draft
from slipstream.launch.plan.facts import Facts
from slipstream.launch.plan.memory.gpu_shares import (
    ASLEEP_RESERVE,
    ENGINE_RESERVE,
    TRAINER_RESERVE,
    USABLE,
    Needs,
    Split,
    split_card,
)
from slipstream.launch.plan.memory.sizes import (
    CPU_BLOCK_TOKENS,
    GIB,
    GPU_BLOCK_TOKENS,
    gib,
    kv_bytes_per_sequence,
    logits_bytes_per_token,
    round_up,
    weights_bytes,
)
from slipstream.launch.plan.memory.trainer import ACTIVATION_MARGIN, Rows, rows_of, training_state
from slipstream.launch.plan.placement import teacher_beside
from slipstream.launch.recovery.shortages import fewer_sequences, fewer_tokens, must_compute_again

MAX_SEQUENCES = 256
MAX_MICRO_BATCH_TOKENS = 16_384
"""A GPU has enough to do with fewer; longer rows take memory and save nothing."""
MAX_CPU_MICRO_BATCH_TOKENS = 8_192
"""Larger rows fall out of a CPU's cache: measured fastest of 1,024 to 36,000 for a 0.8 M parameter model."""
MIN_KV_CACHE_GIB = 0.25
MIN_ROW_TOKENS = 4096
"""A GPU wants at least so many tokens at once; the engine rather sleeps than that it gets fewer."""
MAX_KV_PART, MAX_ACTIVATION_PART = 1 / 4, 1 / 8
"""Parts of a CPU machine's memory."""
GPU_FLOPS = 3e14
"""A data centre's GPU in bfloat16, as training really uses it."""
COMPILING_S = 60.0
"""What compiling takes at the start of the first of several runs that are alike; the others find what it made."""
LEAST_RUNS = 2
"""So many runs that are alike are expected."""
COMPILING_SAVES = 0.2
"""Part of the time of training that compiled layers save."""


def _sequences(draft: Draft) -> tuple[int, str]:
    """How many sequences are worth generating at once in each engine, and why."""
    wanted = {}
    algorithm = draft.original.algorithm
    if isinstance(algorithm, RLConfig):
        prompts = draft["training.prompts_per_batch"]
        wanted[prompts * algorithm.group_size] = f"{prompts} prompts x {algorithm.group_size} completions"
    if draft.original.evaluation is not None:
        wanted[draft["evaluation.num_tasks"]] = "the tasks of an evaluation"
    most, replicas = max(wanted), draft["inference.replicas"]
    each, reason = -(-most // replicas), wanted[most] + (f", shared out to {replicas} engines" if replicas > 1 else "")
    if each > MAX_SEQUENCES:
        each, reason = MAX_SEQUENCES, f"at most {MAX_SEQUENCES}; there are {each}: {reason}"
    shared = draft.on_cpu or (draft["run.placement"] != "separate" and draft["inference.sleep"] is not True)
    each, why = fewer_sequences(draft.facts.shortages, each, _least_row(draft), shared=shared)
    return each, why or reason


def plan_cpu_cache(draft: Draft) -> None:
    """`inference.max_num_seqs` and `inference.kv_cache_gib` on a CPU."""
    if draft["inference.sleep"] is True:
        raise ConfigError("inference.sleep = true frees a GPU's memory, and there is no GPU: remove it")
    draft.derive_auto("inference.sleep", False, "there is no GPU")
    draft.derive_auto("inference.gpu_memory_utilization", 0.45, "has no effect on a CPU")
    memory, length = draft.facts.memory_bytes, draft["inference.max_model_len"]
    size, replicas = draft["inference.tensor_parallel_size"], draft["inference.replicas"]
    each = kv_bytes_per_sequence(draft.facts.model, draft["model.dtype"], length, tensor_parallel_size=size)
    # vLLM keeps one block to itself.
    spare = each * CPU_BLOCK_TOKENS // round_up(length, CPU_BLOCK_TOKENS)
    given = draft["inference.kv_cache_gib"]
    room = memory * MAX_KV_PART / (replicas * size) if given == "auto" else given * GIB
    part = "a quarter of the memory" + (f" for {replicas * size} processes" if replicas * size > 1 else "")
    source = f"{part} ({gib(room)})" if given == "auto" else f"kv_cache_gib = {given:g}"
    fitting = int((room - spare) // each)
    if fitting < 1:
        raise ConfigError(
            f"one sequence of inference.max_model_len = {length} tokens takes "
            f"{gib(each + spare)} of KV cache, more than {source}: lower sampling.max_tokens"
            + (" or set inference.kv_cache_gib" if given == "auto" else " or raise inference.kv_cache_gib")
        )
    wanted, reason = _sequences(draft)
    if wanted > fitting:
        reason = f"as many sequences of {length} tokens as {source} holds"
    draft.derive_auto("inference.max_num_seqs", min(wanted, fitting), reason)
    num_sequences = draft["inference.max_num_seqs"]
    if given != "auto":
        return
    need = num_sequences * each + spare
    if need > room:
        raise ConfigError(
            f"{num_sequences} sequences of {length} tokens take {gib(need)} of KV cache, "
            f"more than {source}: use inference.max_num_seqs = {fitting}, or set inference.kv_cache_gib"
        )
    draft.derive(
        "inference.kv_cache_gib",
        max(MIN_KV_CACHE_GIB, math.ceil(need / GIB * 16) / 16),
        f"{num_sequences} sequences of {length} tokens at {each / length / 1024:.3g} KiB a token, "
        f"at least {MIN_KV_CACHE_GIB:g}",
    )


def plan_card(draft: Draft) -> None:
    """The same on a GPU, and whether the engine sleeps while the trainer works."""
    card, length = draft.facts.gpu_memory_bytes, draft["inference.max_model_len"]
    weights, each = _card_weights(draft), _gpu_cache_each(draft)
    wanted, reason = _sequences(draft)
    split = split_of(draft, draft["weights.bridge"])
    share = draft["inference.gpu_memory_utilization"]
    room = split.cache if share == "auto" else min(split.cache, int(share * card) - weights - ENGINE_RESERVE)
    given = draft["inference.kv_cache_gib"]
    room = room if given == "auto" else int(given * GIB)
    fitting = room // each
    if fitting < 1:
        teacher = teacher_beside(draft, trainer=False)
        beside = f" beside the teacher's {gib(teacher)}" if teacher else ""
        raise ConfigError(
            f"one sequence of {length} tokens takes {gib(each)} of KV cache, and the GPU's {gib(card)}{beside} leave "
            f"{gib(max(0, room))} for it: use [lora], a smaller model, a lower sampling.max_tokens or another GPU"
        )
    if wanted > fitting:
        reason = f"as many sequences of {length} tokens as {gib(room)} hold"
    draft.derive_auto("inference.max_num_seqs", min(wanted, fitting), reason)
    need = draft["inference.max_num_seqs"] * each
    if need > room and given == "auto":
        raise ConfigError(
            f"{draft['inference.max_num_seqs']} sequences of {length} tokens take {gib(need)} of KV cache, and there "
            f"is room for {gib(room)}: use inference.max_num_seqs = {fitting}"
        )
    draft.derive_auto(
        "inference.kv_cache_gib",
        math.ceil(need / GIB * 16) / 16,
        f"{draft['inference.max_num_seqs']} sequences of {length} tokens; there would be room for {gib(room)}",
    )
    total = weights + ENGINE_RESERVE + int(draft["inference.kv_cache_gib"] * GIB)
    draft.derive_auto(
        "inference.gpu_memory_utilization",
        min(1.0, math.ceil(100 * total / card) / 100),
        f"weights {gib(weights)}, KV cache, and {gib(ENGINE_RESERVE)} for graphs and activations, of {gib(card)}",
    )
    reason = "trainer and engine fit side by side"
    if split.sleeps:
        reason = "side by side there is not enough room: the engine gives up its memory while the trainer works"
    elif draft["run.placement"] == "separate":
        reason = "the engine has a GPU of its own"
    elif not split.fits and draft["weights.bridge"] == "single_copy":
        reason = "the engine's weights are the trainer's, which needs them while it works"
    elif not split.fits:
        reason = "with staleness the engine works while the trainer does"
    draft.derive_auto("inference.sleep", split.sleeps, reason)


def _card_weights(draft: Draft) -> int:
    """The engine's weights on one of its cards."""
    return -(-weights_bytes(draft.facts.model, draft["model.dtype"]) // draft["inference.tensor_parallel_size"])


def _gpu_cache_each(draft: Draft) -> int:
    """KV cache of one sequence on one card, and a block for what vLLM keeps to itself."""
    length, size = draft["inference.max_model_len"] + GPU_BLOCK_TOKENS, draft["inference.tensor_parallel_size"]
    return kv_bytes_per_sequence(draft.facts.model, draft["model.dtype"], length, GPU_BLOCK_TOKENS, size)


def needs_of(draft: Draft, bridge: str) -> Needs:
    """What trainer and engine would like to have of the card, or the two cards, over `bridge`."""
    training, facts, dtype = draft.original.training, draft.facts, draft["model.dtype"]
    checkpointing = training.gradient_checkpointing
    if checkpointing == "auto":
        checkpointing = training.offload_activations
    config, row = with_values(draft.config(), {"weights.bridge": bridge}), draft["training.micro_batch_tokens"]
    if training.reshard == "auto":  # what takes least: more is kept where there is room left
        config = with_values(config, {"training.reshard": "layer"})
    rows = rows_of(config, facts, checkpointing=checkpointing)
    tokens = max(_longest(draft), MIN_ROW_TOKENS if row == "auto" else row)
    num_sequences = draft["inference.max_num_seqs"]
    return Needs(
        state=rows.state,
        activations=int(rows.needed(tokens)),
        probe=draft["inference.max_model_len"] * logits_bytes_per_token(facts.model, dtype),
        weights=_card_weights(draft),
        cache=_gpu_cache_each(draft) * (_sequences(draft)[0] if num_sequences == "auto" else num_sequences),
        teacher=teacher_beside(draft, trainer=False),
    )


def split_of(draft: Draft, bridge: str) -> Split:
    """How they divide it."""
    sleep, separate = draft["inference.sleep"], draft["run.placement"] == "separate"
    if sleep is True and separate:
        raise ConfigError("inference.sleep = true has no use: the engine has a GPU of its own; remove it")
    return split_card(
        draft.facts.gpu_memory_bytes,
        needs_of(draft, bridge),
        shared=not separate,
        may_sleep=sleep == "auto" and not draft.original.training.staleness and bridge != "single_copy",
        must_sleep=sleep is True,
    )


def _longest(draft: Draft) -> int:
    """Tokens of the longest sequence that is trained on."""
    if isinstance(draft.original.algorithm, RLConfig):
        return draft["inference.max_model_len"]
    return draft.facts.data.max_sequence_tokens or 0


def _least_row(draft: Draft) -> int:
    """Tokens of the shortest rows that may be planned."""
    row = draft.original.training.micro_batch_tokens
    return _longest(draft) if row == "auto" else max(_longest(draft), row)


def plan_micro_batch(draft: Draft) -> None:
    """`training.micro_batch_tokens`, and with it `training.gradient_checkpointing`."""
    model, data = draft.facts.model, draft.facts.data
    longest = data.max_sequence_tokens or 0
    if longest > model.context_length:
        raise ConfigError(
            f"the longest training conversation has {longest} tokens, more than the model's context of "
            f"{model.context_length}: shorten it or use a model with a longer context"
        )
    longest = _longest(draft)
    _plan_reshard(draft, longest)
    if draft.on_cpu:
        ranks = draft.original.training.ranks
        room, source = draft.facts.memory_bytes * MAX_ACTIVATION_PART / ranks, "an eighth of the memory"
        source += f" for each of {ranks} ranks" if ranks > 1 else ""
    else:
        room = _activation_room(draft, draft.config())
        source = f"{ACTIVATION_MARGIN:g} of what the GPU has left for activations"
    rows = _plan_checkpointing(draft, longest, room, source)
    most = MAX_CPU_MICRO_BATCH_TOKENS if draft.on_cpu else MAX_MICRO_BATCH_TOKENS
    fitting = rows.fitting(room, most)
    if fitting >= longest:
        value = max(longest, fitting // 256 * 256, 1)
        reason = f"{rows.each / 1024:.3g} KiB a token in {source}, at most {most}"
    else:
        value, reason = longest, f"the longest sequence, although {source} holds only {fitting} tokens"
        if draft["training.micro_batch_tokens"] == "auto":
            draft.warnings.append(f"training.micro_batch_tokens = {value}: {reason}")
    value, why = fewer_tokens(draft.facts.shortages, value, longest)
    draft.derive_auto("training.micro_batch_tokens", value, why or reason)


def _plan_reshard(draft: Draft, longest: int) -> None:
    """`training.reshard`."""
    training, row = draft.original.training, draft["training.micro_batch_tokens"]
    if training.ranks == 1:
        return
    if draft.on_cpu:
        draft.derive_auto("training.reshard", "layer", "the ranks share one memory")
        return
    config, given = with_values(draft.config(), {"training.reshard": "step"}), training.gradient_checkpointing
    checkpointing = training.offload_activations if given == "auto" else given
    rows, room = rows_of(config, draft.facts, checkpointing=checkpointing), _activation_room(draft, config)
    tokens = max(longest, MIN_ROW_TOKENS if row == "auto" else row)
    fits = rows.needed(tokens) <= room
    reason = f"with whole weights and gradients {gib(max(0.0, rows.margin * room))} are left for activations, and a "
    reason += f"row of {tokens} tokens takes {gib(rows.num_bytes(tokens))}"
    draft.derive_auto("training.reshard", "step" if fits else "layer", reason)


def _activation_room(draft: Draft, config: RunConfig) -> float:
    """Bytes for activations on the trainer's GPU, under a config that says how the model is spread."""
    usable = draft.facts.gpu_memory_bytes * USABLE
    if uses_engine(draft.original):
        usable -= teacher_beside(draft, trainer=True)
    state = training_state(config, draft["model.dtype"], draft.facts) + TRAINER_RESERVE
    if not uses_engine(draft.original) or draft["run.placement"] == "separate":
        return usable - state
    if draft["inference.sleep"]:
        return usable - state - ASLEEP_RESERVE
    cache = draft["inference.kv_cache_gib"] * GIB
    return usable - state - _card_weights(draft) - ENGINE_RESERVE - cache


def _plan_checkpointing(draft: Draft, longest: int, room: float, source: str) -> Rows:
    """`training.gradient_checkpointing`, and what rows take with it."""
    training, row = draft.original.training, draft["training.micro_batch_tokens"]
    tokens = longest if row == "auto" else max(longest, row)
    config = draft.config()

    def rows(checkpointing: Any) -> Rows:
        return rows_of(config, draft.facts, checkpointing=checkpointing)

    whole, selective = rows(False), rows("selective")
    fits = whole.needed(tokens) <= room
    reason = f"{tokens} tokens at {whole.each / 1024:.3g} KiB {'fit' if fits else 'do not fit'} into {source} "
    reason += f"({gib(whole.margin * room)})"
    choice: Any = not fits
    if training.offload_activations:
        choice, reason = True, "training.offload_activations moves the inputs of layers that are computed again"
    elif not fits and not draft["training.compile"] and selective.needed(tokens) <= room:
        choice = "selective"
        reason += f", at {selective.each / 1024:.3g} they do"
    if choice is not True and (why := must_compute_again(draft.facts.shortages, _least_row(draft))):
        choice, reason = True, why
    draft.derive_auto("training.gradient_checkpointing", choice, reason)
    return rows(draft["training.gradient_checkpointing"])


def plan_compile(draft: Draft) -> None:
    """`training.compile`, and what needs a GPU."""
    if draft.original.training.offload_activations and draft.on_cpu:
        raise ConfigError(
            "training.offload_activations = true moves activations from a GPU to the CPU's memory, and there is no GPU:"
            " remove it"
        )
    pays, reason = _compiling_pays(draft.original, draft.facts)
    draft.derive_auto("training.compile", pays, reason)


def _training_seconds(config: RunConfig, facts: Facts) -> float:
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


def _compiling_pays(config: RunConfig, facts: Facts) -> tuple[bool, str]:
    """Whether to compile the trainer's layers, and why."""
    if not facts.num_gpus:
        return False, "on a CPU compiling takes longer than it saves"
    if not config.training.packing:
        return False, "rows of one sequence are short: there is little to fuse"
    if config.model.dtype == "float32":
        return False, "in float32 the matrix multiplications take the time"
    seconds = _training_seconds(config, facts)
    pays = LEAST_RUNS * COMPILING_SAVES * seconds > COMPILING_S
    told = f"about {seconds:,.0f} s of training, of which it saves a fifth" if seconds >= 1 else "hardly any training"
    return pays, f"{told}; compiling takes about {COMPILING_S:.0f} s, and less where a run like it was made before"
