"""Turns a config and measured facts into a plan: every `auto` replaced by a value, each with its reason.

Guarantees: pure, so `slipstream plan` shows the values of `slipstream train`. `Plan.config` has no `auto`, and only
keys without an effect (under SFT without evaluation the engine's) have the inert defaults of `config.planned`. A run
impossible on this machine, model or data is a ConfigError here, before any process starts. `run.folder` is left to the
launcher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from slipstream.config import Derived, PlannedConfig, RLConfig, RunConfig, SFTConfig
from slipstream.config.bounds import keyed
from slipstream.config.checks import inapplicable, probe_limits, reason_against, warmup_problems
from slipstream.config.parse.messages import show
from slipstream.config.recipes import choices
from slipstream.config.traits import drawn_at, uses_critic, uses_engine, usual_reward_workers
from slipstream.errors import ConfigError
from slipstream.plan.bridge import plan_beside, plan_bridge
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.deadlines import plan_deadlines, retry_notes
from slipstream.plan.decided import planned_config, undecided
from slipstream.plan.facts import SMALL_MODEL_PARAMETERS, Facts
from slipstream.plan.lengths import plan_lengths
from slipstream.plan.memory.cards import HAS_BFLOAT16, device_of, has_bfloat16
from slipstream.plan.memory.checkpoints import checkpoint_notes, plan_checkpoints
from slipstream.plan.memory.split import (
    plan_compile,
    plan_cpu_cache,
    plan_gpu_memory,
    plan_micro_batch,
    time_notes,
)
from slipstream.plan.memory.teacher import TeacherMemory, check_top_k, planned_teacher
from slipstream.plan.memory.trainer import needs_reference
from slipstream.plan.nodes import with_all_nodes
from slipstream.plan.placement import plan_placement
from slipstream.plan.preflight.disk import check_disk
from slipstream.plan.rank_layout import check_context_parallel
from slipstream.plan.servers import check_server_bridge, plan_server_sizes, plan_servers
from slipstream.plan.summary import (
    Note,
    batch_notes,
    delta_warnings,
    held_warnings,
    lora_warnings,
    memory_notes,
    memory_refusals,
    node_notes,
    parameter_notes,
    rl_warnings,
    rotary_notes,
    rotary_warnings,
    trainer_bytes,
)
from slipstream.plan.times import engine_time_notes
from slipstream.plan.tool_parser import check_template, plan_tool_parser
from slipstream.plan.vllm_version import plan_patches
from slipstream.shared_kernels import CAPABILITY

MAX_SEQUENCES = 1_000_000
MAX_STEPS = 100_000_000
LARGE, TINY = 500e6, 1e6
NOT_IN_FLOAT16 = ("Gemma2", "Gemma3", "Glm4")
"""Beginnings of names of architectures; vLLM refuses these in float16."""
CLOSER = {
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM"),
    *("Qwen3MoeForCausalLM", "Gemma3ForCausalLM"),
}
"""Architectures with logits of the head alone, and with layers added up in norms in vLLM: float32 there is the same
on both sides."""
REPLAYED = {"Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"}
"""Architectures with routers known to `trainer/experts/replay.py`."""
SHARED = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"}
"""Architectures with layers known to `trainer/model/shared_layers.py`."""
SHOWN_VLLM = "0.26"
"""The vLLM of their run on a GPU."""
ENGINE_VOCABULARY = 64
"""vLLM pads vocabularies to a multiple of it."""
PROBE_WARN, STOP_FACTOR = {"float32": 0.01, "float16": 0.02, "bfloat16": 0.05}, 4.0
"""Mean differences of log-probabilities: pretrained models had up to 0.001, 0.003 and 0.04 (BENCHMARKS.md)."""
SHARED_WARN = 0.001
"""The same under `model.shared_kernels`: there was none; sampling at another temperature rounds once more."""
CHANGES_KERNELS = (
    *("attention_backend", "attention_config", "block_size", "compilation_config", "cudagraph_capture_sizes"),
    *("disable_cascade_attn", "hf_overrides", "max_cudagraph_capture_size"),
    *("kv_cache_dtype", "model_impl", "quantization", "speculative_config"),
)
"""Options of vLLM that change an engine's computation."""
LONGEST_SHARED = 8192
"""Tokens of a context."""
SHARED_HEADS = (64, 128, 256)
"""Head sizes with the same blocks of keys in FlashAttention 3 with a paged KV cache (the engine) and without (the
trainer). For 65 to 96 and 129 to 192 the blocks differ; the rest is untried."""
RATES = {"rl": (1e-6, 1e-3), "sft": (1e-5, 4e-3), "lora": (1e-4, 1e-2)}
"""At `LARGE` and at `TINY` parameters. The first are usual: for GRPO in TRL and verl, for SFT, and for LoRA, with
ten times the rate of full fine-tuning and more ("LoRA Without Regret", Thinking Machines, 2025). The second are
the tutorial's and the tests'."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    config: PlannedConfig
    derived: tuple[Derived, ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]
    trainer_bytes: int
    """Most memory of the trainer, without contexts and workspaces; the metric `memory/trainer_planned_gib`."""
    teacher: TeacherMemory | None = None
    """The start of the teacher's engine, if the teacher is ours."""
    notices: tuple[str, ...] = ()
    """Sentences on earlier runs; no value depends on them."""
    refusals: tuple[str, ...] = ()
    """Why the run does not fit into this machine's memory, or on its disk."""
    device: str = ""
    """Its device, for people."""

    def checked(self) -> Plan:
        """The same. Raises `DoesNotFit` with it if it must not run."""
        if self.refusals:
            raise DoesNotFit(self)
        return self


