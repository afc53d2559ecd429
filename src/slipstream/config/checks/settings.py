"""Checks settings against each other: contradictions, and settings without effect.

Pure functions of a config. Setting a key that `inapplicable` names is an error; its default is not. Checks that need
the model, the tasks or the machine are in `slipstream.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.config.addresses import key_variable_problem
from slipstream.config.atropos import NAME as ATROPOS
from slipstream.config.bounds import Problems, Rule, without_effect
from slipstream.config.checks.batches import batch_problems
from slipstream.config.checks.exact import exact_problems
from slipstream.config.checks.mixture_parts import mixture_inapplicable, mixture_problems
from slipstream.config.checks.processes import process_problems
from slipstream.config.parse.keys import keys_of
from slipstream.config.recipes import BUILT_IN, resolved
from slipstream.config.schema import RLConfig, RunConfig
from slipstream.config.sft import SFTConfig
from slipstream.config.traits import bridge_of, drawn_at, rolls_out, uses_critic, uses_engine

OPTIONS_WITH_OWN_KEY = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "inference.max_model_len",
    "max_num_seqs": "inference.max_num_seqs",
    "kv_cache_memory_bytes": "inference.kv_cache_gib",
    "gpu_memory_utilization": "inference.gpu_memory_utilization",
    "enforce_eager": "inference.enforce_eager",
    "tensor_parallel_size": "inference.tensor_parallel_size",
    "seed": "run.seed",
    "enable_lora": "lora.rank",
    "max_lora_rank": "lora.rank",
    "max_loras": "lora.rank",
    "lora_target_modules": "lora.target_modules",
}
"""vLLM's engine arguments that have a key of their own here."""
OPTIONS_FIXED = {
    "logprobs_mode": "log-probabilities must be those of the distribution that was sampled from",
    "generation_config": "the run file alone says how completions are drawn",
    "worker_extension_cls": "weights are verified through it",
    "enable_prefix_caching": "it is on, and emptied in every update",
    "disable_log_stats": "they would fill the engine's log",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}
"""vLLM's engine arguments that Slipstream sets itself, and why."""
_OF_ENGINES = (
    "sampling inference weights run.placement run.save_failures environment.max_turns environment.processes "
    "environment.reward_timeout_s environment.reward_workers environment.reward_concurrency "
    "environment.reward_memory_gib environment.reward_processes environment.tool_timeout_s "
    "environment.tool_concurrency environment.fresh_worker environment.user_namespace environment.max_reward_failures"
)
"""Sections and keys without an effect where nothing is generated."""
_OF_STARTED = (
    *("replicas", "tensor_parallel_size", "kv_cache_gib", "gpu_memory_utilization", "sleep", "enforce_eager"),
    *("patches", "options"),
)
"""Keys of [inference] for engines that the run starts."""
_OF_SINKS = {
    "sink_samples": {"tensorboard", "wandb", "trackio"},
    "project": {"wandb", "trackio"},
    "name": {"wandb", "trackio"},
    "entity": {"wandb"},
}
"""Keys of [run] and the sinks that use them."""


def inapplicable(config: RunConfig) -> dict[str, str]:
    """Keys (`section.key`) and whole sections (`section`) that have no effect in this config, each with the reason."""
    algorithm, environment, training, teacher = config.algorithm, config.environment, config.training, config.teacher
    has_fresh_workers = environment is not None and environment.fresh_worker
    labels = {"name"} if config.run.metrics_port is not None else set[str]()
    rules: list[Rule] = [
        (training.steps is not None, "training.epochs", "has no effect while training.steps is set"),
        (
            training.ranks == 1,
            "training.reshard training.rank_timeout_s",
            "has no effect while training.ranks is 1",
        ),
        (config.cluster.nodes == 1, "training.sharding", "has no effect while cluster.nodes is 1"),
        (
            has_fresh_workers,
            "environment.reward_concurrency environment.tool_concurrency",
            "has no effect with environment.fresh_worker: each has one call",
        ),
        (
            training.optimizer != "muon",
            "training.muon_momentum",
            'has no effect without training.optimizer = "muon"',
        ),
        (
            not config.model.train_tower,
            "training.tower_learning_rate",
            "has no effect while model.train_tower is false",
        ),
        (
            not uses_critic(config),
            "critic",
            'has no effect without algorithm.advantage = "gae", the recipe ppo',
        ),
        (
            bool(config.inference.servers),
            " ".join(("run.placement", *(f"inference.{name}" for name in _OF_STARTED))),
            "has no effect with inference.servers: they were started with other values",
        ),
        *(
            (
                users.isdisjoint(config.run.sinks) and name not in labels,
                f"run.{name}",
                f"has no effect without {' or '.join(sorted(users))} in run.sinks",
            )
            for name, users in _OF_SINKS.items()
        ),
        (
            teacher is not None and teacher.url is None,
            "teacher.name teacher.key_variable",
            "has no effect without teacher.url",
        ),
        (teacher is not None and not teacher.top_k, "teacher.jsd_beta", "has no effect without teacher.top_k"),
        (
            config.cluster.nodes == 1,
            " ".join(key.path for key in keys_of("cluster") if key.name != "nodes"),
            "has no effect while cluster.nodes is 1",
        ),
        (config.run.streams != "redis", "redis", 'has no effect without run.streams = "redis"'),
    ]
    found = without_effect(rules) | mixture_inapplicable(config)
    if config.method is not None and not isinstance(algorithm, RLConfig):
        found |= config.method.inapplicable(config)
    further = _under_rl(config, algorithm) if isinstance(algorithm, RLConfig) else _under_sft(config)
    return found | without_effect(further)


