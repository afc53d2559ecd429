"""Derives how many engines there are, and which GPUs trainer, engines and teacher use."""

from __future__ import annotations

from slipstream.config.sft import SFTConfig
from slipstream.config.traits import rolls_out, shares_weights, starts_engines, starts_teacher
from slipstream.errors import ConfigError
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.decided import planned_config
from slipstream.plan.memory.gpu_shares import (
    num_gpus_needed,
    place,
    replicas_that_fit,
)
from slipstream.plan.memory.teacher import planned_teacher
from slipstream.plan.nodes import assign, node_name, ranks_of_a_node
from slipstream.plan.summary import (
    check_divided,
)


def plan_placement(builder: PlanBuilder) -> None:
    """Derive `inference.replicas` and `run.placement`."""
    num_gpus, ranks = builder.facts.num_gpus, builder.original.training.ranks
    size, asked = builder["inference.tensor_parallel_size"], builder["inference.replicas"]
    orchestrators = builder.original.run.orchestrators
    least = (1 if asked == "auto" else asked) * orchestrators
    needed = least * size if starts_engines(builder.original) else 0
    per_node = _plan_nodes(builder, size)
    shares = shares_weights(builder.original) or _ranks_share_gpus(builder, needed)
    beside = ranks > 1 and not builder.on_cpu and not shares
    if beside and (ranks + needed > num_gpus or builder["run.placement"] == "shared"):
        raise ConfigError(
            f"training.ranks = {ranks} needs {ranks + needed} GPUs, one for each and {needed} for the engine, and "
            f'there are {num_gpus}: lower it, and leave run.placement = "shared" to one rank'
        )
    if builder.on_cpu and (here := ranks_of_a_node(builder.config())) > builder.facts.num_cpus:
        builder.warnings.append(f"training.ranks = {here} processes share {builder.facts.num_cpus} cores: lower it")
    if not needed:
        _check_nodes(builder)
        return
    check_divided(builder.facts.model, size, has_ranks=ranks > 1 and shares)
    apart, together = (
        num_gpus_needed(
            place(ranks=ranks, replicas=least, tensor_parallel_size=size, separate=s, gpus_per_node=per_node)
        )
        for s in (True, False)
    )
    if num_gpus >= apart and not shares:
        builder.derive_auto("run.placement", "separate", f"there are {num_gpus} GPUs")
    reason = (
        "there is no GPU" if builder.on_cpu else "there is one GPU" if num_gpus == 1 else f"there are {num_gpus} GPUs"
    )
    if shares and not builder.on_cpu:
        reason = "trainer and engine have one copy of the weights"
    builder.derive_auto("run.placement", "shared", reason)
    separate = builder["run.placement"] == "separate"
    if separate and num_gpus < apart:
        raise ConfigError(
            f'run.placement = "separate" needs {apart} GPUs, {ranks} for the trainer and {apart - ranks} for the '
            f'engine, and there {"is" if num_gpus == 1 else "are"} {num_gpus}: use "shared"'
        )
    if not builder.on_cpu and together > num_gpus:
        raise ConfigError(
            f"inference.replicas = {least // orchestrators} {for_each(orchestrators)}with "
            f"inference.tensor_parallel_size = {size} needs {together} GPUs, and "
            f"there {'is' if num_gpus == 1 else 'are'} {num_gpus}: "
            + ("lower training.ranks and it together" if ranks > 1 else "lower one of them")
        )
    _plan_replicas(builder, separate)
    _check_nodes(builder)
    replicas = builder["inference.replicas"] * orchestrators
    used = num_gpus_needed(
        place(ranks=ranks, replicas=replicas, tensor_parallel_size=size, separate=separate, gpus_per_node=per_node)
    )
    used += starts_teacher(builder.original) and num_gpus > used
    if used < num_gpus:
        builder.warnings.append(
            f"{num_gpus - used} of {num_gpus} GPUs are not used: the trainer uses {'one' if ranks == 1 else ranks} "
            "(training.ranks)"
        )


def _plan_nodes(builder: PlanBuilder, tensor_parallel_size: int) -> int:
    """Derive `cluster.gpus_per_node`; 0 on one node."""
    if (nodes := builder.original.cluster.nodes) == 1:
        return 0
    per_node = builder.facts.num_gpus // nodes
    builder.derive_auto("cluster.gpus_per_node", per_node, "as many as this host has")
    if 0 < per_node < tensor_parallel_size:
        raise ConfigError(
            f"inference.tensor_parallel_size = {tensor_parallel_size} is more than cluster.gpus_per_node = {per_node}, "
            "and an engine is on one node: lower it"
        )
    return per_node


