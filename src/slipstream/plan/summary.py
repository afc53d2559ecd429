"""Notes and warnings on a planned config: how much is generated, trained on and held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.config import PlannedConfig, PlannedRL, RLConfig
from slipstream.config.recipes import resolved
from slipstream.config.traits import (
    engine_workers,
    keeps_copy,
    measures_loss,
    num_replicas,
    shares_weights,
    uses_critic,
    uses_engine,
)
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts, ModelFacts
from slipstream.plan.memory.cards import held_by_others
from slipstream.plan.memory.gpu_shares import ASLEEP_RESERVE, ENGINE_RESERVE, TRAINER_RESERVE
from slipstream.plan.memory.remedies import either, ways_to_need_less
from slipstream.plan.memory.sizes import (
    BYTES_OF,
    GIB,
    gib,
    optimizer_bytes,
    paged_bytes,
    weights_bytes,
)
from slipstream.plan.memory.teacher import TOP_BYTES, planned_teacher, top_bytes
from slipstream.plan.memory.tower import feature_bytes, patches_at_once, tower_bytes
from slipstream.plan.memory.trainer import model_state, row_memory
from slipstream.plan.nodes import assign, most_on_a_node, node_name, ranks_of_a_node

LEAST_UNREACHED = 0.01
"""Part of a model's parameters: if LoRA cannot reach more, there is a warning."""


@dataclass(frozen=True)
class Note:
    """A number derived from the plan, for people."""

    name: str
    value: int | float
    unit: str
    how: str


def node_notes(config: PlannedConfig) -> Iterator[Note]:
    """The ranks and engines of each node; nothing on one node."""
    if (nodes := config.cluster.nodes) == 1:
        return
    assigned, orchestrator = assign(config), "the orchestrator"
    found: list[str] = []
    for node in range(nodes):
        has = [orchestrator] * (node == 0 and bool(assigned.engines))
        for kind, places in (("rank", assigned.ranks), ("engine", assigned.engines)):
            if own := [number for number, place in enumerate(places) if place == node]:
                has.append(f"{kind} {own[0]}" if len(own) == 1 else f"{kind}s {own[0]} to {own[-1]}")
        found.append(f"{node_name(node) or 'node-0'}: {', '.join(has)}")
    gpus = f" of {config.cluster.gpus_per_node} GPUs" if config.cluster.gpus_per_node else ""
    yield Note("nodes", nodes, f"nodes{gpus}", "; ".join(found))


def batch_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """How much is generated and trained on, in a batch and in all."""
    training, algorithm = config.training, config.algorithm
    group = algorithm.group_size if isinstance(algorithm, RLConfig) else facts.data.row_sequences
    sequences = training.prompts_per_batch * group
    longest = facts.data.max_sequence_tokens or 0
    if isinstance(algorithm, RLConfig):
        longest = config.inference.max_model_len
    updates = training.steps * training.updates_per_batch * training.epochs_per_batch
    passes = training.steps * training.prompts_per_batch / facts.data.num_train_tasks
    yield Note("sequences per batch", sequences, "", f"{training.prompts_per_batch} prompts x {group}")
    yield Note("tokens per batch, at most", sequences * longest, "", f"sequences of up to {longest} tokens")
    yield Note("optimizer steps", updates, "", f"{training.steps} batches x updates x epochs")
    yield Note("samples", training.steps * sequences, "", f"{training.steps} batches of {sequences}")
    yield Note("passes over the data", round(passes, 3), "", f"{facts.data.num_train_tasks} training prompts")
    if config.evaluation is not None:
        every = config.evaluation.every
        between = (training.steps - 1) // every if every else 0
        times = between + 1 + config.evaluation.at_start
        samples = config.evaluation.samples_per_task
        held_out = [f"{config.evaluation.num_tasks} held-out tasks"] if config.environment is not None else []
        if held_out and samples > 1:
            held_out[0] += f", {samples} completions of each"
        if measures_loss(config):
            held_out.append(f"the loss of {facts.data.num_eval_rows} held-out rows")
        yield Note("evaluations", times, "", f"of {' and '.join(held_out)}")


def trainer_bytes(config: PlannedConfig, facts: Facts) -> int:
    """A planned trainer's memory at most, without contexts and workspaces."""
    trainer, _ = _memory(config, facts)
    return trainer.kept + trainer.working


def rotary_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """Trainer's and engine's set of longrope factors."""
    if original := facts.model.original_context:
        length = config.inference.max_model_len
        which, side = ("long", "above") if length > original else ("short", "within")
        how = (
            f"longrope: inference.max_model_len = {length} is {side} it, so sequences of every length have the {which} "
            f"factors; serve the model with a max_model_len {side} it, too"
        )
        yield Note("original context", original, "tokens", how)


