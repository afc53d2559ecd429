"""Turns a config and measured facts into a plan: every `auto` replaced by a value, each with its reason.

Guarantees: pure, so `slipstream plan` shows what `slipstream train` does. In `Plan.config` no `auto` is left
in a key that has an effect (under sft without evaluation there is no engine, and its keys stay as they
are). What cannot work on this machine, model or data is a ConfigError here, before any process starts.
`run.folder` is left to the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from slipstream.config import Derived, RLConfig, RunConfig, with_values
from slipstream.config.checks import inapplicable
from slipstream.config.recipes import choices, resolved
from slipstream.config.traits import uses_critic, uses_engine, usual_reward_workers
from slipstream.errors import ConfigError
from slipstream.launch.plan.bridge import plan_bridge
from slipstream.launch.plan.builder import Draft
from slipstream.launch.plan.deadlines import plan_deadlines
from slipstream.launch.plan.facts import SMALL_MODEL_PARAMETERS, Facts, Peak
from slipstream.launch.plan.lengths import plan_lengths
from slipstream.launch.plan.memory.checkpoints import checkpoint_notes, disk_warnings, plan_checkpoints
from slipstream.launch.plan.memory.sizes import gib
from slipstream.launch.plan.memory.split import plan_card, plan_compile, plan_cpu_cache, plan_micro_batch
from slipstream.launch.plan.memory.teacher import TeacherRoom, planned_teacher
from slipstream.launch.plan.memory.trainer import WAYS, memory_settings, rows_of
from slipstream.launch.plan.placement import plan_placement
from slipstream.launch.plan.rates import plan_learning_rate
from slipstream.launch.plan.summary import (
    Note,
    batch_notes,
    check_memory,
    delta_warnings,
    lora_warnings,
    memory_notes,
    parameter_notes,
    rl_warnings,
    rotary_notes,
    rotary_warnings,
    trainer_bytes,
)
from slipstream.launch.plan.vllm_version import plan_patches
from slipstream.launch.recovery.resume import changed_settings

MAX_SEQUENCES = 1_000_000
_WAY = "training.gradient_checkpointing"


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
    memory_settings: dict[str, Any] = field(default_factory=dict)
    """What decides how much the trainer takes, beside the length of its rows."""
    peaks: tuple[Peak, ...] = ()
    """What earlier runs took, as far as the plan rests on it."""
    told: tuple[str, ...] = ()
    """What there is to say of what earlier runs took."""


def make_plan(config: RunConfig, facts: Facts) -> Plan:
    """Derive every `auto` of `config` from `facts`; raises ConfigError for what cannot work by what is counted. What
    earlier runs took refuses nothing, as they ran: it changes values, each with its reason, or warns."""
    counted = made = _derive(config, replace(facts, peaks=()))
    if not facts.peaks:
        return replace(counted, told=facts.peaks_told)
    problem = ""
    try:
        made = _derive(config, facts)
    except ConfigError as error:
        problem = f"the run may end for want of memory, as an earlier one took more than is counted: {error}"
    ways = [each.config.training.gradient_checkpointing for each in (made, counted)]
    values = {item.name: item.value for item in counted.derived}
    configs = _alternatives(config, made.config)
    correction = partial(_correction, configs, facts)
    derived = [
        item
        if values.get(item.name) == item.value
        # Layers are computed again because of what those took that were not.
        else replace(item, reason=f"{item.reason}; {correction(ways[:: -1 if item.name == _WAY else 1])}")
        for item in made.derived
    ]
    settings = [memory_settings(each, facts) | {_WAY: way} for each in configs for way in WAYS]
    return replace(
        made,
        derived=tuple(derived),
        warnings=(*made.warnings, *([problem] if problem else [])),
        peaks=tuple(peak for peak in facts.peaks if peak.settings in settings),
        told=(*facts.peaks_told, correction(ways) or _difference(made, facts)),
    )


def _alternatives(asked: RunConfig, made: RunConfig) -> list[RunConfig]:
    """What was planned, and where it was free to choose, what weights that are spread otherwise, or reach the engine by
    another bridge, would have been."""
    found = [made]
    if asked.training.ranks > 1 and asked.training.reshard == "auto":
        other = "layer" if made.training.reshard == "step" else "step"
        found.append(with_values(made, {"training.reshard": other}))
    if asked.weights.bridge == "auto" and made.weights.bridge in ("single_copy", "disk"):
        other = "disk" if made.weights.bridge == "single_copy" else "single_copy"
        found += [with_values(each, {"weights.bridge": other}) for each in found]
    return found


def _correction(configs: list[RunConfig], facts: Facts, ways: list[Any]) -> str:
    """The earlier run that says most of rows as the first of `configs` has them, in the first of these and of the
    `ways` in which one computed."""
    tokens = int(configs[0].training.micro_batch_tokens)
    each = (rows_of(config, facts, checkpointing=way).told(tokens) for config in configs for way in (*ways, *WAYS))
    return next(filter(None, each), "")


def _difference(made: Plan, facts: Facts) -> str:
    """Why nothing is corrected though there are earlier runs."""
    last = facts.peaks[-1]
    changes = changed_settings(dict(last.settings), made.memory_settings)
    more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
    return f"{last.run} took {gib(last.held)} and corrects nothing: {'; '.join(changes[:3])}{more}"


def _derive(config: RunConfig, facts: Facts) -> Plan:
    draft = Draft(config, facts)
    _plan_dtype(draft)
    _plan_batch(draft)
    _plan_evaluation(draft)
    plan_placement(draft)
    _plan_lora(draft)
    plan_learning_rate(draft)
    plan_compile(draft)
    if uses_engine(config):
        plan_lengths(draft)
        plan_bridge(draft)
        if draft.on_cpu:
            plan_cpu_cache(draft)
        else:
            plan_card(draft)
        draft.derive_auto(
            "inference.enforce_eager",
            draft.on_cpu,
            "on a CPU compiling takes longer than it saves" if draft.on_cpu else "CUDA graphs pay on a GPU",
        )
        plan_patches(draft)
        plan_deadlines(draft)
    elif facts.model.original_context:
        length = facts.data.max_sequence_tokens or 0
        draft.derive_auto("inference.max_model_len", length, "the longest conversation: it decides the rotary factors")
    if isinstance(config.algorithm, RLConfig):
        without_effect = inapplicable(config)
        for choice in choices(config.algorithm):
            if (path := f"algorithm.{choice.name}") not in without_effect:
                draft.derive(path, choice.value, choice.reason)
    if uses_critic(config):
        draft.derive_auto("critic.learning_rate", draft["training.learning_rate"], "the same as training.learning_rate")
    plan_micro_batch(draft)
    if config.environment is not None and (config.data is None or config.algorithm.kind != "sft"):
        made = facts.data.num_requested_tasks or facts.data.num_train_tasks
        draft.derive_auto("environment.num_train_tasks", made, "all that the environment has, or enough of them")
    if config.environment is not None and uses_engine(config):
        workers = usual_reward_workers(facts.num_cpus)
        draft.derive_auto("environment.reward_workers", workers, "one less than the cores, which the rest needs, too")
    draft.derive_auto("run.threads", facts.num_cpus, "all cores that this process may use")
    if config.evaluation is not None:
        draft.derive_auto("evaluation.temperature", config.sampling.temperature, "the same as sampling.temperature")
    plan_checkpoints(draft)
    planned = draft.config()
    if isinstance(planned.algorithm, RLConfig):
        draft.warnings += rl_warnings(planned, resolved(planned.algorithm))
    draft.warnings += [*delta_warnings(planned), *rotary_warnings(planned, facts), *lora_warnings(facts)]
    draft.warnings += disk_warnings(planned, facts)
    notes = (
        *rotary_notes(planned, facts),
        *parameter_notes(facts),
        *batch_notes(planned, facts),
        *memory_notes(planned, facts),
        *checkpoint_notes(planned, facts),
    )
    check_memory(planned, facts)
    return Plan(
        planned,
        tuple(draft.derived),
        notes,
        tuple(draft.warnings),
        trainer_bytes(planned, facts),
        planned_teacher(planned, facts),
        memory_settings(planned, facts),
    )


def _plan_evaluation(draft: Draft) -> None:
    """`evaluation.num_tasks`, where there are fewer."""
    evaluation, there = draft.original.evaluation, draft.facts.data.num_eval_tasks
    if evaluation is not None and there is not None and there < evaluation.num_tasks:
        reason = f"lowered from {evaluation.num_tasks}: there are only {there} held-out tasks that can be used"
        draft.derive("evaluation.num_tasks", there, reason)


def _plan_dtype(draft: Draft) -> None:
    num_parameters = draft.facts.model.num_parameters
    size = f"{num_parameters / 1e6:.3g} M parameters"
    if draft.original.training.optimizer == "adamw_bf16":
        draft.derive_auto("model.dtype", "bfloat16", "the type that training.optimizer rounds to")
    elif draft.on_cpu and num_parameters < SMALL_MODEL_PARAMETERS:
        draft.derive_auto("model.dtype", "float32", f"on a CPU {size} are few: full precision costs little")
    else:
        draft.derive_auto("model.dtype", "bfloat16", f"half the memory of float32 for {size}")


def _plan_lora(draft: Draft) -> None:
    """`lora.target_modules`."""
    adapter, lora = draft.facts.adapter, draft.original.lora
    if adapter is not None and lora is not None and lora.target_modules == "all-linear":
        reason = "all-linear: every linear layer but the output head"
        if adapter.unreached:
            reason += f", and so not {', '.join(adapter.unreached)}"
        draft.derive("lora.target_modules", adapter.target_modules, reason)


def _plan_batch(draft: Draft) -> None:
    num_tasks, training = draft.facts.data.num_train_tasks, draft.original.training
    if num_tasks < 1:
        raise ConfigError("the training data has no tasks: check environment.settings or data.path")
    if draft.original.algorithm.kind == "sft" and draft.facts.data.max_sequence_tokens is None:
        raise ConfigError("sft trains on gold answers, and the environment has none: use grpo, or set data.path")
    group = draft.original.algorithm.group_size if isinstance(draft.original.algorithm, RLConfig) else 1
    if (sequences := min(num_tasks, training.prompts_per_batch) * group) > MAX_SEQUENCES:
        raise ConfigError(
            f"a batch of {sequences // group} prompts x algorithm.group_size = {group} has {sequences} sequences, more "
            f"than {MAX_SEQUENCES}: lower training.prompts_per_batch or algorithm.group_size"
        )
    if training.prompts_per_batch <= num_tasks:
        return
    reason = f"lowered from {training.prompts_per_batch}: the training data has only {num_tasks} prompts"
    if num_tasks % training.updates_per_batch:
        whole = num_tasks - num_tasks % training.updates_per_batch
        raise ConfigError(
            f"training.prompts_per_batch = {training.prompts_per_batch} is more than the {num_tasks} prompts that the "
            f"training data has, which training.updates_per_batch = {training.updates_per_batch} does not divide: use "
            + (f"training.prompts_per_batch = {whole}" if whole else f"training.updates_per_batch = {num_tasks}")
        )
    draft.derive("training.prompts_per_batch", num_tasks, reason)
    draft.warnings.append(f"training.prompts_per_batch was {reason}")
