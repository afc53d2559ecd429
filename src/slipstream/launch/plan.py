"""Turns a config and measured facts into a plan: every `auto` replaced by a value, each with its reason.

Guarantees: pure, so `slipstream plan` shows what `slipstream train` does. In `Plan.config` no `auto` is left
in a key that has an effect (under sft without evaluation there is no engine, and its keys stay as they
are). What cannot work on this machine, model or data is a ConfigError here, before any process starts.
`run.folder` is left to the launcher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from slipstream.config import Derived, RLConfig, RunConfig, with_values
from slipstream.config.checks import (
    divisor_problem,
    inapplicable,
    shares_weights,
    starts_teacher,
    uses_critic,
    uses_engine,
)
from slipstream.config.recipes import choices, resolved
from slipstream.errors import ConfigError
from slipstream.launch.cards import (
    ASLEEP_RESERVE,
    ENGINE_RESERVE,
    TRAINER_RESERVE,
    USABLE,
    Needs,
    Split,
    num_cards,
    place,
    replicas_beside,
    split_card,
)
from slipstream.launch.measured import Facts
from slipstream.launch.memory import (
    CPU_BLOCK_TOKENS,
    GIB,
    GPU_BLOCK_TOKENS,
    gib,
    kv_bytes_per_sequence,
    logits_bytes_per_token,
    round_up,
    weights_bytes,
)
from slipstream.launch.speed import compiling_pays
from slipstream.launch.teacher_room import TeacherRoom, planned_teacher, teacher_room
from slipstream.launch.totals import (
    Note,
    activation_bytes_of,
    batch_notes,
    check_divided,
    check_memory,
    delta_warnings,
    memory_notes,
    parameter_notes,
    rl_warnings,
    trainer_bytes,
    training_state,
)

SMALL_MODEL_PARAMETERS = 20_000_000
MAX_SEQUENCES = 256
MAX_MICRO_BATCH_TOKENS = 16_384
"""A GPU has enough to do with fewer; longer rows take memory and save nothing."""
MAX_CPU_MICRO_BATCH_TOKENS = 8_192
"""Larger rows fall out of a CPU's cache: measured fastest of 1,024 to 36,000 for a 0.8 M parameter model."""
MIN_KV_CACHE_GIB = 0.25
MIN_ROW_TOKENS = 4096
"""A GPU wants at least so many tokens at once; the engine rather sleeps than that it gets fewer."""
ACTIVATION_MARGIN = 0.6
"""Part of a GPU's room for activations that is planned with: the estimate knows no workspaces and no fragments."""
MAX_KV_PART, MAX_ACTIVATION_PART = 1 / 4, 1 / 8
"""Parts of a CPU machine's memory."""


@dataclass(frozen=True)
class Plan:
    """What will be run."""

    config: RunConfig
    derived: tuple[Derived, ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]
    trainer_bytes: int
    """What the trainer will hold at most, without contexts and workspaces; a run tells its peak beside it."""
    teacher: TeacherRoom | None = None
    """How its engine is started, where there is a teacher of ours."""