def _under_rl(config: RunConfig, algorithm: RLConfig) -> list[Rule]:
    final, takes_turns = resolved(algorithm), not config.training.staleness
    has_adapters = config.lora is not None and bridge_of(config) in ("lora", "single_copy")
    return [
        (
            config.data is not None,
            "data",
            f"applies to sft, not to {algorithm.kind}, whose tasks come from the environment",
        ),
        (
            takes_turns and not config.training.overprovision,
            "training.order",
            "has no effect while training.staleness is 0: each batch is its own groups",
        ),
        (
            takes_turns,
            "weights.in_flight",
            "has no effect while training.staleness is 0, as no request runs in an update",
        ),
        (
            has_adapters and not takes_turns,
            "weights.in_flight",
            "has no effect on adapters: completions end with the one that they began with",
        ),
        (
            final.kl_coef == 0,
            "algorithm.arguments.kl_estimator algorithm.arguments.kl_in",
            "has no effect while algorithm.kl_coef is 0",
        ),
        (
            final.importance_sampling == "none",
            "algorithm.arguments.importance_cap algorithm.arguments.importance_floor",
            'has no effect while algorithm.importance_sampling is "none"',
        ),
        (
            final.loss == "policy_gradient",
            "algorithm.clip_low algorithm.clip_high",
            'has no effect on algorithm.loss = "policy_gradient", which clips nothing',
        ),
        (
            final.loss in BUILT_IN["loss"] and final.loss != "clip",
            "algorithm.arguments.clip_dual",
            f'has no effect on algorithm.loss = "{final.loss}", only on "clip"',
        ),
        (
            final.arguments.thinking_budget is None,
            "algorithm.arguments.thinking_penalty",
            "has no effect while algorithm.arguments.thinking_budget is not set",
        ),
        (
            final.arguments.overlong_buffer == 0,
            "algorithm.arguments.overlong_penalty",
            "has no effect while algorithm.arguments.overlong_buffer is 0",
        ),
    ]


def _under_sft(config: RunConfig) -> list[Rule]:
    evaluates, environment = config.evaluation is not None, config.environment
    has_both = config.data is not None and environment is not None
    reason = "without an environment to evaluate on" if evaluates else "while evaluation is off"
    return [
        (True, "run.max_steps_without_signal", "applies to grpo, not to sft"),
        (True, "teacher", "applies to distill and other recipes of reinforcement learning, not to sft"),
        (True, "run.streams", "applies to grpo, not to sft, whose batches no engine makes"),
        (
            not rolls_out(config),
            "run.save_samples",
            "applies to grpo, not to sft, which samples nothing to train on",
        ),
        (True, "run.keep_batches", "applies to grpo, not to sft, whose batches follow from data and seed"),
        (True, "weights.in_flight", "applies to grpo, not to sft, which samples nothing to train on"),
        (
            True,
            "evaluation.beside",
            "applies to grpo, not to sft, whose engine has nothing but evaluations to make",
        ),
        (
            True,
            "training.staleness training.order training.overprovision",
            "applies to grpo, not to sft, whose batches no engine makes",
        ),
        (has_both and not evaluates, "environment", "has no use when data is given and evaluation is off"),
        (has_both and evaluates, "environment.num_train_tasks", "has no effect when data is given"),
        (
            not evaluates,
            "data.eval_path data.eval_split data.eval_fraction",
            "has no effect while evaluation is off",
        ),
        (
            evaluates and environment is None,
            "evaluation.num_tasks evaluation.samples_per_task evaluation.temperature evaluation.threshold "
            "evaluation.seed evaluation.stop_at evaluation.patience",
            "has no effect without an environment, whose held-out tasks it is about",
        ),
        (not uses_engine(config), _OF_ENGINES, f"has no effect under sft {reason}"),
    ]