def rotary_warnings(config: PlannedConfig, facts: Facts) -> Iterator[str]:
    """Conversations longer than the original context: they would be trained with the short factors."""
    original, longest = facts.model.original_context, facts.data.max_sequence_tokens or 0
    if original and config.inference.max_model_len <= original < longest:
        yield (
            f"conversations of up to {longest} tokens are trained with the rotary factors for up to {original}: raise "
            "inference.max_model_len, which decides them"
        )


def parameter_notes(facts: Facts) -> Iterator[Note]:
    """The parameters trained by LoRA."""
    if facts.adapter is not None:
        part = 100 * facts.adapter.num_parameters / facts.model.num_parameters
        how = f"the adapter: {part:.3g} % of the model's {facts.model.num_parameters:,}, which stay as they are"
        yield Note("trainable parameters", facts.adapter.num_parameters, "", how)
        if facts.adapter.num_unreached:
            part = 100 * facts.adapter.num_unreached / facts.model.num_parameters
            how = f"{part:.3g} % of the model's, in {', '.join(facts.adapter.unreached)}: no linear layers"
            yield Note("parameters that LoRA cannot reach", facts.adapter.num_unreached, "", how)


def lora_warnings(facts: Facts) -> Iterator[str]:
    """A model with more than 1 % of its parameters out of LoRA's reach."""
    adapter, whole = facts.adapter, facts.model.num_parameters
    if adapter is not None and adapter.num_unreached > LEAST_UNREACHED * whole:
        yield (
            f"[lora] leaves {', '.join(adapter.unreached)} as they are, {adapter.num_unreached:,} of the model's "
            f"{whole:,} parameters, which are no linear layers and cannot have an adapter: train without [lora] to "
            "change them"
        )


def memory_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """Most memory of trainer, engine and teacher, in GiB; on a GPU with CUDA contexts and workspaces."""
    trainer, engine = _memory(config, facts)
    kept = "moments and gradients" if config.training.optimizer == "adamw_bf16" else "masters, moments and gradients"
    if facts.adapter is not None:
        kept += " of the adapter"
    if not shares_weights(config):
        kept = f"frozen weights, and {kept}" if facts.adapter is not None else f"weights, {kept}"
    if keeps_copy(config):
        size = gib(weights_bytes(facts.model, config.model.dtype))
        kept += f" and a copy of the version published last ({size}, for weights.delta to find what changed)"
    if paged := _paged(config, facts):
        kept += f" (moments of {gib(paged)} are in the CPU's memory as far as the GPU has no room for them)"
    how = f"{kept} {gib(trainer.kept)}, activations {gib(trainer.working)}"
    if uses_critic(config):
        critic = model_state(config, config.model.dtype, facts)
        how = f"{kept} {gib(trainer.kept - critic)}, the critic's own {gib(critic)}, activations {gib(trainer.working)}"
    if (ranks := config.training.ranks) > 1:
        how += f"; of each of {ranks} ranks" if facts.num_gpus else f"; of all {ranks} ranks"
    if (together := config.training.context_parallel) > 1:
        how += f"; every {together} ranks hold a row together (training.context_parallel)"
    yield _memory_note("memory of the trainer", trainer, how)
    yield from _tower_notes(config, facts)
    if engine is not None:
        how = f"weights {gib(engine.kept)}, KV cache {gib(engine.working)}"
        if engine_workers(config) > 1:
            how += ", on each of its GPUs" if facts.num_gpus else f", of {engine_workers(config)} processes together"
        if config.inference.sleep is True:
            how += "; freed while the trainer works"
        yield _memory_note("memory of the engine", engine, how)
    if (teacher := planned_teacher(config, facts)) is not None:
        how = (
            f"weights {gib(teacher.weights)}, KV cache {gib(teacher.cache)} for {teacher.max_num_seqs} sequences of "
            f"{teacher.max_model_len} tokens, {gib(teacher.reserve)} for logits and contexts; {teacher.where}"
        )
        yield Note("memory of the teacher", round(teacher.total / GIB, 2), "GiB", how)
    if (taken := top_bytes(config)) and config.teacher is not None:
        how = f"{config.teacher.top_k} of each sampled token, {TOP_BYTES} bytes each, in completions as long as allowed"
        yield Note("the teacher's likeliest tokens in a batch", round(taken / GIB, 3), "GiB", how)