def _check_nodes(builder: PlanBuilder) -> None:
    """Raise ConfigError where a node has nothing to do, or trainer and engines share the GPUs of several."""
    nodes, assigned = builder.original.cluster.nodes, assign(builder.config())
    if nodes > 1 and not builder.on_cpu and assigned.engines and builder["run.placement"] == "shared":
        raise ConfigError(f'cluster.nodes = {nodes} needs run.placement = "separate": set it, or use one node')
    if idle := sorted({*range(nodes)} - {*assigned.ranks, *assigned.engines}):
        raise ConfigError(
            f"cluster.nodes = {nodes} leaves {', '.join(map(node_name, idle))} without a rank or engine: lower it, or "
            "raise training.ranks or inference.replicas"
        )


def _ranks_share_gpus(builder: PlanBuilder, needed: int) -> bool:
    """Whether ranks and engine workers share one copy of the weights because there are no further GPUs."""
    training, placement = builder.original.training, builder["run.placement"]
    if training.ranks == 1 or not needed or builder.on_cpu or builder["weights.bridge"] != "auto":
        return False
    is_short = placement == "shared" or (placement == "auto" and builder.facts.num_gpus < training.ranks + needed)
    return is_short and builder.original.lora is None and not one_copy_obstacle(builder)


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
"""vLLM engine arguments under which its weights have another layout than the trainer's, or are not all on this GPU."""


def one_copy_obstacle(builder: PlanBuilder) -> str:
    """Why trainer and engine cannot share one copy of the weights on the GPUs that they share, as far as settings and
    facts say; empty if they can. Whether vLLM's layout of this model allows it is checked once it has loaded."""
    config, size = builder.original, builder["inference.tensor_parallel_size"]
    ranks, replicas, options = config.training.ranks, builder["inference.replicas"], config.inference.options
    own = next((name for name in options if name.replace("-", "_") in OWN_LAYOUT), "")
    if config.lora is not None and config.lora.dora:
        return "DoRA's engine gets the whole model with the adapter in it"
    if (nodes := config.cluster.nodes) > 1:
        return f"the trainer is on cluster.nodes = {nodes}"
    if (orchestrators := config.run.orchestrators) > 1:
        return f"each of run.orchestrators = {orchestrators} has engines of its own"
    if isinstance(replicas, int) and replicas > 1:
        return f"each of inference.replicas = {replicas} engines has weights of its own"
    if ranks != size:
        return f"there are training.ranks = {ranks} and inference.tensor_parallel_size = {size}, which must be equal"
    if ranks > 1 and builder.facts.model.num_experts > 1:
        return "ranks and workers divide a layer's experts in different ways"
    if config.inference.sleep is True:
        return "inference.sleep = true frees the engine's weights"
    if config.weights.delta:
        return "weights.delta = true sends what changed"
    return f"with inference.options.{own} vLLM has the weights otherwise than the trainer" if own else ""


def _plan_replicas(builder: PlanBuilder, separate: bool) -> None:
    prompts, size = builder["training.prompts_per_batch"], builder["inference.tensor_parallel_size"]
    num_gpus, ranks = builder.facts.num_gpus, builder.original.training.ranks
    orchestrators = builder.original.run.orchestrators
    if starts_teacher(builder.original) and num_gpus > size + ranks:
        num_gpus -= 1
    nodes, per_node = builder.original.cluster.nodes, builder["cluster.gpus_per_node"]
    fit = replicas_that_fit(
        num_gpus, ranks=ranks, tensor_parallel_size=size, gpus_per_node=per_node if nodes > 1 else 0
    )
    beside = fit // orchestrators if separate else 1
    count, reason = beside, f"as many as the {num_gpus - ranks} GPUs hold that are left to them"
    if orchestrators > 1:
        reason += f", of each of {orchestrators} orchestrators"
    if not separate:
        where = "one GPU" if ranks == 1 else f"the same {ranks} GPUs"
        reason = "one engine uses all cores" if builder.on_cpu else f"trainer and engine are on {where}"
        if nodes > ranks:
            count, reason = nodes - ranks, "one for each node without a rank"
    elif isinstance(builder.original.algorithm, SFTConfig) and not rolls_out(builder.original):
        count, reason = 1, "the engine has only evaluations to make"
    elif prompts // orchestrators < beside:
        count = prompts // orchestrators
        reason = f"a batch has {prompts} prompts, and each is one engine's"
    builder.derive_auto("inference.replicas", count, reason)


def for_each(orchestrators: int) -> str:
    """Part of a sentence on what several orchestrators have each; empty for one."""
    return f"for each of run.orchestrators = {orchestrators} " if orchestrators > 1 else ""


def teacher_bytes(builder: PlanBuilder, *, trainer: bool) -> int:
    """Bytes that the teacher takes of the trainer's GPU (`trainer`) or of the engine's; 0 if it is elsewhere."""
    if not starts_teacher(builder.original):
        return 0
    teacher = planned_teacher(planned_config(builder.config()), builder.facts)
    if teacher is None or teacher.has_own_gpu or (trainer and builder["run.placement"] == "separate"):
        return 0
    return teacher.total
