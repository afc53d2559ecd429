"""Which keys a run file may have, what each must be in words, and the nearest one to a misspelt key.

Everything is read off the schema, so a new field is known here without another line. Knows nothing of
files, flags or values that depend on each other.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from slipstream.config.schema import RunConfig

Config = TypeVar("Config", bound=RunConfig)
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
NEVER_REACHED = 1e6
COMMON_NAMES = {
    other: key
    for key, names in {
        "model.path": "model_name_or_path model_name pretrained_model_name_or_path",
        "model.dtype": "torch_dtype bf16 fp16",
        "data.path": "train_files dataset_name dataset train_file",
        "training.learning_rate": "lr actor_lr",
        "training.steps": "max_steps num_steps total_training_steps num_train_epochs total_epochs num_epochs epochs",
        "training.prompts_per_batch": "batch_size train_batch_size global_batch_size rollout_batch_size",
        "training.updates_per_batch": "ppo_mini_batch_size mini_batch_size num_mini_batches steps_per_generation",
        "training.epochs_per_batch": "ppo_epochs num_iterations num_ppo_epochs",
        "training.micro_batch_tokens": "per_device_train_batch_size gradient_accumulation_steps micro_batch_size"
        " ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
        "training.max_grad_norm": "grad_clip clip_grad max_norm gradient_clipping",
        "training.schedule": "lr_scheduler_type lr_scheduler scheduler",
        "training.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps",
        "training.optimizer": "optim",
        "training.ranks": "num_processes nproc_per_node n_gpus_per_node num_gpus world_size",
        "training.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
        "training.compile": "torch_compile use_torch_compile",
        "algorithm.kind": "loss_type algorithm_type",
        "algorithm.group_size": "num_generations rollout_n rollouts_per_example n_samples_per_prompt",
        "algorithm.kl_coef": "beta kl_loss_coef kl_beta init_kl_coef",
        "algorithm.kl_estimator": "kl_loss_type kl_penalty",
        "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low cliprange",
        "algorithm.clip_high": "epsilon_high clip_ratio_high",
        "algorithm.clip_dual": "clip_ratio_c",
        "algorithm.entropy_coef": "entropy_coeff entropy_bonus",
        "algorithm.normalize": "loss_agg_mode loss_aggregation",
        "algorithm.advantage": "adv_estimator advantage_estimator",
        "algorithm.importance_cap": "vllm_importance_sampling_cap rollout_is_threshold tis_imp_ratio_cap",
        "algorithm.importance_sampling": "vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is",
        "algorithm.train_on_truncated": "mask_truncated_completions overlong_filtering",
        "critic.value_clip": "cliprange_value",
        "critic.gae_lambda": "lam gae_lam lambd",
        "sampling.max_tokens": "max_new_tokens max_completion_length max_response_length response_length",
        "inference.max_model_len": "max_prompt_length max_seq_length max_seq_len max_length context_length",
        "inference.gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "inference.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
        "inference.sleep": "vllm_enable_sleep_mode enable_sleep_mode free_cache_engine",
        "inference.replicas": "num_engines data_parallel_size",
        "evaluation.every": "eval_steps test_freq eval_interval",
        "evaluation.at_start": "eval_on_start val_before_train",
        "run.folder": "output_dir default_local_dir save_dir",
        "run.checkpoint_every": "save_steps save_freq save_interval",
        "run.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep",
        "run.async_checkpoints": "async_save",
        "run.sinks": "report_to logger",
        "lora.rank": "lora_rank lora_r",
        "lora.alpha": "lora_alpha",
        "lora.target_modules": "lora_target_modules",
        "lora.dora": "use_dora",
        "lora.path": "lora_adapter_path",
    }.items()
    for other in names.split()
}
"""What other trainers call the same thing."""


@dataclass(frozen=True)
class Key:
    """One leaf of the tree."""

    section: str
    name: str
    requirement: str
    """What the value must be, as in "use ..."."""
    required: bool
    is_flag: bool = False
    """Takes true and false, so `--section.name` alone means true."""
    is_text: bool = False
    """Takes text only: a value from the command line is never read as a number."""
    is_free: bool = False
    """A table whose keys are not ours."""
    choices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    """The algorithms that have this key; empty: not a matter of the algorithm."""

    @property
    def path(self) -> str:
        """`section.name`."""
        return f"{self.section}.{self.name}"


def all_keys() -> Mapping[str, Key]:
    """Every key by its path `section.name`, in the schema's order."""
    return _keys()


def sections() -> tuple[str, ...]:
    """The names of all sections."""
    return tuple(RunConfig.model_fields)


def optional_sections() -> tuple[str, ...]:
    """Sections that `name = false` turns off."""
    return tuple(
        name
        for name, field in RunConfig.model_fields.items()
        if not field.is_required() and field.get_default() is not None and "None" in str(field.annotation)
    )


def keys_of(section: str, kind: str | None = None) -> list[Key]:
    """The keys of a section; of the algorithm section only those of `kind`, if given."""
    return [
        key
        for key in all_keys().values()
        if key.section == section and (kind is None or not key.kinds or kind in key.kinds)
    ]


def suggestion(path: str) -> str:
    """How to go on from the unknown `path`: the nearest valid key, or all that there are in its section."""
    section, _, name = path.rpartition(".")
    known = all_keys()
    if section and section not in sections():
        near = closest(section, sections())
        if near is not None:
            candidate = f"{near}.{name}"
            return f"did you mean {candidate}?" if candidate in known else f"did you mean the section [{near}]?"
    if name in COMMON_NAMES:
        return f"did you mean {COMMON_NAMES[name]}?"
    elsewhere = [key.path for key in known.values() if key.name == name]
    if elsewhere:
        return f"did you mean {_likeliest(elsewhere)}?"
    if section in sections():
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
    """Of keys of one name the one that most people mean who name no section."""
    first = ("model", "training", "run", "sampling")
    return min(paths, key=lambda path: first.index(section) if (section := path.split(".")[0]) in first else len(first))


