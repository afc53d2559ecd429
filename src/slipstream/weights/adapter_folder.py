"""LoRA adapters as folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Guarantees: a folder appears under its name only when it is complete. PEFT loads it, and so does vLLM unless it is DoRA.
Adapters of other kinds would compute something else here; reading refuses them.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.weights.model_files import weight_files, weights_digest, whole_folder, write_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BASE_DIGEST = "base_weights"
"""The key in the metadata of the weights' file. PEFT warns of unknown keys in `adapter_config.json`."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (),
    "rank_pattern": (),
    "alpha_pattern": (),
    "layer_replication": (),
    "target_parameters": (),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "use_qalora": (False,),
    "use_bdlora": (),
}
"""PEFT settings of an adapter's computation, with the values (besides empty ones) of plain LoRA."""


@dataclass(frozen=True)
class AdapterConfig:
    """The shape of a LoRA adapter; `base` is its model, a folder or a hub id."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base: str
    dora: bool = False
    """DoRA (arXiv 2402.09353): beside both matrices a magnitude for each row of the weight."""
    with_tower: bool = False
    """Whether layers of a vision tower are targets too."""
    excluded: tuple[str, ...] = ()
    """Modules without targets, by any names in them (an untrained vision tower)."""
    revision: str | None = None
    """The commit of `base` if this is a hub id."""
    base_digest: str | None = None
    """`weights_digest` of `base` when the adapter was trained; None if unrecorded."""

    @property
    def scaling(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank


def adapter_parameter(module: str, half: Literal["A", "B"]) -> str:
    """PEFT's name for one matrix of the adapter of `module`."""
    return f"{_PREFIX}{module}.lora_{half}.weight"


def magnitude_parameter(module: str) -> str:
    """PEFT's name for the magnitudes of DoRA."""
    return f"{_PREFIX}{module}.lora_magnitude_vector"


def adapted_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The modules of matrices with these names."""
    modules = (name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in names)
    return tuple(dict.fromkeys(modules))


def renamed(names: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Map each name, of a module or tensor, to its equivalent in `wanted`: versions of transformers differ in whether a
    vision-language model's decoder is `model`, `language_model.model` or `model.language_model`. A name with no
    equivalent, or several, stays as it is; all stay if two would become one."""
    known, places = set(wanted), dict[str, list[str]]()
    for name in known:
        places.setdefault(_without_infix(name), []).append(name)
    found: dict[str, str] = {}
    for name in names:
        fitting = [name] if name in known else places.get(_without_infix(name), [])
        found[name] = fitting[0] if len(fitting) == 1 else name
    return found if len({*found.values()}) == len(found) else {name: name for name in found}


def _without_infix(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("base_model", "model", "language_model"))


def selects(targets: Iterable[str], module: str) -> bool:
    """Whether some of PEFT's target names is the module's name or an end of it."""
    return any(f".{module}".endswith(f".{target}") for target in targets)


def write_adapter_folder(
    folder: Path,
    named_weights: Iterable[tuple[str, Tensor]],
    config: AdapterConfig,
    *,
    durable: bool = False,
    spare: Path | None = None,
) -> int:
    """Make `folder` an adapter of these tensors; see `write_model_folder`. `spare`: a file on the same disk; if it
    exists, it is moved into the folder and overwritten. Returns the bytes of all tensors."""
    weights = {name: tensor.detach() for name, tensor in named_weights}
    with whole_folder(folder, durable=durable) as temporary:
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": config.base,
            "r": config.rank,
            "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
            "target_modules": list(config.target_modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": config.dora,
            "modules_to_save": None,
        }
        if config.revision is not None:
            content["revision"] = config.revision
        if config.excluded:
            # PEFT's own form: an expression for whole names.
            content["exclude_modules"] = rf"({'|'.join(map(re.escape, config.excluded))})(\..*)?"
        (temporary / CONFIG_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):
                spare.rename(temporary / WEIGHTS_FILE)
        metadata = {} if config.base_digest is None else {_BASE_DIGEST: config.base_digest}
        write_tensors(temporary / WEIGHTS_FILE, weights, metadata)
    return sum(tensor.nbytes for tensor in weights.values())


