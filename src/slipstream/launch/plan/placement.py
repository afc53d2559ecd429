"""The part of the plan that says how many engines there are, and who is on which GPU."""

from __future__ import annotations

from slipstream.config.traits import shares_weights, starts_teacher, uses_engine
from slipstream.errors import ConfigError
from slipstream.launch.plan.builder import Draft
from slipstream.launch.plan.memory.gpu_shares import (
    num_cards,
    place,
    replicas_beside,
)
from slipstream.launch.plan.memory.teacher import teacher_room
from slipstream.launch.plan.summary import (
    check_divided,
)


def plan_placement(draft: Draft) -> None:
    """`inference.replicas` and `run.placement`: how many engines, and who is on which GPU."""
    num_gpus, ranks = draft.facts.num_gpus, draft.original.training.ranks
    size, asked = draft["inference.tensor_parallel_size"], draft["inference.replicas"]
    least = 1 if asked == "auto" else asked
    needed = least * size if uses_engine(draft.original) else 0
    shares = shares_weights(draft.original) or _ranks_share(draft, needed)
    beside = ranks > 1 and not draft.on_cpu and not shares
    if beside and (ranks + needed > num_gpus or draft["run.placement"] == "shared"):
        raise ConfigError(
            f"training.ranks = {ranks} needs {ranks + needed} GPUs, one for each and {needed} for the engine, and "
            f'there are {num_gpus}: lower it, and leave run.placement = "shared" to one rank'
        )
    if draft.on_cpu and ranks > draft.facts.num_cpus:
        draft.warnings.append(f"training.ranks = {ranks} processes share {draft.facts.num_cpus} cores: lower it")
    if not needed:
        return
    check_divided(draft.facts.model, size, has_ranks=ranks > 1 and shares)
    apart, together = (
        num_cards(place(ranks=ranks, replicas=least, tensor_parallel_size=size, separate=s)) for s in (True, False)
    )
    if num_gpus >= apart and not shares:
        draft.derive_auto("run.placement", "separate", f"there are {num_gpus} GPUs")
    reason = (
        "there is no GPU" if draft.on_cpu else "there is one GPU" if num_gpus == 1 else f"there are {num_gpus} GPUs"
    )
    if shares and not draft.on_cpu:
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
            f"inference.replicas = {least} with inference.tensor_parallel_size = {size} needs {together} GPUs, and "
            f"there {'is' if num_gpus == 1 else 'are'} {num_gpus}: "
            + ("lower training.ranks and it together" if ranks > 1 else "lower one of them")
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


def _ranks_share(draft: Draft, needed: int) -> bool:
    """Whether the ranks have one copy with the engine's workers because there are no cards beside theirs."""
    training, placement = draft.original.training, draft["run.placement"]
    if training.ranks == 1 or not needed or draft.on_cpu or draft["weights.bridge"] != "auto":
        return False
    is_short = placement == "shared" or (placement == "auto" and draft.facts.num_gpus < training.ranks + needed)
    return is_short and draft.original.lora is None and not one_copy_obstacle(draft)


OWN_LAYOUT = (
    "quantization",
    "load_format",
    "model_impl",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "enable_sleep_mode",
    "cpu_offload_gb",
    "offload_backend",
    "offload_config",
)
"""vLLM's engine arguments with which its weights lie otherwise than the trainer's, or not on this card alone."""


def one_copy_obstacle(draft: Draft) -> str:
    """Why trainer and engine cannot have one copy of the weights on the cards that they share, as far as settings and
    facts tell; empty where nothing is in the way. What vLLM makes of a model is seen when it has loaded it."""
    config, size = draft.original, draft["inference.tensor_parallel_size"]
    ranks, replicas, options = config.training.ranks, draft["inference.replicas"], config.inference.options
    own = next((name for name in options if name.replace("-", "_") in OWN_LAYOUT), "")
    if config.lora is not None and config.lora.dora:
        return "DoRA's engine gets the whole model with the adapter in it"
    if isinstance(replicas, int) and replicas > 1:
        return f"each of inference.replicas = {replicas} engines has weights of its own"
    if ranks != size:
        return f"there are training.ranks = {ranks} and inference.tensor_parallel_size = {size}, which must be equal"
    if ranks > 1 and draft.facts.model.num_experts > 1:
        return "ranks and workers divide a layer's experts in different ways"
    if config.inference.sleep is True:
        return "inference.sleep = true frees the engine's weights"
    if config.weights.delta:
        return "weights.delta = true sends what changed"
    return f"with inference.options.{own} vLLM has the weights otherwise than the trainer" if own else ""


def _plan_replicas(draft: Draft, separate: bool) -> None:
    prompts, size = draft["training.prompts_per_batch"], draft["inference.tensor_parallel_size"]
    num_gpus, ranks = draft.facts.num_gpus, draft.original.training.ranks
    if starts_teacher(draft.original) and num_gpus > size + ranks:
        num_gpus -= 1
    beside = replicas_beside(num_gpus, ranks=ranks, tensor_parallel_size=size) if separate else 1
    count, reason = beside, f"as many as the {num_gpus - ranks} GPUs hold that are left to them"
    if not separate:
        where = "one GPU" if ranks == 1 else f"the same {ranks} GPUs"
        reason = "one engine uses all cores" if draft.on_cpu else f"trainer and engine are on {where}"
    elif draft.original.algorithm.kind == "sft":
        count, reason = 1, "the engine has only evaluations to make"
    elif prompts < beside:
        count, reason = prompts, f"a batch has {prompts} prompts, and each is one engine's"
    draft.derive_auto("inference.replicas", count, reason)


def teacher_beside(draft: Draft, *, trainer: bool) -> int:
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
