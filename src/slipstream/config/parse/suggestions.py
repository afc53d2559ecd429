"""Suggests the setting that an unknown key was most likely meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from slipstream.config.parse.keys import all_keys, keys_of, sections

OTHER_NAMES: dict[str, str] = {
    name: key
    for key, names in {
        "model.path": "model_name model_name_or_path",
        "model.dtype": "torch_dtype bf16 fp16",
        "model.revision": "model_revision",
        "data.path": "train_files dataset dataset_name",
        "data.split": "dataset_train_split",
        "data.eval_fraction": "val_set_size test_size",
        "data.max_length": "sequence_len seq_len cutoff_len",
        "preferences.loss": "pair_loss",
        "algorithm.train_on": "train_on_inputs assistant_only_loss completion_only_loss",
        "training.steps": "max_steps num_steps total_training_steps",
        "training.epochs": "num_train_epochs num_epochs total_epochs",
        "training.learning_rate": "lr actor_lr",
        "training.schedule": "lr_scheduler_type lr_scheduler",
        "training.warmup_steps": "warmup_ratio lr_warmup_steps",
        "training.optimizer": "optim",
        "training.max_grad_norm": "grad_clip max_norm gradient_clipping",
        "training.prompts_per_batch": "batch_size train_batch_size per_device_train_batch_size "
        "gradient_accumulation_steps generation_batch_size",
        "training.updates_per_batch": "ppo_mini_batch_size steps_per_generation",
        "training.epochs_per_batch": "num_iterations ppo_epochs",
        "training.micro_batch_tokens": "micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
        "training.ranks": "nproc_per_node n_gpus_per_node num_processes",
        "training.staleness": "max_async_level max_off_policy_steps",
        "training.compile": "torch_compile use_torch_compile",
        "algorithm.kind": "adv_estimator algorithm_type",
        "algorithm.group_size": "num_generations rollouts_per_example n_samples_per_prompt n",
        "algorithm.kl_coef": "beta kl_loss_coef kl_beta",
        "algorithm.clip_low": "epsilon clip_ratio cliprange",
        "algorithm.clip_high": "epsilon_high",
        "algorithm.arguments.clip_dual": "clip_ratio_c",
        "algorithm.normalize": "loss_type loss_agg_mode",
        "algorithm.arguments.train_on_truncated": "mask_truncated_completions overlong_filtering",
        "critic.value_clip": "cliprange_value",
        "critic.gae_lambda": "lam",
        "sampling.max_tokens": "max_completion_length max_new_tokens max_response_length",
        "environment.settings": "reward_funcs",
        "environment.processes": "apart",
        "inference.max_model_len": "max_seq_length max_prompt_length vllm_max_model_length",
        "inference.tensor_parallel_size": "tensor_model_parallel_size",
        "inference.replicas": "data_parallel_size",
        "evaluation.every": "eval_steps test_freq eval_strategy",
        "evaluation.at_start": "eval_on_start val_before_train",
        "evaluation.samples_per_task": "num_generations_eval",
        "run.folder": "output_dir default_local_dir",
        "run.checkpoint_every": "save_steps save_freq",
        "run.keep_checkpoints": "save_total_limit",
        "run.sinks": "report_to logger",
        "run.placement": "vllm_mode",
        "lora.rank": "lora_r r use_peft",
    }.items()
    for name in names.split()
}
"""Names in TRL, verl and prime-rl that resemble none of ours, and former names; and the setting to use
(docs/coming-from.md)."""


FORMER_KINDS = {"dpo": "sigmoid", "kto": "kto"}
"""Former choices of `algorithm.kind`, and the loss of [preferences] in their place."""


def suggestion(path: str, last: str = "") -> str:
    """The remedy for the unknown `path`: the nearest valid key, or the list of keys in its section. `last`: the last
    part of a longer path that begins with `path`."""
    section, _, name = path.rpartition(".")
    known = all_keys()
    if ours := OTHER_NAMES.get((last or name).replace("-", "_")):
        return f"did you mean {ours}?"
    known_sections = [*dict.fromkeys(key.section for key in known.values())]
    if section and section not in known_sections:
        near = closest(section, known_sections)
        if near is not None:
            candidate = f"{near}.{name}"
            return f"did you mean {candidate}?" if candidate in known else f"did you mean the section [{near}]?"
    elsewhere = [key.path for key in known.values() if key.name == name]
    if elsewhere:
        return f"did you mean {_likeliest(elsewhere)}?"
    if section in known_sections:
        own = [key.name for key in keys_of(section)]
        near = closest(name, own)
        if near is not None:
            return f"did you mean {section}.{near}?"
        return f"[{section}] has {', '.join(own)}"
    near = closest(path, sections())
    if near is not None:
        return f"did you mean the section [{near}]?"
    names = [key.name for key in known.values()]
    near = closest(name, names)
    if near is not None:
        return f"did you mean {_likeliest([key.path for key in known.values() if key.name == near])}?"
    return f"the sections are {', '.join(sections())}"


def _likeliest(paths: Sequence[str]) -> str:
    """Of several keys with one name, the most common meaning of the name without a section."""
    first = ("model", "training", "run", "sampling")
    return min(paths, key=lambda path: first.index(section) if (section := path.split(".")[0]) in first else len(first))


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that `name` is most likely a misspelling of; None if none is close."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return close[0] if close else None