def leaves(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every leaf's path and value; keys inside free tables count as leaves, absent sections have none."""
    for section in sections():
        model = getattr(config, section)
        if model is None:
            continue
        for name in type(model).model_fields:
            value = getattr(model, name)
            if all_keys()[f"{section}.{name}"].is_free:
                yield from flatten((section, name), value)
            else:
                yield f"{section}.{name}", value


def flatten(path: Sequence[str], value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves below `value` as (dotted path as TOML writes it, value); an empty table is a leaf."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flatten((*path, name), inner)
    else:
        yield dotted(path), value


def dotted(path: Sequence[str]) -> str:
    """`path` as a TOML key: `section.key`, with quotes where a name needs them."""
    return ".".join(name if BARE_KEY.fullmatch(name) else quoted(name) for name in path)


def quoted(text: str) -> str:
    """`text` as a TOML string, on one line."""
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    escaped = (
        short.get(character) or (f"\\u{ord(character):04X}" if is_control(character) else character)
        for character in text
    )
    return f'"{"".join(escaped)}"'


def is_control(character: str) -> bool:
    """Whether a TOML file should not have the character as it is."""
    # U+2028 and its like are legal, but some readers of lines would break there.
    return ord(character) < 0x20 or 0x7F <= ord(character) <= 0x9F or character in "\u2028\u2029"


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with some `section.key` replaced, validated again; raises pydantic's error on a bad value."""
    data = {name: model.model_dump() for name in sections() if (model := getattr(config, name)) is not None}
    for name in optional_sections():
        data.setdefault(name, None)
    for path, value in values.items():
        section, _, key = path.partition(".")
        data[section][key] = value
    return type(config).model_validate(data)


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """The one of `candidates` that `name` is most likely a misspelling of."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return close[0] if close else None


@cache
def _keys() -> dict[str, Key]:
    schema = RunConfig.model_json_schema()
    keys: dict[str, Key] = {}
    for section, reference in schema["properties"].items():
        models = [schema["$defs"][name] for name in _references(reference)]
        for model in models:
            kinds = _kinds(model) if section == "algorithm" else ()
            for name, spec in model["properties"].items():
                path = f"{section}.{name}"
                before = keys[path].kinds if path in keys else ()
                keys[path] = _key(section, name, spec, name in model.get("required", ()), (*before, *kinds))
    algorithms = [schema["$defs"][name] for name in _references(schema["properties"]["algorithm"])]
    every_kind = tuple(kind for model in algorithms for kind in _kinds(model))
    kind_words = join_choices(tuple(f'"{kind}"' for kind in every_kind))
    keys["algorithm.kind"] = Key("algorithm", "kind", kind_words, required=True, is_text=True, choices=every_kind)
    return keys


def _kinds(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of algorithm that have this section, in the schema's order."""
    spec = model["properties"]["kind"]
    return tuple(spec.get("enum", (spec.get("const"),)))


def _references(spec: Mapping[str, Any]) -> list[str]:
    if "$ref" in spec:
        return [spec["$ref"].rsplit("/", 1)[-1]]
    return [name for part in spec.get("anyOf", spec.get("oneOf", ())) for name in _references(part)]


def _key(section: str, name: str, spec: Mapping[str, Any], required: bool, kinds: tuple[str, ...]) -> Key:
    parts = [part for part in spec.get("anyOf", (spec,)) if part.get("type") != "null"]
    types = {part.get("type") for part in parts}
    choices = tuple(choice for part in parts for choice in part.get("enum", [part.get("const")]) if choice)
    return Key(
        section,
        name,
        requirement=join_choices(tuple(word for part in parts for word in _words(part))),
        required=required,
        is_flag="boolean" in types,
        is_text=types == {"string"},
        is_free=types == {"object"},
        choices=choices,
        kinds=kinds,
    )


def _words(spec: Mapping[str, Any]) -> list[str]:
    """What one alternative of a JSON schema allows, in words."""
    if "const" in spec:
        return [f'"{spec["const"]}"']
    if "enum" in spec:
        return [f'"{choice}"' for choice in spec["enum"]]
    kind = spec["type"]
    plain = {
        "boolean": ["true", "false"],
        "object": ["a table of keys and values"],
        "array": [_list_words(spec.get("items", {}))],
        "string": ["a path" if spec.get("format") == "path" else "a text"],
    }
    if kind in plain:
        return plain[kind]
    bounds = [
        f"{words} {_plain(spec[name])}"
        for name, words in (
            ("exclusiveMinimum", "greater than"),
            ("minimum", "of at least"),
            ("exclusiveMaximum", "less than"),
            ("maximum", "at most"),
        )
        # A bound that only a slip of the keyboard reaches is told to who reached it.
        if name in spec and (name != "maximum" or spec[name] < NEVER_REACHED)
    ]
    noun = "whole number" if kind == "integer" else "number"
    if bounds == ["greater than 0"]:
        return [f"a positive {noun}"]
    return [f"a {noun} {' and '.join(bounds)}".rstrip()]


def _list_words(items: Mapping[str, Any]) -> str:
    choices = tuple(f'"{choice}"' for choice in items.get("enum", ()))
    return f"a list of {join_choices(choices)}" if choices else "a list of texts"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def join_choices(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