def reason_against(path: str, reasons: Mapping[str, str]) -> str:
    """Why the leaf `path`, or the section or table that contains it, has no effect; empty if it has one."""
    parts = path.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((reasons[name] for name in above if name in reasons), "")


def contradictions(config: RunConfig) -> Problems:
    """A sentence for each combination of settings that cannot be run."""
    yield from _sources(config)
    yield from mixture_problems(config)
    yield from _method(config)
    yield from batch_problems(config)
    yield from _engine(config)
    if config.evaluation is not None and config.environment is not None:
        yield from config.evaluation.problems(drawn_at(config)[0])
    if not config.model.path.strip():
        yield 'model.path = "" is empty: give a local folder or a hub id'
    yield from _variables(config)
    yield from _optimizer(config)
    if config.training.offload_activations and config.training.gradient_checkpointing in (False, "selective"):
        yield (
            "training.offload_activations moves the inputs of layers that are computed again: set "
            "training.gradient_checkpointing = true, or leave it out"
        )
    yield from _lora(config)
    yield from _critic(config)
    yield from _teacher(config)
    if isinstance(config.algorithm, RLConfig):
        yield from _policy_gradient(config.algorithm)
    yield from _delta(config)
    yield from process_problems(config)
    yield from exact_problems(config)
    warn, stop = config.weights.probe_warn, config.weights.probe_stop
    if warn != "auto" and stop != "auto" and stop <= warn:
        yield probe_limits(warn, stop)


def probe_limits(warn: float, stop: float) -> str:
    """Why these cannot be `weights.probe_warn` and `weights.probe_stop`."""
    return (
        f"weights.probe_stop = {stop:g} is not above weights.probe_warn = {warn:g}, so no warning could come first: "
        "raise probe_stop or lower probe_warn"
    )


def _method(config: RunConfig) -> Problems:
    """Checks of the section of a plug-in's method."""
    if config.method is None:
        return
    name, *others = config.methods
    if others:
        yield f"[{name}] and [{others[0]}] are both there, and a run trains by one method: remove one of them"
    elif isinstance(config.algorithm, RLConfig):
        yield (
            name,
            f"[{name}] applies to sft, not to {config.algorithm.kind}, which trains on rewards: set "
            'algorithm.kind = "sft", or remove it',
        )
    else:
        yield from config.method.problems(config)


def _policy_gradient(algorithm: RLConfig) -> Problems:
    if algorithm.old_policy == "engine" and algorithm.importance_sampling not in ("auto", "none"):
        yield (
            f'algorithm.importance_sampling = "{algorithm.importance_sampling}" corrects what algorithm.old_policy = '
            '"engine" has in its ratio already: remove one of the two'
        )
    final = resolved(algorithm)
    arguments = final.arguments
    if arguments.importance_floor >= arguments.importance_cap:
        yield (
            f"algorithm.arguments.importance_floor = {arguments.importance_floor:g} is not below "
            f"algorithm.arguments.importance_cap = {arguments.importance_cap:g}: lower the first or raise the second"
        )
    if algorithm.group_size == 1 and final.advantage in ("group_mean", "leave_one_out"):
        yield (
            f"algorithm.group_size = 1 must be at least 2: algorithm.advantage = {final.advantage!r} compares the "
            "completions of a prompt with each other"
        )
    if algorithm.group_size == 1 and final.max_refills:
        yield (
            f"algorithm.max_refills = {final.max_refills} draws further tasks until the rewards in each group differ, "
            "and groups of algorithm.group_size = 1 never do: set it to 0, or use larger groups"
        )
    if final.advantage == "none" and final.max_refills:
        yield (
            f"algorithm.max_refills = {final.max_refills} leaves out groups whose rewards agree, and under "
            'algorithm.advantage = "none" rewards teach nothing in any: set it to 0'
        )
    if arguments.length_penalty and arguments.reward_threshold is None:
        yield (
            f"algorithm.arguments.length_penalty = {arguments.length_penalty:g} favours short correct answers, but the "
            "reward that counts as correct is not set: set algorithm.arguments.reward_threshold"
        )
    if algorithm.credit == "turn" and arguments.reward_threshold is not None:
        yield (
            'algorithm.credit = "turn" needs the rewards themselves, and algorithm.arguments.reward_threshold replaces '
            "their sum by right or wrong: leave one of them out"
        )
    if arguments.best_of is not None and arguments.best_of > algorithm.group_size:
        yield (
            f"algorithm.arguments.best_of = {arguments.best_of} is more than algorithm.group_size = "
            f"{algorithm.group_size}: use less, or leave it out"
        )
    if arguments.clip_dual is not None and final.loss == "clip" and arguments.clip_dual <= 1 + final.clip_high:
        yield (
            f"algorithm.arguments.clip_dual = {arguments.clip_dual:g} is not above 1 + clip_high = "
            f"{1 + final.clip_high:g}: use 3, as is usual"
        )