def folded(
    named_weights: Iterable[tuple[str, Tensor]], scaling: float, kept: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The same adapter with scaling 1: every B is multiplied by `scaling`, into the last call's buffers in `kept`."""
    kept = {} if kept is None else kept
    for name, tensor in named_weights:
        if scaling != 1 and name.endswith(".lora_B.weight"):
            tensor = kept[name] = torch.mul(tensor.detach(), scaling, out=kept.get(name))
        yield name, tensor


def is_adapter_folder(folder: Path) -> bool:
    """Whether `folder` holds an adapter rather than a model."""
    return (folder / CONFIG_FILE).is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The configuration of the adapter in `folder`. Raises ConfigError when there is none, or none of plain LoRA."""
    file = folder / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = int(content["r"]), float(content["lora_alpha"])
        targets = content["target_modules"]
        base = str(content.get("base_model_name_or_path") or "")
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {CONFIG_FILE}: give the folder of an adapter in PEFT's format") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}): save the adapter again") from None
    for name, allowed in _PLAIN.items():
        value = content.get(name)
        if value and value not in allowed:
            raise ConfigError(
                f"the adapter in {folder} has {name} = {json.dumps(value)}, which is neither plain LoRA nor DoRA: merge"
                " it into its model with PEFT and train on that"
            )
    if rank < 1 or not math.isfinite(alpha):
        raise ConfigError(f"{file} has r = {rank} and lora_alpha = {alpha}, of no adapter: save the adapter again")
    stored = read_adapter_shapes(folder) if (folder / WEIGHTS_FILE).is_file() else {}
    kinds = (".lora_A.", ".lora_B.", ".lora_magnitude_vector")
    if other := next((name for name in stored if not any(kind in name for kind in kinds)), ""):
        raise ConfigError(
            f"the adapter in {folder} has {other}, which is not of a linear layer's LoRA or DoRA: merge it into its "
            "model with PEFT and train on that"
        )
    ranks = {shape[0] for name, shape in stored.items() if name.endswith(".lora_A.weight") and shape}
    # Before any caller makes layers of this rank: they may be larger than memory.
    if ranks - {rank}:
        raise ConfigError(f"{file} has r = {rank}, and its weights are of rank {max(ranks)}: save the adapter again")
    names = (targets,) if isinstance(targets, str) else tuple(targets or ())
    revision = content.get("revision")
    return AdapterConfig(
        *(rank, alpha, names, base),
        dora=bool(content.get("use_dora")),
        revision=str(revision) if revision else None,
        base_digest=_read_base_digest(folder) if stored else None,
    )


def _read_base_digest(folder: Path) -> str | None:
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        return (file.metadata() or {}).get(_BASE_DIGEST)


def check_base(adapter: Path, folder: Path) -> None:
    """Raise ConfigError if the weights in `folder` changed since the training of the adapter in `adapter`."""
    digest = read_adapter_config(adapter).base_digest
    if digest is None:
        return
    try:
        files = weight_files(folder)
        # `check_model` handles a folder without weights, for a plan.
        now = weights_digest(folder) if files and all(file.is_file() for file in files) else digest
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the weights in {folder} cannot be read ({error}): save or download them again") from None
    if digest != now:
        raise ConfigError(
            f"the adapter in {adapter} was trained on other weights than {folder} holds now (digest {digest:.12}, not "
            f"{now:.12}): restore the base's files"
        )


def read_adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the adapter in `folder`. Raises ConfigError when it cannot be read."""
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{folder / WEIGHTS_FILE} cannot be read ({error}): save the adapter again") from None


def changes_nothing(folder: Path) -> bool:
    """Whether every B of the adapter in `folder` is zero, as before its first update."""
    ends = (".lora_B.weight", ".lora_magnitude_vector")
    read = {name: tensor for name, tensor in read_adapter_tensors(folder).items() if name.endswith(ends)}
    return bool(read) and all(name.endswith(ends[0]) and not tensor.any() for name, tensor in read.items())


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the adapter in `folder`. Raises ConfigError when it cannot be read."""
    try:
        return load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{folder / WEIGHTS_FILE} cannot be read ({error}): save the adapter again") from None


def check_adapter_fits(
    folder: Path, wanted_config: AdapterConfig, shapes: dict[str, tuple[int, ...]]
) -> dict[str, str]:
    """Raise ConfigError unless the adapter in `folder` is of this kind, rank and alpha, and has exactly the tensors of
    `shapes`. Returns for each of its names the one in `shapes`, see `renamed`."""
    found = read_adapter_config(folder)
    if found.dora != wanted_config.dora:
        kind, setting = ("DoRA", "true") if found.dora else ("plain LoRA", "false")
        raise ConfigError(f"the adapter in {folder} is {kind}: set lora.dora = {setting}")
    for name, wanted, there in (
        ("rank", wanted_config.rank, found.rank),
        ("alpha", wanted_config.alpha, found.alpha),
    ):
        if wanted != there:
            raise ConfigError(
                f"lora.{name} = {wanted:g}, and the adapter in {folder} has {there:g}: set lora.{name} = {there:g}"
            )
    stored = read_adapter_shapes(folder)
    own = renamed(stored, shapes)
    theirs = {own[name]: shape for name, shape in stored.items()}
    problems: list[str] = []
    for what, names in (("missing", shapes.keys() - theirs.keys()), ("unexpected", theirs.keys() - shapes.keys())):
        if names:
            shown = ", ".join(sorted(names)[:3])
            problems.append(f"{what} {shown}{f' and {len(names) - 3} more' if len(names) > 3 else ''}")
    if not problems:
        other = [name for name, shape in shapes.items() if theirs[name] != shape]
        problems += [f"{name} has shape {list(theirs[name])}, not {list(shapes[name])}" for name in other[:1]]
    if problems:
        raise ConfigError(
            f"the adapter in {folder} does not fit model.path and lora.target_modules ({'; '.join(problems)}): its "
            f"own target_modules are {', '.join(sorted(found.target_modules))}"
        )
    return own
