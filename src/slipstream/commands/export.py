"""Exports from a checkpoint what can be deployed: a model, an adapter, or an adapter merged into its base."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.plan.deployable import base_folder, run_settings, weights_folder
from slipstream.trainer.checkpoints.checkpoint import damage
from slipstream.trainer.checkpoints.manifest import MANIFEST
from slipstream.weights.adapter_folder import (
    adapted_modules,
    changes_nothing,
    is_adapter_folder,
    read_adapter_config,
    read_adapter_tensors,
    renamed,
)
from slipstream.weights.model_files import whole_folder, write_model_folder
from slipstream.weights.usage import copy_usage


def export(checkpoint: Path, out: Path, *, merged: bool = False, trust_remote_code: bool = False) -> Path:
    """Write the weights of `checkpoint` (its folder, the `weights` in it, or a run's folder) to the new folder `out`.

    `merged`: an adapter is merged into its base model, in the adapter's dtype; with `trust_remote_code` the base's
    folder may run its own Python code. Raises ConfigError, and writes nothing, when there is nothing to export, `out`
    exists, or a file of the checkpoint is not as it was written.
    """
    source = weights_folder(checkpoint)
    is_adapter = is_adapter_folder(source)
    if out.exists():
        raise ConfigError(f"{out} exists already: give a new folder")
    if merged and not is_adapter:
        raise ConfigError(f"{checkpoint} holds a whole model, so there is nothing to merge: leave out --merged")
    is_checkpoint = source.name == "weights" and (source.parent / MANIFEST).is_file()
    if is_checkpoint and (reason := damage(source.parent, whole="weights/")):
        raise ConfigError(f"checkpoint {source.parent} is damaged ({reason}): use another one of its run")
    if merged:
        _write_merged(source, out, trust_remote_code)
        return out
    with whole_folder(out, durable=True) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
    return out


def remarks(checkpoint: Path, *, merged: bool = False) -> list[str]:
    """Facts about an export of `checkpoint` that its folder does not say, for its user."""
    source = weights_folder(checkpoint)
    settings, found = run_settings(source), list[str]()
    if is_adapter_folder(source) and not merged:
        config = read_adapter_config(source)
        if Path(config.base).is_absolute():
            found.append(
                f"the adapter names its base by a path of this machine, {config.base}: on another one name the base "
                "with --base, or export with --merged"
            )
        found.append(
            "an adapter's end tokens are in its generation_config.json, which vllm serve reads with "
            "--generation-config FOLDER; slipstream serve-model needs no option"
        )
        if changes_nothing(source):
            found.append("every B of the adapter is zero, so it changes nothing")
    given = {name: settings[name] for name in _PROMPT if settings.get(name) not in (None, "", {})}
    if given:
        listed = ", ".join(f"{name} = {value!r}" for name, value in given.items())
        found.append(f"prompts were rendered with {listed}, which the folder does not say: give it to the server too")
    return found


_PROMPT = ("model.thinking", "model.chat_template_kwargs", "environment.system_prompt")
"""Settings of how prompts are rendered that are no part of a chat template."""


def _write_merged(source: Path, out: Path, trust_remote_code: bool) -> None:
    from slipstream.trainer.model.policy import PolicyModel

    config, base = read_adapter_config(source), base_folder(source)
    tensors = read_adapter_tensors(source)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    dtype: Any = dtypes.pop() if dtypes in ({"float32"}, {"float16"}) else "bfloat16"
    model = PolicyModel.load(base, dtype, trust_remote_code=trust_remote_code, packing=False)
    # Whole names, from the tensors: an adapter made elsewhere may have a pattern as target_modules.
    own = renamed(adapted_modules(tensors), [name for name, _ in model.network.named_modules()])
    model.add_adapter(replace(config, target_modules=tuple(own.values()), with_tower=True), source)
    with whole_folder(out, durable=True) as temporary:
        write_model_folder(temporary, model.named_weights(), model.folder)
        copy_usage(source, temporary)