def _critic(config: RunConfig) -> Problems:
    if not uses_critic(config):
        return
    assert isinstance(config.algorithm, RLConfig)
    scale = config.algorithm.scale_rewards
    if scale in ("std", "batch"):
        yield (
            f'algorithm.scale_rewards = "{scale}" divides by a spread of rewards, and a critic\'s advantages '
            '(algorithm.advantage = "gae") are not compared with other rewards: use "whiten" or "none"'
        )


def _teacher(config: RunConfig) -> Problems:
    teacher, algorithm = config.teacher, config.algorithm
    if not isinstance(algorithm, RLConfig):
        return
    if teacher is None:
        if resolved(algorithm).advantage == "none":
            yield (
                "algorithm.advantage",
                f'algorithm.kind = "{algorithm.kind}" with advantage "none" learns from a teacher only, and there is '
                "none: set teacher.path, or use another advantage",
            )
        return
    comes_from_outside = config.environment is not None and config.environment.name == ATROPOS
    if (teacher.path is None) == (teacher.url is None) and not (comes_from_outside and teacher.path is None):
        both = "both given" if teacher.path is not None else "neither given"
        yield f"teacher.path and teacher.url are {both}: give one of them"
    if teacher.path is not None and not teacher.path.strip():
        yield 'teacher.path = "" is empty: give a model folder or a hub id'
    if teacher.url is not None and not teacher.url.startswith(("http://", "https://")):
        yield f'teacher.url = "{teacher.url}" is no address: write http://host:8000/v1'
    if teacher.url is not None and config.sampling.temperature != 1.0:
        yield (
            f"sampling.temperature = {config.sampling.temperature:g} is not what a server at teacher.url scores at, "
            "which is always 1: use 1, or give the teacher as teacher.path"
        )
    if comes_from_outside and teacher.path is None and teacher.url is None and teacher.top_k:
        yield (
            f"teacher.top_k = {teacher.top_k} needs a teacher to ask, and groups of atropos bring log-probabilities of "
            "sampled tokens only: remove it"
        )
    if teacher.path == config.model.path and (config.lora is None or config.lora.path is None):
        yield f'teacher.path = "{teacher.path}" is the model itself, from which it can learn nothing: give another one'


def _variables(config: RunConfig) -> Problems:
    named: dict[str, tuple[str, ...]] = {}
    if config.environment is not None:
        named["environment.variables"] = config.environment.variables
    if config.teacher is not None:
        named["teacher.key_variable"] = (config.teacher.key_variable,)
    if config.redis is not None:
        named["redis.password_variable"] = (config.redis.password_variable,)
    for setting, names in named.items():
        if problem := key_variable_problem(setting, *names):
            yield problem


def _optimizer(config: RunConfig) -> Problems:
    if config.training.optimizer == "adamw_bf16" and config.model.dtype not in ("auto", "bfloat16"):
        yield (
            f'training.optimizer = "adamw_bf16" rounds weights to bfloat16, and model.dtype = "{config.model.dtype}" '
            'does not: use model.dtype = "bfloat16", or "adamw"'
        )


