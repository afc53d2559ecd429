"""Aliases: names that TRL, the Hugging Face Trainer and verl have for settings.

A name in `TAKEN` has the meaning and unit of one of our settings and is read as that setting. A name in `REFUSED` has
no equal here; its sentence says what to set instead. Both are recognised at the top level of a run file and on the
command line; a name without dots also in the section of our setting. `NEAR` holds further names, for suggestions only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.config.parse.keys import all_keys, flatten, sections
from slipstream.config.parse.messages import located, shortened
from slipstream.config.parse.run_file import RunFile

_TRL: dict[str, str] = {
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "max_steps": "training.steps",
    "num_train_epochs": "training.epochs",
    "learning_rate": "training.learning_rate",
    "lr": "training.learning_rate",
    "lr_scheduler_type": "training.schedule",
    "warmup_steps": "training.warmup_steps",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "max_grad_norm": "training.max_grad_norm",
    "gradient_checkpointing": "training.gradient_checkpointing",
    "torch_compile": "training.compile",
    "num_iterations": "training.epochs_per_batch",
    "num_generations": "algorithm.group_size",
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "vllm_importance_sampling_cap": "algorithm.importance_cap",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "vllm_max_model_length": "inference.max_model_len",
    "vllm_gpu_memory_utilization": "inference.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "inference.tensor_parallel_size",
    "vllm_enable_sleep_mode": "inference.sleep",
    "eval_steps": "evaluation.every",
    "eval_on_start": "evaluation.at_start",
    "num_generations_eval": "evaluation.samples_per_task",
    "output_dir": "run.folder",
    "save_steps": "run.checkpoint_every",
    "report_to": "run.sinks",
    "run_name": "run.name",
    "project": "run.project",
    "seed": "run.seed",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.target_modules",
    "use_dora": "lora.dora",
}
_VERL: dict[str, str] = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "training.gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "actor_rollout_ref.model.lora_alpha": "lora.alpha",
    "actor_rollout_ref.actor.optim.lr": "training.learning_rate",
    "actor_rollout_ref.actor.grad_clip": "training.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "training.epochs_per_batch",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.clip_dual",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "sampling.top_p",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "inference.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "inference.tensor_parallel_size",
    "actor_rollout_ref.rollout.max_num_seqs": "inference.max_num_seqs",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluation.samples_per_task",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluation.temperature",
    "actor_rollout_ref.rollout.max_model_len": "inference.max_model_len",
    "actor_rollout_ref.rollout.enforce_eager": "inference.enforce_eager",
    "algorithm.gamma": "critic.gamma",
    "algorithm.lam": "critic.gae_lambda",
    "critic.optim.lr": "critic.learning_rate",
    "critic.cliprange_value": "critic.value_clip",
    "data.train_batch_size": "training.prompts_per_batch",
    "data.max_response_length": "sampling.max_tokens",
    "trainer.total_training_steps": "training.steps",
    "trainer.total_epochs": "training.epochs",
    "trainer.default_local_dir": "run.folder",
    "trainer.save_freq": "run.checkpoint_every",
    "trainer.test_freq": "evaluation.every",
    "trainer.val_before_train": "evaluation.at_start",
    "trainer.project_name": "run.project",
    "trainer.experiment_name": "run.name",
}
TAKEN: dict[str, str] = _TRL | _VERL
"""An alias and the setting of ours that it is read as."""
ALSO = {"epsilon": "algorithm.clip_high"}
"""A second setting that an alias sets if nothing else does."""
REMARKS = {
    "max_steps": "the batches to train on, each of training.updates_per_batch optimizer steps",
    "num_train_epochs": "where the last batch of a pass is filled from the next one",
    "trainer.total_epochs": "where the last batch of a pass is filled from the next one",
    "epsilon": "and algorithm.clip_high where nothing else sets it",
    "epsilon_high": "the bound is 1 + clip_high, also under cispo, where TRL's bound is epsilon_high itself",
    "seed": "which seeds the order of the data and what the engine samples",
}
"""What the note on an alias adds after the name of our setting."""

_GPU_BATCH = (
    "it counts completions on one GPU: set training.prompts_per_batch to the prompts of a whole batch; "
    "training.micro_batch_tokens bounds the memory of a pass and is found by itself"
)
_MINI_BATCH = "set training.updates_per_batch to the number of optimizer steps that a batch is split into"
_PROMPT_LENGTH = "prompt and completion are bounded together: set inference.max_model_len"
_TRAIN_ON = 'set algorithm.train_on: "last" or "all" assistant turns, or "everything", prompts too'
_RANKS = "set training.ranks to the number of GPUs that train, and inference.tensor_parallel_size or inference.replicas"
_TASKS = 'set environment.name = "rows" and environment.settings.path to a file, or data.path under sft'
_REWARDS = "rewards are the environment's: set environment.settings.reward, or environment.name to your own class"
_KL = 'set algorithm.kl_coef, where 0 means none, and algorithm.kl_in = "loss" or "reward"'
REFUSED: dict[str, str] = {
    "per_device_train_batch_size": _GPU_BATCH,
    "gradient_accumulation_steps": "gradients are accumulated over a whole batch by themselves: set "
    "training.prompts_per_batch to the prompts of a batch",
    "generation_batch_size": "it counts completions: set training.prompts_per_batch to it divided by "
    "algorithm.group_size",
    "steps_per_generation": f"{_MINI_BATCH}, which is steps_per_generation / gradient_accumulation_steps",
    "warmup_ratio": "set training.warmup_steps, in optimizer steps",
    "optim": 'set training.optimizer: "adamw", "adamw_bf16", "adamw_8bit", "adamw_paged", "adamw_paged_8bit" or "muon"',
    "bf16": 'set model.dtype = "bfloat16"; training.optimizer = "adamw" keeps float32 master weights',
    "fp16": 'set model.dtype = "float16"; training.optimizer = "adamw" keeps float32 master weights',
    "loss_type": 'set algorithm.normalize ("sequence" for grpo, "token" for dapo, "constant" for dr_grpo); '
    'algorithm.loss is the clipping ("cispo", "gspo", ...)',
    "importance_sampling_level": 'set algorithm.loss = "clip" for token, "gspo" for sequence',
    "mask_truncated_completions": "set algorithm.train_on_truncated to the opposite",
    "max_prompt_length": _PROMPT_LENGTH,
    "max_length": 'set data.max_length, and data.too_long = "truncate" to cut as TRL does; inference.max_model_len '
    "bounds what is generated",
    "assistant_only_loss": _TRAIN_ON,
    "completion_only_loss": _TRAIN_ON,
    "eval_strategy": "set evaluation.every to the steps between evaluations",
    "use_vllm": "completions always come from vLLM: remove it",
    "vllm_mode": 'set run.placement: "shared" for colocate, "separate" for GPUs of the engine\'s own',
    "save_total_limit": "set run.keep_checkpoints, and run.keep_weights for weights without optimizer state",
    "logging_steps": "every step is logged: remove it",
    "use_peft": "the section [lora] turns LoRA on: set lora.rank",
    "lora_dropout": "adapters are trained without dropout: remove it",
    "reward_funcs": _REWARDS,
    "reward_weights": _REWARDS,
    "dataset_name": _TASKS,
    "actor_rollout_ref.actor.ppo_mini_batch_size": f"{_MINI_BATCH}: data.train_batch_size / ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _GPU_BATCH,
    "actor_rollout_ref.actor.clip_ratio": "set algorithm.clip_low and algorithm.clip_high",
    "actor_rollout_ref.actor.loss_agg_mode": 'set algorithm.normalize: "token" for token-mean, "sequence" for '
    'seq-mean-token-mean, "constant" for seq-mean-token-sum-norm',
    "actor_rollout_ref.actor.use_kl_loss": _KL,
    "actor_rollout_ref.actor.kl_loss_coef": _KL,
    "actor_rollout_ref.actor.kl_loss_type": 'set algorithm.kl_estimator: "k1", "k2" or "k3"',
    "actor_rollout_ref.rollout.name": "completions always come from vLLM: remove it",
    "algorithm.adv_estimator": 'set algorithm.kind to a recipe: "grpo", "rloo", "reinforce_pp" or "ppo" (for gae)',
    "algorithm.use_kl_in_reward": _KL,
    "algorithm.kl_ctrl.kl_coef": _KL,
    "data.train_files": _TASKS,
    "data.val_files": "set environment.settings.eval_path",
    "data.max_prompt_length": _PROMPT_LENGTH,
    "trainer.n_gpus_per_node": _RANKS,
    "trainer.nnodes": "a run has one machine: remove it",
    "trainer.logger": 'set run.sinks: a list of "tensorboard", "wandb" or "trackio"; metrics always go to the terminal',
}
"""A name without an equal setting here, and what to set instead."""
NEAR: dict[str, str] = {
    other: key
    for key, names in {
        "model.path": "model_name pretrained_model_name_or_path",
        "model.dtype": "torch_dtype",
        "data.path": "train_files dataset train_file",
        "data.split": "dataset_train_split",
        "data.subset": "dataset_config dataset_config_name",
        "data.eval_path": "eval_dataset eval_file validation_file",
        "data.eval_split": "dataset_test_split",
        "data.eval_fraction": "val_set_size val_size validation_split test_size eval_size",
        "data.max_length": "sequence_len cutoff_len",
        "data.too_long": "excess_length_strategy truncation_mode",
        "algorithm.train_on": "train_on_inputs",
        "training.learning_rate": "actor_lr",
        "training.steps": "num_steps total_training_steps",
        "training.epochs": "total_epochs num_epochs epochs",
        "training.prompts_per_batch": "batch_size train_batch_size global_batch_size rollout_batch_size",
        "training.updates_per_batch": "ppo_mini_batch_size mini_batch_size num_mini_batches",
        "training.epochs_per_batch": "ppo_epochs num_ppo_epochs",
        "training.micro_batch_tokens": "micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
        "training.max_grad_norm": "grad_clip clip_grad max_norm gradient_clipping",
        "training.schedule": "lr_scheduler scheduler",
        "training.warmup_steps": "lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps",
        "training.ranks": "num_processes nproc_per_node n_gpus_per_node num_gpus world_size",
        "training.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
        "training.compile": "use_torch_compile",
        "algorithm.kind": "algorithm_type",
        "algorithm.group_size": "rollout_n rollouts_per_example n_samples_per_prompt",
        "algorithm.kl_coef": "kl_loss_coef kl_beta init_kl_coef",
        "algorithm.kl_estimator": "kl_loss_type kl_penalty",
        "algorithm.clip_low": "clip_ratio clip_ratio_low cliprange",
        "algorithm.clip_high": "clip_ratio_high",
        "algorithm.clip_dual": "clip_ratio_c",
        "algorithm.entropy_coef": "entropy_coeff entropy_bonus",
        "algorithm.normalize": "loss_agg_mode loss_aggregation",
        "algorithm.advantage": "adv_estimator advantage_estimator",
        "algorithm.importance_cap": "rollout_is_threshold tis_imp_ratio_cap",
        "algorithm.importance_sampling": "vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is",
        "algorithm.train_on_truncated": "overlong_filtering",
        "critic.value_clip": "cliprange_value",
        "critic.gae_lambda": "lam gae_lam lambd",
        "sampling.max_tokens": "max_response_length response_length",
        "inference.max_model_len": "max_seq_length max_seq_len context_length",
        "inference.tensor_parallel_size": "tensor_model_parallel_size",
        "inference.sleep": "enable_sleep_mode free_cache_engine",
        "inference.replicas": "num_engines data_parallel_size",
        "evaluation.every": "test_freq eval_interval",
        "evaluation.at_start": "val_before_train",
        "run.folder": "default_local_dir save_dir",
        "run.checkpoint_every": "save_freq save_interval",
        "run.keep_checkpoints": "max_actor_ckpt_to_keep",
        "run.async_checkpoints": "async_save",
        "run.sinks": "logger",
        "lora.path": "lora_adapter_path",
    }.items()
    for other in names.split()
} | {name: key for name, key in TAKEN.items() if "." not in name}
"""A name of another tool and the setting that it most likely means."""
FOREIGN_SECTIONS = {name.split(".")[0] for name in (*_VERL, *REFUSED) if "." in name} - set(sections())
"""Sections that only another tool has."""


def alias_of(path: str) -> str:
    """The entry of `TAKEN` or `REFUSED` that `path` (`name`, `section.name`, ...) matches; empty if none."""
    if path in all_keys():
        return ""
    if path in TAKEN or path in REFUSED:
        return path
    section, _, name = path.partition(".")
    is_here = TAKEN.get(name, "").startswith(f"{section}.") or (name in REFUSED and "." not in name)
    return name if section in sections() and is_here else ""


def refusal(name: str) -> str:
    """The reason for refusing an entry of `REFUSED`; follows the name in a message."""
    return f"is not a setting of Slipstream; {REFUSED[name]}"


def note(shown: str, name: str, place: str = "") -> str:
    """The note that the alias `name`, written as `shown`, is read as our setting."""
    remark = f", {REMARKS[name]}" if name in REMARKS else ""
    return located(f"{shown}: in Slipstream {TAKEN[name]}{remark}", place)


def converted(name: str, value: Any) -> Any:
    """Converts the value of an alias to the type of our setting."""
    if name == "report_to" and isinstance(value, str):
        return [] if value == "none" else [value]
    return value


def translated(file: RunFile) -> tuple[RunFile, list[str], list[str]]:
    """Replaces the aliases in a run file by our names. Returns the new run file, the notes on aliases that were
    replaced, and a sentence for each that is refused."""
    tables, lines = copy.deepcopy(file.tables), dict(file.lines)
    notes: list[str] = []
    problems: list[str] = []
    taken: dict[str, str] = {}
    for path, value in flatten((), file.tables):
        name = alias_of(path)
        if not name:
            continue
        _remove(tables, path.split("."))
        where = file.where(path)
        if name in REFUSED:
            problems.append(located(f"{shortened(path)} {refusal(name)}", where))
            continue
        key = TAKEN[name]
        if other := taken.get(key) or _conflict(file.tables, key):
            problems.append(located(f"{path} and {other} are the same setting: remove one of them", where))
            continue
        taken[key] = path
        notes.append(note(path, name, where))
        for target in (key, ALSO.get(name, key)):
            if target == key or not (_conflict(file.tables, target) or _has_alias(file.tables, target)):
                _set(tables, target, converted(name, value))
                lines[target] = lines.get(path, 1)
        lines.pop(path, None)
    return replace(file, tables=tables, lines=lines), notes, problems


def _conflict(tables: Mapping[str, Any], key: str) -> str:
    """The key of the file that sets `key` itself, or the section that is not a table; empty if neither."""
    section, _, name = key.partition(".")
    content = tables.get(section, {})
    if not isinstance(content, dict):
        return section
    return key if name in content else ""


def _has_alias(tables: Mapping[str, Any], key: str) -> bool:
    return any(TAKEN.get(alias_of(path)) == key for path, _ in flatten((), tables))


def _set(tables: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    tables.setdefault(section, {})[name] = value


def _remove(tables: dict[str, Any], names: Sequence[str]) -> None:
    """Remove the leaf, and each table that is empty without it."""
    if len(names) > 1:
        _remove(tables[names[0]], names[1:])
        if tables[names[0]]:
            return
    del tables[names[0]]