class DoesNotFit(ConfigError):
    """The run needs more memory, or disk, than there is."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.refusals[0])
        self.plan = plan
        """All of it, to be shown."""


_CORES_OF_AGENTS = 2
"""One of them plays agents: engine, orchestrator and trainer need the others."""


def make_plan(config: RunConfig, facts: Facts) -> Plan:
    """Derive every `auto` of `config` from `facts`. Raises ConfigError for an impossible run, `DoesNotFit` included."""
    return draft_plan(config, facts).checked()


def draft_plan(config: RunConfig, facts: Facts) -> Plan:
    """The same, also for a run that does not fit; raises ConfigError if nothing can be planned."""
    facts = with_all_nodes(config, facts)
    builder = PlanBuilder(config, facts)
    plan_servers(builder)
    _plan_dtype(builder)
    obstacle = builder.facts.model.unpackable
    packed = "several sequences in a row leave less of it empty"
    builder.derive_auto("training.packing", not obstacle, f"the model has {obstacle}" if obstacle else packed)
    _plan_batch(builder)
    _plan_steps(builder)
    _plan_evaluation(builder)
    plan_placement(builder)
    check_context_parallel(builder.config(), builder.facts)
    _plan_lora(builder)
    _plan_learning_rate(builder)
    _plan_precision(builder)
    plan_compile(builder)
    check_template(builder)
    if uses_engine(config):
        _plan_engine(builder)
    elif facts.model.original_context:
        length = facts.data.max_sequence_tokens or 0
        builder.derive_auto(
            "inference.max_model_len", length, "the longest conversation: it decides the rotary factors"
        )
    _plan_agreement(builder)
    if isinstance(config.algorithm, RLConfig):
        without_effect = inapplicable(config)
        for choice in choices(config.algorithm):
            if (path := f"algorithm.{choice.name}") not in without_effect:
                builder.derive(path, choice.value, choice.reason)
    if uses_critic(config):
        builder.derive_auto(
            "critic.learning_rate", builder["training.learning_rate"], "the same as training.learning_rate"
        )
    plan_micro_batch(builder)
    if config.environment is not None and (config.data is None or not isinstance(config.algorithm, SFTConfig)):
        made = facts.data.num_requested_tasks or facts.data.num_train_tasks
        builder.derive_auto("environment.num_train_tasks", made, "all that the environment has, or enough of them")
    if config.environment is not None and uses_engine(config):
        builder.derive_auto("environment.max_turns", facts.data.max_turns, "what the environment says")
        builder.derive_auto("environment.processes", *_processes(builder))
        builder.derive_auto("environment.reward_workers", *_reward_workers(facts.num_cpus, config.run.orchestrators))
    builder.derive_auto("run.threads", facts.num_cpus, "all cores that this process may use")
    if config.evaluation is not None and uses_engine(config):
        temperature, source = drawn_at(config)
        builder.derive_auto("evaluation.temperature", temperature, f"the same as {source}.temperature")
    plan_checkpoints(builder)
    planned = _decided(builder.config())
    if isinstance(planned.algorithm, RLConfig):
        builder.warnings += rl_warnings(planned, planned.algorithm)
    builder.warnings += [*delta_warnings(planned), *rotary_warnings(planned, facts), *lora_warnings(facts)]
    disk, full = check_disk(planned, facts)
    builder.warnings += [*disk, *held_warnings(facts)]
    notes = (
        *rotary_notes(planned, facts),
        *parameter_notes(facts),
        *node_notes(planned),
        *batch_notes(planned, facts),
        *retry_notes(planned),
        *memory_notes(planned, facts),
        *checkpoint_notes(planned, facts),
        *time_notes(planned, facts),
        *engine_time_notes(planned, facts),
    )
    builder.refusals += [*full, *memory_refusals(planned, facts)]
    check_top_k(planned, facts)
    return Plan(
        planned,
        tuple(builder.derived),
        notes,
        tuple(builder.warnings),
        trainer_bytes(planned, facts),
        planned_teacher(planned, facts),
        facts.notices,
        tuple(builder.refusals),
        device_of(facts),
    )


def _plan_engine(builder: PlanBuilder) -> None:
    """Derive the engine's settings."""
    plan_lengths(builder)
    plan_bridge(builder)
    check_server_bridge(builder)
    _plan_order(builder)
    if builder.facts.servers:
        plan_server_sizes(builder)
    else:
        (plan_cpu_cache if builder.on_cpu else plan_gpu_memory)(builder)
        builder.derive_auto(
            "inference.enforce_eager",
            builder.on_cpu,
            "on a CPU compiling takes longer than it saves" if builder.on_cpu else "CUDA graphs pay on a GPU",
        )
        plan_patches(builder)
    if isinstance(builder.original.algorithm, RLConfig):
        plan_beside(builder)
    plan_tool_parser(builder)
    plan_deadlines(builder)