def make_plan(config: RunConfig, facts: Facts) -> Plan:
    """Derive every `auto` of `config` from `facts`; raises ConfigError for what cannot work."""
    draft = _Draft(config, facts)
    _plan_dtype(draft)
    _plan_batch(draft)
    _plan_placement(draft)
    _plan_lora(draft)
    _plan_compile(draft)
    if uses_engine(config):
        _plan_lengths(draft)
        if draft.on_cpu:
            _plan_cpu_cache(draft)
        else:
            _plan_card(draft)
        draft.derive_auto(
            "inference.enforce_eager",
            draft.on_cpu,
            "on a CPU compiling takes longer than it saves" if draft.on_cpu else "CUDA graphs pay on a GPU",
        )
    if isinstance(config.algorithm, RLConfig):
        without_effect = inapplicable(config)
        for choice in choices(config.algorithm):
            if (path := f"algorithm.{choice.name}") not in without_effect:
                draft.derive(path, choice.value, choice.reason)
    if uses_critic(config):
        draft.derive_auto("critic.learning_rate", config.training.learning_rate, "the same as training.learning_rate")
    _plan_micro_batch(draft)
    if config.environment is not None and (config.data is None or config.algorithm.kind != "sft"):
        made = facts.data.num_requested_tasks or facts.data.num_train_tasks
        draft.derive_auto("environment.num_train_tasks", made, "all that the environment has, or enough of them")
    draft.derive_auto("run.threads", facts.num_cpus, "all cores that this process may use")
    draft.derive_auto("run.checkpoint_every", max(1, config.training.steps // 10), "ten checkpoints in a run")
    if config.evaluation is not None:
        draft.derive_auto("evaluation.temperature", config.sampling.temperature, "the same as sampling.temperature")
    planned = draft.config()
    if isinstance(planned.algorithm, RLConfig):
        draft.warnings += rl_warnings(planned, resolved(planned.algorithm))
    draft.warnings += delta_warnings(planned)
    notes = (*parameter_notes(facts), *batch_notes(planned, facts), *memory_notes(planned, facts))
    check_memory(planned, facts)
    return Plan(
        planned,
        tuple(draft.derived),
        notes,
        tuple(draft.warnings),
        trainer_bytes(planned, facts),
        planned_teacher(planned, facts),
    )


@dataclass
class _Draft:
    """A plan in the making."""

    original: RunConfig
    facts: Facts
    derived: list[Derived] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return self.facts.num_gpus == 0

    def __getitem__(self, path: str) -> Any:
        for item in self.derived:
            if item.name == path:
                return item.value
        section, name = path.split(".")
        return getattr(getattr(self.original, section), name)

    def derive(self, path: str, value: Any, reason: str) -> None:
        self.derived.append(Derived(path, value, reason))

    def derive_auto(self, path: str, value: Any, reason: str) -> None:
        if self[path] == "auto":
            self.derive(path, value, reason)

    def config(self) -> RunConfig:
        return with_values(self.original, {item.name: item.value for item in self.derived})


def _plan_dtype(draft: _Draft) -> None:
    num_parameters = draft.facts.model.num_parameters
    size = f"{num_parameters / 1e6:.3g} M parameters"
    if draft.original.training.optimizer == "adamw_bf16":
        draft.derive_auto("model.dtype", "bfloat16", "the type that training.optimizer rounds to")
    elif draft.on_cpu and num_parameters < SMALL_MODEL_PARAMETERS:
        draft.derive_auto("model.dtype", "float32", f"on a CPU {size} are few: full precision costs little")
    else:
        draft.derive_auto("model.dtype", "bfloat16", f"half the memory of float32 for {size}")


def _plan_placement(draft: _Draft) -> None:
    """`inference.replicas` and `run.placement`: how many engines, and who is on which GPU."""
    num_gpus, ranks = draft.facts.num_gpus, draft.original.training.ranks
    size, asked = draft["inference.tensor_parallel_size"], draft["inference.replicas"]
    least = 1 if asked == "auto" else asked
    needed = least * size if uses_engine(draft.original) else 0
    if ranks > 1 and not draft.on_cpu and (ranks + needed > num_gpus or draft["run.placement"] == "shared"):
        raise ConfigError(
            f"training.ranks = {ranks} needs {ranks + needed} GPUs, one for each and {needed} for the engine, and "
            f'there are {num_gpus}: lower it, and leave run.placement = "shared" to one rank'
        )
    if draft.on_cpu and ranks > draft.facts.num_cpus:
        draft.warnings.append(f"training.ranks = {ranks} processes share {draft.facts.num_cpus} cores: lower it")
    if not needed:
        return
    check_divided(draft.facts.model, size)
    apart, together = (
        num_cards(place(ranks=ranks, replicas=least, tensor_parallel_size=size, separate=s)) for s in (True, False)
    )
    if num_gpus >= apart and not shares_weights(draft.original):
        draft.derive_auto("run.placement", "separate", f"there are {num_gpus} GPUs")
    reason = "there is no GPU" if draft.on_cpu else f"there {'is' if num_gpus == 1 else 'are'} {num_gpus} GPU"
    if num_gpus >= apart:
        reason = "trainer and engine have one copy of the weights"
    draft.derive_auto("run.placement", "shared", reason)
    separate = draft["run.placement"] == "separate"
    if separate and num_gpus < apart:
        raise ConfigError(
            f'run.placement = "separate" needs {apart} GPUs, {ranks} for the trainer and {apart - ranks} for the '
            f'engine, and there {"is" if num_gpus == 1 else "are"} {num_gpus}: use "shared"'
        )
    if not draft.on_cpu and together > num_gpus:
        raise ConfigError(
            f"inference.replicas = {least} with inference.tensor_parallel_size = {size} needs as many GPUs, and there "
            f"are {num_gpus}: lower one of them"
        )
    _plan_replicas(draft, separate)
    replicas = draft["inference.replicas"]
    used = num_cards(place(ranks=ranks, replicas=replicas, tensor_parallel_size=size, separate=separate))
    used += starts_teacher(draft.original) and num_gpus > used
    if used < num_gpus:
        draft.warnings.append(
            f"{num_gpus - used} of {num_gpus} GPUs are not used: the trainer uses {'one' if ranks == 1 else ranks} "
            "(training.ranks)"
        )


def _plan_replicas(draft: _Draft, separate: bool) -> None:
    prompts, size = draft["training.prompts_per_batch"], draft["inference.tensor_parallel_size"]
    num_gpus, ranks = draft.facts.num_gpus, draft.original.training.ranks
    if starts_teacher(draft.original) and num_gpus > size + ranks:
        num_gpus -= 1
    beside = replicas_beside(num_gpus, ranks=ranks, tensor_parallel_size=size) if separate else 1
    count, reason = beside, f"as many as the {num_gpus - ranks} GPUs hold that are left to them"
    if not separate:
        reason = "one engine uses all cores" if draft.on_cpu else "trainer and engine are on one GPU"
    elif draft.original.algorithm.kind == "sft":
        count, reason = 1, "the engine has only evaluations to make"
    elif prompts < beside:
        count, reason = prompts, f"a batch has {prompts} prompts, and each is one engine's"
    draft.derive_auto("inference.replicas", count, reason)


def _teacher_beside(draft: _Draft, *, trainer: bool) -> int:
    """Bytes of the teacher on the trainer's GPU, or on the engine's."""
    separate = draft["run.placement"] == "separate"
    length = draft["inference.max_model_len"]
    engines = draft["inference.replicas"] * draft["inference.tensor_parallel_size"]
    used = engines + separate * draft.original.training.ranks
    room = teacher_room(
        draft.original, draft.facts, length=length, dtype=draft["model.dtype"], separate=separate, used_cards=used
    )
    if room is None or room.has_own_gpu or (trainer and separate):
        return 0
    return room.total


def _plan_lora(draft: _Draft) -> None:
    """`weights.bridge` and `lora.target_modules`."""
    adapter, lora = draft.facts.adapter, draft.original.lora
    if adapter is not None and lora is not None and lora.target_modules == "all-linear":
        reason = "all-linear: every linear layer but the output head"
        draft.derive("lora.target_modules", adapter.target_modules, reason)
    if uses_engine(draft.original):
        if lora and not lora.dora:
            choice, reason = "lora", "[lora] is set: only the adapter is published"
        elif draft["run.placement"] == "separate":
            choice, reason = "broadcast", "from GPU to GPU"
        else:
            choice, reason = "disk", "files loaded into the running engine"
        draft.derive_auto("weights.bridge", choice, reason)


def _plan_batch(draft: _Draft) -> None:
    num_tasks, training = draft.facts.data.num_train_tasks, draft.original.training
    if num_tasks < 1:
        raise ConfigError("the training data has no tasks: check environment.settings or data.path")
    if draft.original.algorithm.kind == "sft" and draft.facts.data.max_sequence_tokens is None:
        raise ConfigError("sft trains on gold answers, and the environment has none: use grpo, or set data.path")
    if training.prompts_per_batch <= num_tasks:
        return
    reason = f"lowered from {training.prompts_per_batch}: the training data has only {num_tasks} prompts"
    problem = divisor_problem(training.updates_per_batch, num_tasks)
    if problem:
        raise ConfigError(f"{problem} (training.prompts_per_batch was {reason})")
    draft.derive("training.prompts_per_batch", num_tasks, reason)
    draft.warnings.append(f"training.prompts_per_batch was {reason}")


def _plan_lengths(draft: _Draft) -> None:
    """`sampling.max_tokens` and `inference.max_model_len`."""
    context, data = draft.facts.model.context_length, draft.facts.data
    limit, limit_name = context, "the model's context"
    if draft["inference.max_model_len"] != "auto":
        limit, limit_name = draft["inference.max_model_len"], "inference.max_model_len"
        if limit > context:
            raise ConfigError(
                f"inference.max_model_len = {limit} is above the model's context of {context} tokens: "
                f"use at most {context}"
            )
    prompt, room = data.max_prompt_tokens, limit - data.max_prompt_tokens
    if room < 1:
        raise ConfigError(
            f"the longest prompt has {prompt} tokens, which leaves no room for a completion in "
            f"{limit_name} of {limit}: use shorter prompts or "
            + ("a model with a longer context" if limit == context else "raise inference.max_model_len")
        )
    answer = data.max_answer_tokens
    if answer is None:
        draft.derive_auto("sampling.max_tokens", room, f"no gold answers; what {limit_name} of {limit} leaves")
    else:
        wanted = max(8, math.ceil(1.25 * answer) + 4)
        reason = f"1.25 x the longest gold answer of {answer} tokens, and 4, at least 8"
        cut = f"what {limit_name} of {limit} leaves beside a prompt of {prompt} tokens"
        draft.derive_auto("sampling.max_tokens", min(wanted, room), reason if wanted <= room else cut)
    max_tokens = draft["sampling.max_tokens"]
    if max_tokens > room:
        raise ConfigError(
            f"sampling.max_tokens = {max_tokens} and the longest prompt of {prompt} tokens do not fit into "
            f"{limit_name} of {limit}: use at most {room}"
        )
    if answer is not None and max_tokens < answer:
        draft.warnings.append(
            f"sampling.max_tokens = {max_tokens} is below the longest gold answer of {answer} tokens, "
            "so that task cannot be solved"
        )
    if data.max_turns > 1:
        reason = f"the model's context: how long {data.max_turns} turns get is not known before"
        draft.derive_auto("inference.max_model_len", context, reason)
    draft.derive_auto(
        "inference.max_model_len",
        min(context, round_up(prompt + max_tokens, 16)),
        f"longest prompt of {prompt} and completion of {max_tokens} tokens, in multiples of 16",
    )


def _sequences(draft: _Draft) -> tuple[int, str]:
    """How many sequences are worth generating at once in each engine, and why."""
    wanted = {}
    algorithm = draft.original.algorithm
    if isinstance(algorithm, RLConfig):
        prompts = draft["training.prompts_per_batch"]
        wanted[prompts * algorithm.group_size] = f"{prompts} prompts x {algorithm.group_size} completions"
    if draft.original.evaluation is not None:
        wanted[draft.original.evaluation.num_tasks] = "the tasks of an evaluation"
    most, replicas = max(wanted), draft["inference.replicas"]
    each, reason = -(-most // replicas), wanted[most] + (f", shared out to {replicas} engines" if replicas > 1 else "")
    if each > MAX_SEQUENCES:
        return MAX_SEQUENCES, f"at most {MAX_SEQUENCES}; there are {each}: {reason}"
    return each, reason


def _plan_cpu_cache(draft: _Draft) -> None:
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


def _plan_card(draft: _Draft) -> None:
    """The same on a GPU, and whether the engine sleeps while the trainer works."""
    card, length = draft.facts.gpu_memory_bytes, draft["inference.max_model_len"]
    weights, each = _card_weights(draft), _gpu_cache_each(draft)
    wanted, reason = _sequences(draft)
    split = _split_of(draft)
    share = draft["inference.gpu_memory_utilization"]
    room = split.cache if share == "auto" else min(split.cache, int(share * card) - weights - ENGINE_RESERVE)
    given = draft["inference.kv_cache_gib"]
    room = room if given == "auto" else int(given * GIB)
    fitting = room // each
    if fitting < 1:
        teacher = _teacher_beside(draft, trainer=False)
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
    elif not split.fits:
        reason = "with staleness the engine works while the trainer does"
    draft.derive_auto("inference.sleep", split.sleeps, reason)


def _card_weights(draft: _Draft) -> int:
    """The engine's weights on one of its cards."""
    return -(-weights_bytes(draft.facts.model, draft["model.dtype"]) // draft["inference.tensor_parallel_size"])


def _gpu_cache_each(draft: _Draft) -> int:
    """KV cache of one sequence on one card, and a block for what vLLM keeps to itself."""
    length, size = draft["inference.max_model_len"] + GPU_BLOCK_TOKENS, draft["inference.tensor_parallel_size"]
    return kv_bytes_per_sequence(draft.facts.model, draft["model.dtype"], length, GPU_BLOCK_TOKENS, size)


def _split_of(draft: _Draft) -> Split:
    """How trainer and engine divide the card, or the two cards."""
    training, facts, dtype = draft.original.training, draft.facts, draft["model.dtype"]
    checkpointing = True if training.offload_activations else training.gradient_checkpointing
    each = activation_bytes_of(
        draft.original, dtype, facts, checkpointing=checkpointing, compiled=draft["training.compile"]
    )
    row = draft["training.micro_batch_tokens"]
    tokens = max(_longest(draft), MIN_ROW_TOKENS if row == "auto" else row)
    num_sequences = draft["inference.max_num_seqs"]
    needs = Needs(
        state=training_state(draft.original, dtype, facts),
        activations=int(tokens * each / ACTIVATION_MARGIN),
        probe=draft["inference.max_model_len"] * logits_bytes_per_token(facts.model, dtype),
        weights=_card_weights(draft),
        cache=_gpu_cache_each(draft) * (_sequences(draft)[0] if num_sequences == "auto" else num_sequences),
        teacher=_teacher_beside(draft, trainer=False),
    )
    sleep, separate = draft["inference.sleep"], draft["run.placement"] == "separate"
    if sleep is True and separate:
        raise ConfigError("inference.sleep = true has no use: the engine has a GPU of its own; remove it")
    return split_card(
        facts.gpu_memory_bytes,
        needs,
        shared=not separate,
        may_sleep=sleep == "auto" and not training.staleness and not shares_weights(draft.original),
        must_sleep=sleep is True,
    )


def _longest(draft: _Draft) -> int:
    """Tokens of the longest sequence that is trained on."""
    if isinstance(draft.original.algorithm, RLConfig):
        return draft["inference.max_model_len"]
    return draft.facts.data.max_sequence_tokens or 0


def _plan_micro_batch(draft: _Draft) -> None:
    model, data = draft.facts.model, draft.facts.data
    longest = data.max_sequence_tokens or 0
    if longest > model.context_length:
        raise ConfigError(
            f"the longest training conversation has {longest} tokens, more than the model's context of "
            f"{model.context_length}: shorten it or use a model with a longer context"
        )
    longest = _longest(draft)
    if draft.on_cpu:
        ranks = draft.original.training.ranks
        room, source = draft.facts.memory_bytes * MAX_ACTIVATION_PART / ranks, "an eighth of the memory"
        source += f" for each of {ranks} ranks" if ranks > 1 else ""
    else:
        room = ACTIVATION_MARGIN * _activation_room(draft)
        source = f"{ACTIVATION_MARGIN:g} of what the GPU has left for activations"
    each = _activations(draft, longest, room, source)
    most = MAX_CPU_MICRO_BATCH_TOKENS if draft.on_cpu else MAX_MICRO_BATCH_TOKENS
    fitting = min(most, int(room // each))
    if fitting >= longest:
        value = max(longest, fitting // 256 * 256, 1)
        reason = f"{each / 1024:.3g} KiB a token in {source}, at most {most}"
    else:
        value, reason = (
            longest,
            f"the longest sequence, although {source} holds only {max(0, fitting)} tokens",
        )
    if draft["training.micro_batch_tokens"] == "auto" and fitting < longest:
        draft.warnings.append(f"training.micro_batch_tokens = {value}: {reason}")
    draft.derive_auto("training.micro_batch_tokens", value, reason)


def _activation_room(draft: _Draft) -> float:
    """Bytes for activations on the trainer's GPU."""
    usable = draft.facts.gpu_memory_bytes * USABLE
    if uses_engine(draft.original):
        usable -= _teacher_beside(draft, trainer=True)
    state = training_state(draft.original, draft["model.dtype"], draft.facts) + TRAINER_RESERVE
    if not uses_engine(draft.original) or draft["run.placement"] == "separate":
        return usable - state
    if draft["inference.sleep"]:
        return usable - state - ASLEEP_RESERVE
    cache = draft["inference.kv_cache_gib"] * GIB
    return usable - state - _card_weights(draft) - ENGINE_RESERVE - cache


def _activations(draft: _Draft, longest: int, room: float, source: str) -> int:
    """Bytes that a trained token keeps, once `training.gradient_checkpointing` is decided."""
    training, row = draft.original.training, draft["training.micro_batch_tokens"]
    tokens = longest if row == "auto" else max(longest, row)

    def bytes_of(checkpointing: Any) -> int:
        compiled = draft["training.compile"]
        return activation_bytes_of(
            draft.original, draft["model.dtype"], draft.facts, checkpointing=checkpointing, compiled=compiled
        )

    each = bytes_of(False)
    fits = tokens * each <= room
    reason = f"{tokens} tokens at {each / 1024:.3g} KiB {'fit' if fits else 'do not fit'} into {source} ({gib(room)})"
    choice: Any = not fits
    if training.offload_activations:
        choice, reason = True, "training.offload_activations moves the inputs of layers that are computed again"
    elif not fits and not draft["training.compile"] and tokens * bytes_of("selective") <= room:
        choice = "selective"
        reason += f", at {bytes_of('selective') / 1024:.3g} they do"
    draft.derive_auto("training.gradient_checkpointing", choice, reason)
    return bytes_of(draft["training.gradient_checkpointing"])


def _plan_compile(draft: _Draft) -> None:
    """`training.compile`, and what needs a GPU."""
    if draft.original.training.offload_activations and draft.on_cpu:
        raise ConfigError(
            "training.offload_activations = true moves activations from a GPU to the CPU's memory, and there is no GPU:"
            " remove it"
        )
    pays, reason = compiling_pays(draft.original, draft.facts)
    draft.derive_auto("training.compile", pays, reason)