def _tower_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """The vision tower's part of the trainer's memory, in GiB."""
    if (tower := facts.tower) is None:
        return
    dtype, optimizer = config.model.dtype, config.training.optimizer
    weights = tower.num_parameters * BYTES_OF[dtype]
    states = optimizer_bytes(optimizer, tower.num_parameters, None) if tower.is_trained and not facts.adapter else 0
    features = feature_bytes(tower, dtype, config.training.prompts_per_batch)
    working = tower_bytes(tower, dtype)
    kept = f"trained: weights {gib(weights)}, masters, moments and gradients {gib(states)}"
    if not tower.is_trained:
        kept = f"frozen: weights {gib(weights)}"
    elif facts.adapter is not None:
        kept = f"trained by the adapter: weights {gib(weights)}"
    how = (
        f"{kept}, features of images {gib(features)}, activations {gib(working)} for {patches_at_once(tower):,} "
        "patches at once (model.max_pixels bounds those of an image), while no row has any; part of the trainer's"
    )
    yield Note("memory of the vision tower", round((weights + states + features + working) / GIB, 2), "GiB", how)


def check_divided(model: ModelFacts, tensor_parallel_size: int, *, has_ranks: bool) -> None:
    """Raises ConfigError if `tensor_parallel_size` workers cannot divide the model's attention heads evenly; with
    `has_ranks` (trainer ranks in the workers' memory) also for a model with experts."""
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, tensor_parallel_size
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"inference.tensor_parallel_size = {size} does not divide the model's {heads} attention heads (and "
            f"{kv_heads} of keys and values) evenly: use a divisor of both, or inference.replicas instead"
        )
    if has_ranks and model.num_experts > 1:
        raise ConfigError(
            f'weights.bridge = "single_copy" has {size} ranks train what {size} workers have, and trainer and engine '
            f"divide the {model.num_experts} experts of this model's layers in different ways: use another bridge, or "
            "one rank and one worker"
        )


def delta_warnings(config: PlannedConfig) -> Iterator[str]:
    """`weights.delta` in float32: it costs memory and saves nothing."""
    if keeps_copy(config) and config.model.dtype == "float32":
        yield (
            'weights.delta saves nothing while model.dtype = "float32", in which nearly every element changes in every '
            'step: use "bfloat16", or turn it off'
        )


def held_warnings(facts: Facts) -> Iterator[str]:
    """GPU memory held by others."""
    if facts.gpu_held_bytes:
        yield (
            f"a GPU has {gib(facts.gpu_memory_bytes)}{held_by_others(facts)}: planned with what is left; end them, or "
            "name other GPUs by CUDA_VISIBLE_DEVICES"
        )


def rl_warnings(config: PlannedConfig, algorithm: PlannedRL) -> Iterator[str]:
    """Settings of [algorithm] without their apparent effect."""
    one_update = config.training.updates_per_batch == config.training.epochs_per_batch == 1
    usual = resolved(RLConfig(kind=algorithm.kind))
    arguments, longest = algorithm.arguments, config.sampling.max_tokens
    is_set = (algorithm.clip_low, algorithm.clip_high) != (usual.clip_low, usual.clip_high) or arguments.clip_dual
    if one_update and is_set and algorithm.old_policy == "trainer":
        yield (
            "algorithm.clip_low and clip_high never act with one update per batch, where the ratio "
            "is always 1: raise training.updates_per_batch or training.epochs_per_batch to use them"
        )
    if arguments.thinking_budget is not None and arguments.thinking_budget >= longest:
        yield (
            f"algorithm.arguments.thinking_budget = {arguments.thinking_budget} never acts: no completion is longer "
            f"than sampling.max_tokens = {longest}"
        )
    if algorithm.kl_coef and arguments.kl_in == "loss" and arguments.kl_estimator == "k1":
        yield (
            'algorithm.arguments.kl_estimator = "k1" in the loss has a gradient that is zero on average, so it holds '
            'nothing back: use "k3", or set algorithm.arguments.kl_in = "reward"'
        )


@dataclass(frozen=True)
class _Side:
    """Bytes of the trainer or the engine."""

    kept: int
    working: int
    reserve: int
    """Contexts, graphs and workspaces of a GPU."""

    @property
    def total(self) -> int:
        return self.kept + self.working + self.reserve