def _processes(builder: PlanBuilder) -> tuple[int, str]:
    """The number of processes for episodes, of each orchestrator, and the reason."""
    most, why = builder.facts.data.processes
    if most <= 1:
        return most, why
    num_cpus, orchestrators = builder.facts.num_cpus, builder.original.run.orchestrators
    number = max(1, min(most, num_cpus // _CORES_OF_AGENTS // orchestrators, builder["inference.max_num_seqs"]))
    divided = f", divided among {orchestrators} orchestrators" if orchestrators > 1 else ""
    return number, f"{why}: a process for {_CORES_OF_AGENTS} of {num_cpus} cores, at most {most}{divided}"


def _reward_workers(num_cpus: int, orchestrators: int) -> tuple[int, str]:
    """How many of each orchestrator, and why."""
    workers = max(1, usual_reward_workers(num_cpus) // orchestrators)
    if orchestrators > 1:
        return workers, f"one less than the cores, divided among {orchestrators} orchestrators"
    return workers, "one less than the cores, which the rest needs, too"


def _decided(config: RunConfig) -> PlannedConfig:
    """`config` for the run's processes: no key with an effect may be left, as it would become a default unseen."""
    reasons = inapplicable(config)
    if left := [path for path in undecided(config) if not reason_against(path, reasons)]:
        raise AssertionError(f"the plan has decided nothing for {', '.join(left)}")
    return planned_config(config)


def _plan_evaluation(builder: PlanBuilder) -> None:
    """Lower `evaluation.num_tasks` to the number of held-out tasks."""
    evaluation, there = builder.original.evaluation, builder.facts.data.num_eval_tasks
    if evaluation is not None and there is not None and there < evaluation.num_tasks:
        reason = f"lowered from {evaluation.num_tasks}: there are only {there} held-out tasks that can be used"
        builder.derive("evaluation.num_tasks", there, reason)


def _plan_dtype(builder: PlanBuilder) -> None:
    if builder["model.dtype"] == "float16" and builder.facts.model.architecture.startswith(NOT_IN_FLOAT16):
        raise ConfigError(
            f"{builder.facts.model.architecture} computes values that float16 cannot hold, and vLLM refuses it: set "
            'model.dtype = "bfloat16"'
        )
    num_parameters = builder.facts.model.num_parameters
    size = f"{num_parameters / 1e6:.3g} M parameters"
    if builder.original.training.optimizer == "adamw_bf16":
        builder.derive_auto("model.dtype", "bfloat16", "the type that training.optimizer rounds to")
    elif not has_bfloat16(builder.facts):
        capped = builder.facts.model.architecture.startswith(NOT_IN_FLOAT16)
        builder.derive_auto("model.dtype", "float32" if capped else "float16", "this GPU has no bfloat16")
    elif builder.on_cpu and num_parameters < SMALL_MODEL_PARAMETERS:
        builder.derive_auto("model.dtype", "float32", f"on a CPU {size} are few: full precision costs little")
    else:
        builder.derive_auto("model.dtype", "bfloat16", f"half the memory of float32 for {size}")
    if builder["model.dtype"] == "bfloat16" and not has_bfloat16(builder.facts):
        raise ConfigError(
            f'model.dtype = "bfloat16" needs a GPU of compute capability {HAS_BFLOAT16}, and this one has '
            f'{builder.facts.gpu_capability}: use "float16", with an optimizer other than adamw_bf16'
        )


def _plan_precision(builder: PlanBuilder) -> None:
    """Derive the settings for float32 in both trainer and engine."""
    config, found = builder.original, builder.facts.model.architecture
    if isinstance(config.algorithm, SFTConfig):
        head = against = "no engine has to agree with the trainer"
    elif builder["model.dtype"] == "float32":
        head = against = "all is in float32"
    elif builder.on_cpu:
        head = against = "not by default on a CPU"
    elif config.training.ranks > 1:
        head = against = "not tried on GPUs over training.ranks"
    elif found not in CLOSER:
        head = against = f"not tried for {found or 'a model with code of its own'}"
    else:
        head = ""
        against = "the engine does not compile its layers" if config.inference.enforce_eager is True else ""
    closer = "brings the log-probabilities of trainer and engine closer, at little cost"
    builder.derive_auto("model.fp32_head", not head, head or closer)
    builder.derive_auto("model.fp32_residual", not against, against or closer)
    _plan_experts(builder)


def _plan_experts(builder: PlanBuilder) -> None:
    """Derive `model.replay_experts`. Raises ConfigError if it is requested and impossible."""
    config, model, engine = builder.original, builder.facts.model, builder.facts.engine
    against = unasked = ""
    if isinstance(config.algorithm, SFTConfig):
        against = "training is not on the tokens of an engine as they were generated"
    elif model.architecture not in REPLAYED and not model.num_experts:
        against = "the model has no experts"
    elif model.architecture not in REPLAYED:
        against = f"not tried for {model.architecture or 'a model with code of its own'}"
    elif config.training.ranks > 1:
        against = "not tried over training.ranks"
    elif builder.on_cpu and config.inference.tensor_parallel_size > 1:
        against = "on a CPU vLLM returns them from a single worker only (inference.tensor_parallel_size)"
    elif engine is not None and not engine.returns_experts:
        against = f"vLLM {engine.version or 'of an unknown version'} does not return them"
    elif builder["model.dtype"] == "float32":
        unasked = "all is in float32, where engine and trainer choose the same experts"
    elif not builder.on_cpu:
        unasked = "not tried on a GPU"
    elif config.sampling.stop:
        unasked = "completions that end with a string of sampling.stop come without them"
    if against and config.model.replay_experts is True:
        raise ConfigError(f"model.replay_experts = true is not possible ({against}): set it to false")
    reason = against or unasked or "where engine and trainer choose other experts, rounding becomes a jump"
    builder.derive_auto("model.replay_experts", not (against or unasked), reason)


def _plan_agreement(builder: PlanBuilder) -> None:
    """Derive `model.shared_kernels`, and the allowed distance of trainer and engine. Raises ConfigError if the kernels
    are requested, also by `run.exact`, and cannot be shared."""
    config, against = builder.original, _against_shared_kernels(builder)
    if against and (config.run.exact or config.model.shared_kernels is True):
        asked, remedy = ("run.exact", "remove it") if config.run.exact else ("model.shared_kernels", "set it to false")
        raise ConfigError(f"{asked} = true is not possible ({against}): {remedy}")
    unasked = "" if against or config.run.exact else _against_sharing_unasked(builder)
    equal = "at temperature 1 trainer and engine then have the same log-probabilities bit for bit, at little cost"
    builder.derive_auto("model.shared_kernels", not (against or unasked), against or unasked or equal)
    if uses_engine(config):
        _plan_probe(builder)


def _plan_probe(builder: PlanBuilder) -> None:
    """Derive the limits of the probe."""
    dtype = builder["model.dtype"]
    limit, noise = PROBE_WARN[dtype], f"rounding in {dtype} makes less, and more is a sign of another computation"
    if builder["model.shared_kernels"]:
        builder.derive_auto("weights.probe_warn", SHARED_WARN, "model.shared_kernels: there should be no difference")
    builder.derive_auto("weights.probe_warn", limit, noise)
    warn = builder["weights.probe_warn"]
    if builder["model.shared_kernels"] and warn < limit:
        builder.derive_auto("weights.probe_stop", STOP_FACTOR * limit, "as without model.shared_kernels")
    builder.derive_auto("weights.probe_stop", STOP_FACTOR * warn, "four times weights.probe_warn")
    if (stop := builder["weights.probe_stop"]) <= warn:
        raise ConfigError(probe_limits(warn, stop))


def _against_shared_kernels(builder: PlanBuilder) -> str:
    """Why trainer and engine cannot compute with the same kernels; empty if they can."""
    config, facts, model = builder.original, builder.facts, builder.facts.model
    longest = builder["inference.max_model_len"] if uses_engine(config) else 0
    needed = {"model.dtype": "bfloat16", "model.fp32_head": True, "model.fp32_residual": True, "training.packing": True,
              "training.ranks": 1, "inference.tensor_parallel_size": 1}  # fmt: skip
    missed = [f"{path} = {show(builder[path])}" for path, value in needed.items() if builder[path] != value]
    options = [name for name in config.inference.options if name.replace("-", "_") in CHANGES_KERNELS]
    has_kernels = facts.engine is not None and facts.engine.has_flash3
    reasons = (
        (isinstance(config.algorithm, SFTConfig), "no engine has to agree with the trainer"),
        (facts.gpu_capability != CAPABILITY, "it takes GPUs of compute capability 9: H100, H200"),
        (not has_kernels, "no vLLM is installed here that brings FlashAttention 3"),
        (config.lora is not None, "not tried with LoRA adapters"),
        (model.architecture not in SHARED, f"not tried for {model.architecture or 'a model with code of its own'}"),
        (bool(missed), f"not tried with {', '.join(missed)}"),
        (bool(options), f"inference.options has {', '.join(options)}, which it depends on"),
        (model.head_dim not in SHARED_HEADS, f"not tried with attention heads of {model.head_dim} numbers"),
        (model.vocab_size % ENGINE_VOCABULARY != 0, f"the engine pads a vocabulary of {model.vocab_size} tokens"),
        (model.rotary != "default", f"not tried with rotary embeddings of the type {model.rotary}"),
        (0 < model.window < longest, f"contexts of up to {longest} tokens are longer than its sliding window"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def _against_sharing_unasked(builder: PlanBuilder) -> str:
    """Why they do so only on request; empty if by default."""
    config, longest, engine = builder.original, builder["inference.max_model_len"], builder.facts.engine
    if engine is not None and not engine.version.startswith(SHOWN_VLLM):
        return f"not tried on a GPU with vLLM {engine.version or 'of an unknown version'}"
    if longest > LONGEST_SHARED:
        return f"in contexts of up to {longest} tokens it slows a few long completions: attention in one piece"
    return "not tried with a teacher or a critic" if config.teacher is not None or uses_critic(config) else ""


def _plan_lora(builder: PlanBuilder) -> None:
    """Derive `lora.target_modules` from "all-linear"."""
    adapter, lora = builder.facts.adapter, builder.original.lora
    if adapter is not None and lora is not None and lora.target_modules == "all-linear":
        reason = "all-linear: every linear layer but the output head"
        if adapter.unreached:
            reason += f", and so not {', '.join(adapter.unreached)}"
        builder.derive("lora.target_modules", adapter.target_modules, reason)


def _plan_batch(builder: PlanBuilder) -> None:
    num_tasks, training = builder.facts.data.num_train_tasks, builder.original.training
    if num_tasks < 1:
        raise ConfigError("the training data has no tasks: check environment.settings or data.path")
    if isinstance(builder.original.algorithm, SFTConfig) and builder.facts.data.max_sequence_tokens is None:
        raise ConfigError("sft trains on gold answers, and the environment has none: use grpo, or set data.path")
    group = builder.original.algorithm.group_size if isinstance(builder.original.algorithm, RLConfig) else 1
    if (sequences := min(num_tasks, training.prompts_per_batch) * group) > MAX_SEQUENCES:
        raise ConfigError(
            f"a batch of {sequences // group} prompts x algorithm.group_size = {group} has {sequences} sequences, more "
            f"than {MAX_SEQUENCES}: lower training.prompts_per_batch or algorithm.group_size"
        )
    if training.prompts_per_batch <= num_tasks:
        return
    prompts = "one prompt" if num_tasks == 1 else f"{num_tasks} prompts"
    reason = f"lowered from {training.prompts_per_batch}: the training data has only {prompts}"
    if num_tasks % training.updates_per_batch:
        whole = num_tasks - num_tasks % training.updates_per_batch
        raise ConfigError(
            f"training.prompts_per_batch = {training.prompts_per_batch} is more than the {num_tasks} prompts that the "
            f"training data has, which training.updates_per_batch = {training.updates_per_batch} does not divide: use "
            + (f"training.prompts_per_batch = {whole}" if whole else f"training.updates_per_batch = {num_tasks}")
        )
    builder.derive("training.prompts_per_batch", num_tasks, reason)
    builder.warnings.append(f"training.prompts_per_batch was {reason}")


def _plan_steps(builder: PlanBuilder) -> None:
    """Derive `training.steps` from `training.epochs`."""
    training, num_tasks = builder.original.training, builder.facts.data.num_train_tasks
    if training.steps is not None or training.epochs is None:
        return
    size = builder["training.prompts_per_batch"]
    # As it is written: 0.07 * 100 is above 7 in floating point.
    steps = math.ceil(Fraction(str(training.epochs)) * num_tasks / size)
    passes = "1 pass" if training.epochs == 1 else f"{training.epochs:g} passes"
    if steps > MAX_STEPS:
        raise ConfigError(
            f"training.epochs = {training.epochs:g} over {num_tasks} training prompts in batches of {size} are {steps} "
            f"steps, more than {MAX_STEPS}: lower it, or raise training.prompts_per_batch"
        )
    builder.derive("training.steps", steps, f"{passes} over {num_tasks} training prompts in batches of {size}")
    for _, sentence in keyed(warmup_problems(builder.original, steps)):
        raise ConfigError(sentence)


def _plan_order(builder: PlanBuilder) -> None:
    """Derive `training.order`, after the bridge. Raises ConfigError if the engine cannot take weights in flight."""
    staleness, restarts = builder.original.training.staleness, builder["weights.bridge"] == "restart"
    if builder["training.order"] == "ready" and restarts:
        raise ConfigError(
            'training.order = "ready" generates for several batches at once, and weights.bridge = "restart" ends the '
            "engine at every update: use another bridge, or the order of the data"
        )
    if not staleness:  # each batch is its own groups
        return
    if restarts:
        builder.derive_auto("training.order", "data", "the engine ends at every update")
        if part := builder.original.training.overprovision:
            raise ConfigError(
                f"training.overprovision = {part:g} has the groups that finish last cancelled, and weights.bridge = "
                '"restart" needs the order of the data: use another bridge, or remove it'
            )
    else:
        reason = f"groups for {staleness + 1} batches at once: the engine need not wait for the longest of each"
        builder.derive_auto("training.order", "ready", reason)


def _plan_learning_rate(builder: PlanBuilder) -> None:
    """Derive `training.learning_rate`."""
    algorithm = builder.original.algorithm
    is_sft = isinstance(algorithm, SFTConfig)
    kind = "sft" if is_sft and not needs_reference(builder.original) else "rl"
    learning = f"[{next(iter(builder.original.methods))}]" if is_sft and kind == "rl" else "reinforcement learning"
    reasons = {"rl": f"usual in {learning} of all parameters", "sft": "usual in SFT of all parameters"}
    if builder.original.lora is not None:
        kind, reasons["lora"] = "lora", "usual for LoRA"
    num_parameters = builder.facts.model.num_decoding
    rate = learning_rate(kind, num_parameters)
    reason = reasons[kind]
    if rate != RATES[kind][0]:
        reason = f"{RATES[kind][0]:g} is {reason}; more for {num_parameters / 1e6:.3g} M parameters, fewer than 500 M"
    builder.derive_auto("training.learning_rate", rate, reason)


def learning_rate(kind: str, num_parameters: int) -> float:
    """The learning rate for `kind`, a key of `RATES`, to two digits: log-log interpolation between its two sizes."""
    usual, highest = RATES[kind]
    part = math.log(LARGE / max(1, num_parameters)) / math.log(LARGE / TINY)
    return float(f"{usual * (highest / usual) ** min(1.0, max(0.0, part)):.1e}")