def _lora(config: RunConfig) -> Problems:
    lora = config.lora
    if lora is None:
        if config.weights.bridge == "lora":
            sentence = 'weights.bridge = "lora" needs an adapter to publish, and there is no [lora]: set lora.rank'
            yield sentence
        return
    if lora.dora and config.weights.bridge in ("lora", "single_copy"):
        yield (
            f'lora.dora = true needs an engine with the adapter merged, and weights.bridge = "{config.weights.bridge}" '
            'publishes it alone, which vLLM does not load: use weights.bridge = "disk", "broadcast" or "restart"'
        )
    if not isinstance(lora.target_modules, str) and not all(name.strip(". ") for name in lora.target_modules):
        yield "lora.target_modules has an empty name: remove it"
    if lora.path is not None and not lora.path.strip():
        yield 'lora.path = "" is empty: give the folder of an adapter, or leave it out'


def _sources(config: RunConfig) -> Problems:
    if config.environment is not None:
        if not config.environment.name.strip():
            remedy = "give reasoning_gym/<task> or path/to/file.py:Class"
            yield f'environment.name = "" is empty: {remedy}'
    elif not isinstance(config.algorithm, SFTConfig):
        yield (
            "algorithm.kind",
            f"environment.name is missing, and {config.algorithm.kind} needs tasks and rewards: "
            'set it in [environment], for example name = "reasoning_gym/spell_backward"',
        )
    elif config.data is None:
        yield (
            "algorithm.kind",
            "neither environment nor data is given, so there is nothing to train on: set environment.name or data.path",
        )
    elif config.evaluation is not None and not config.data.has_eval:
        yield (
            "evaluation needs an environment, and the run has no environment: remove [evaluation] or set "
            "environment.name, or data.eval_path for the loss of held-out rows"
        )
    if config.data is not None:
        yield from config.data.problems()


def _delta(config: RunConfig) -> Problems:
    """Checks that `weights.delta` is used with a bridge that sends whole models."""
    bridge = bridge_of(config)
    if not config.weights.delta or bridge in ("auto", "disk", "broadcast"):
        return
    reasons = {
        "restart": "starts the engine on whole versions",
        "single_copy": "moves no weights at all",
        "lora": "publishes the adapter alone, of which every element changes",
    }
    yield (
        f'weights.delta = true sends the changes of a whole model, and weights.bridge = "{bridge}" {reasons[bridge]}: '
        'remove it, or set weights.bridge to "disk" or "broadcast"'
    )


def _engine(config: RunConfig) -> Problems:
    sampling, inference = config.sampling, config.inference
    if inference.sleep is True and config.training.staleness:
        yield (
            "inference.sleep = true stops the engine while a batch is trained on, and training.staleness has it "
            "generate then: turn off one of them"
        )
    if inference.sleep is True and config.run.placement == "separate":
        yield (
            'inference.sleep = true frees the engine\'s GPU for the trainer, which run.placement = "separate" has on '
            "another: turn off one of them"
        )
    if "" in sampling.stop:
        yield "sampling.stop has an empty text, which would end every completion at once: remove it"
    if not isinstance(config.algorithm, SFTConfig) and sampling.top_k == 1:
        yield (
            "sampling.top_k = 1 draws the same completion for a whole group, which has no signal: "
            "use 0 for no limit, or more than 1"
        )
    longest, room = sampling.max_tokens, inference.max_model_len
    if room == 1:
        yield "inference.max_model_len = 1 holds no prompt with a completion: use at least 2"
    elif isinstance(longest, int) and isinstance(room, int) and longest >= room:
        yield (
            f"sampling.max_tokens = {longest} leaves no room for a prompt in "
            f"inference.max_model_len = {room}: lower the first or raise the second"
        )
    for name in inference.options:
        option = name.replace("-", "_")
        if own := OPTIONS_WITH_OWN_KEY.get(option):
            yield f"inference.options.{name} is a setting of Slipstream: set {own} instead"
        elif reason := OPTIONS_FIXED.get(option):
            yield f"inference.options.{name} is set by Slipstream ({reason}): remove it"


def foreign_key(name: str, kind: str) -> str:
    """The reason for refusing a key that only other algorithms than `kind` have; empty if `kind` has it."""
    for key in keys_of("algorithm"):
        if key.name == name and key.kinds and kind not in key.kinds:
            return f"applies to {key.kinds[0]}, not to {kind}: remove it"
    return ""