def _memory(config: PlannedConfig, facts: Facts) -> tuple[_Side, _Side | None]:
    dtype, on_gpu = config.model.dtype, facts.num_gpus > 0
    rows = row_memory(config, facts, checkpointing=config.training.gradient_checkpointing)
    activations = rows.num_bytes(config.training.micro_batch_tokens) * (1 if on_gpu else ranks_of_a_node(config))
    trainer = _Side(rows.state, activations, TRAINER_RESERVE * on_gpu)
    if not uses_engine(config):
        return trainer, None
    cache, size = int(config.inference.kv_cache_gib * GIB), config.inference.tensor_parallel_size
    if on_gpu:
        return trainer, _Side(-(-weights_bytes(facts.model, dtype) // size), cache, ENGINE_RESERVE)
    replicas = most_on_a_node(assign(config).engines)
    return trainer, _Side(replicas * weights_bytes(facts.model, dtype), replicas * size * cache, 0)


def _paged(config: PlannedConfig, facts: Facts) -> int:
    """Bytes of optimizer moments that may move to the CPU's memory, with the critic's."""
    if not facts.num_gpus or facts.adapter is not None:
        return 0
    return paged_bytes(config.training.optimizer, facts.model) * (2 if uses_critic(config) else 1)


def _memory_note(name: str, side: _Side, how: str) -> Note:
    if side.reserve:
        how += f", {gib(side.reserve)} for contexts, graphs and workspaces"
    return Note(name, round(side.total / GIB, 2), "GiB", how)


def host_bytes(config: PlannedConfig, facts: Facts) -> int:
    """Bytes of the machine's own memory for the run, without libraries: all on a CPU, else the GPUs' offloaded part."""
    if facts.num_gpus:
        asleep = weights_bytes(facts.model, config.model.dtype) if config.inference.sleep is True else 0
        return _paged(config, facts) + asleep
    (trainer, engine), teacher = _memory(config, facts), planned_teacher(config, facts)
    return trainer.total + (engine.total if engine else 0) + (teacher.total if teacher else 0)


def needed_bytes(config: PlannedConfig, facts: Facts) -> tuple[int, str]:
    """Bytes the run needs of the fullest GPU, or of the machine, and the words for it."""
    trainer, engine = _memory(config, facts)
    needed = trainer.total
    where = "there are"
    if engine is not None:
        if facts.num_gpus and config.run.placement == "separate":
            needed, where = max(trainer.total, engine.total), "each GPU has"
        elif facts.num_gpus and config.inference.sleep is True:
            awake = engine.total + trainer.kept + trainer.reserve
            needed, where = max(awake, trainer.total + ASLEEP_RESERVE), "the GPU has"
        else:
            needed = trainer.total + engine.total
    teacher = planned_teacher(config, facts)
    if teacher is not None and not teacher.has_own_gpu:
        on_engines_gpu = facts.num_gpus > 0 and config.run.placement == "separate" and engine is not None
        if on_engines_gpu and engine:
            needed = max(trainer.total, engine.total + teacher.total)
        else:
            needed += teacher.total
    return needed, where


def memory_refusals(config: PlannedConfig, facts: Facts) -> Iterator[str]:
    """Why the run does not fit: trainer and engine need more memory than there is, each or together."""
    trainer, engine = _memory(config, facts)
    needed, where = needed_bytes(config, facts)
    teacher = planned_teacher(config, facts)
    if (paged := _paged(config, facts)) > facts.memory_bytes:
        yield (
            f'training.optimizer = "{config.training.optimizer}" may move {gib(paged)} of moments to the host, and '
            f'there are {gib(facts.memory_bytes)} of memory: use a smaller model, [lora], or "adamw_8bit"'
        )
    available = facts.gpu_memory_bytes - facts.gpu_held_bytes if facts.num_gpus else facts.memory_bytes
    if needed > available:
        parts = f"trainer {gib(trainer.total)}" + (f", engine {gib(engine.total)}" if engine else "")
        parts += f", teacher {gib(teacher.total)}" if teacher is not None else ""
        held = f" of a GPU left{held_by_others(facts)}" if facts.gpu_held_bytes else ""
        blamed = [f"lower {' or '.join(found)}"] if (found := _settings_to_lower(config, facts, needed)) else []
        apart = where == "each GPU has"
        remedies = blamed or ways_to_need_less(
            config,
            facts,
            of_trainer=not apart or trainer.total > available,
            of_engine=not apart or trainer.total <= available,
        )
        where = "there are" if held else where
        yield (
            f"the run needs about {gib(needed)} ({parts}), and {where} {gib(max(0, available))}{held}: "
            + either(remedies)
        )


def _settings_to_lower(config: PlannedConfig, facts: Facts, needed: int) -> list[str]:
    """Settings with room for smaller values, behind more than half of `needed` bytes."""
    trainer, engine = _memory(config, facts)
    row, longest = config.training.micro_batch_tokens, facts.data.max_sequence_tokens or 0
    if isinstance(config.algorithm, RLConfig):
        longest = config.inference.max_model_len
    found: list[str] = []
    tower = tower_bytes(facts.tower, config.model.dtype) if facts.tower is not None else 0
    if 2 * tower > needed:
        return ["model.max_pixels"]
    if 2 * trainer.working > needed:
        found += [f"training.micro_batch_tokens = {row}"] * (row > longest)
        found += [f"training.ranks = {config.training.ranks}"] * (config.training.ranks > 1 and not facts.num_gpus)
    if engine is not None and 2 * engine.total > needed and not facts.num_gpus:
        found += [f"inference.replicas = {num_replicas(config)}"] * (num_replicas(config) > 1)
        size = config.inference.tensor_parallel_size
        found += [f"inference.tensor_parallel_size = {size}"] * (size > 1)
    return found
