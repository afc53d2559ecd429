"""The table of all patches of vLLM, and those in force in this process.

Patches apply only in processes started by Slipstream (`SLIPSTREAM_ENGINE` is set); anybody else's vLLM is unchanged.
There are two kinds:
- `required`: an update, a score or a seed would be wrong without it. It looks for the code it changes. If this is
  missing, the engine starts all the same, and refuses calls that need the patch (`require`).
- `fast`: computes vLLM's own results, with less work, and repeats some of vLLM's code for it. It is applied only
  if every module it repeats or relies on has a source with a checked digest.

This module imports neither torch nor vLLM: vLLM's source files alone decide its fast paths.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

Choice = Literal["auto", "checked", "required", "all"]
"""`required`: no fast paths. `all`: all of them, whatever vLLM's source. `checked`, or `auto`: those with known digests
of their modules."""
OLDEST, NEWEST = (0, 26), (0, 33)
"""Minor versions of vLLM with a source reviewed for this table."""
VARIABLE = "SLIPSTREAM_PATCHES"
"""Environment variable of an engine's processes with the choice."""
ASKED = "SLIPSTREAM_ASKED"
"""Environment variable of an engine's processes with the settings of [model] that ask for patches, with commas."""


class Absent(Exception):
    """This vLLM lacks the code a patch changes; the text names it."""


def changeable(owner: Any, *names: str) -> Any:
    """The owner, untyped for the replacement of its functions. Raises `Absent` for a missing one of `names`."""
    for name in names:
        if not hasattr(owner, name):
            raise Absent(f"{getattr(owner, '__name__', type(owner).__name__).rpartition('.')[2]}.{name}")
    return owner


class NotNeeded(Exception):
    """This vLLM, or this model, needs no such patch; the text says why."""


@dataclass(frozen=True)
class Patch:
    """One change to vLLM."""

    name: str
    where: str
    """`module:function` of this package to apply the patch. It may raise `Absent` or `NotNeeded`."""
    kind: Literal["required", "fast"]
    on: Literal["any", "cpu", "gpu"] = "any"
    to: Literal["vllm", "model"] = "vllm"
    """`model`: patches objects of the loaded model; the function takes vLLM's model runner."""
    lost: str = ""
    """The feature lost without a required patch, and the alternative."""
    setting: str = ""
    """Its setting of [model]; empty: every engine has it."""
    needs: tuple[str, ...] = ()
    """Patches it builds on."""
    modules: tuple[str, ...] = ()
    """Modules of `vllm` repeated or relied on by a fast path."""
    checked: Mapping[str, str] = field(default_factory=dict)
    """Checked digests of these modules (`digest`), each with its vLLM version."""


_SCHEDULING = (
    *("v1.core.sched.scheduler", "v1.core.sched.async_scheduler", "v1.core.sched.utils", "v1.core.sched.output"),
    *("v1.core.sched.interface", "v1.core.kv_cache_manager", "v1.core.single_type_kv_cache_manager"),
    *("v1.core.kv_cache_coordinator", "v1.core.kv_cache_utils", "v1.core.block_pool", "v1.request", "v1.outputs"),
    *("sampling_params", "v1.engine"),
)
_DELIVERY = ("v1.engine.core", "v1.engine.output_processor", "v1.engine.logprobs", "v1.serial_utils")
_RESTART = 'use weights.bridge = "restart"'

TABLE = (
    Patch(
        *("live_cpu_weights", "cpu:live_weights", "required", "cpu"),
        lost=f"weights cannot be updated in a running engine on a CPU: {_RESTART}",
    ),
    Patch(
        *("live_cpu_experts", "cpu:live_experts", "required", "cpu"),
        lost=f"experts cannot be updated in a running engine on a CPU: {_RESTART}",
    ),
    Patch(
        *("cpu_experts_under_lora", "cpu:experts_under_lora", "required", "cpu"),
        lost='experts are not computed beside adapters on a CPU: use weights.bridge = "disk"',
    ),
    Patch(
        *("adapters_of_linear_layers", "adapters:of_linear_layers", "required"),
        lost='an adapter of a vision tower may not find its layers: use weights.bridge = "disk"',
    ),
    Patch("seeded_cpu_prefill", "cpu:seeded_prefill", "required", "cpu", lost="seeded prompts must fit into one step"),
    Patch(
        *("fp32_residual", "residual:add_in_float32", "required"),
        setting="fp32_residual",
        lost="layers add up in the model's dtype: set model.fp32_residual = false",
    ),
    Patch("flush", "delivery:add_flush", "required", lost="no update can say which version made which token"),
    Patch("sent_copies", "delivery:send_copies", "required", lost="large messages may be written over"),
    Patch(
        *("scores_at_temperature", "scoring:at_request_temperature", "required", "any", "model"),
        lost="given tokens are scored at temperature 1 only: use sampling.temperature = 1",
    ),
    Patch(
        *("expert_choices", "experts:return_choices", "required", "cpu", "model"),
        setting="replay_experts",
        lost="nobody learns which experts its tokens went to: set model.replay_experts = false",
    ),
    Patch(
        *("one_cpu_adapter", "cpu:one_adapter", "fast", "cpu"),
        modules=("lora.punica_wrapper.punica_cpu", "lora.punica_wrapper.punica_base"),
        checked={"905650254e2ca212": "0.31, 0.32, 0.33"},
    ),
    Patch(
        *("block_with_room", "decoding:allocate_with_room", "fast"),
        modules=_SCHEDULING,
        checked={"509c3f0ecfadf5c5": "0.26", "5cbdac2327cf92f1": "0.32"},
    ),
    Patch(
        *("array_logprobs", "delivery:take_arrays", "fast"),
        modules=("v1.engine.logprobs", "logprobs", "v1.outputs"),
        checked={"44ea26be21a41eca": "0.26", "2bafbe6f18d24db0": "0.32"},
    ),
    Patch(
        *("final_delivery", "delivery:deliver_at_the_end", "fast"),
        modules=(*_SCHEDULING, *_DELIVERY),
        checked={"5871dddce3df51c7": "0.26", "e29bd8a9568493b8": "0.32"},
    ),
    Patch(
        *("plain_steps", "decoding:schedule_plainly", "fast"),
        needs=("block_with_room", "final_delivery"),
        modules=_SCHEDULING,
        checked={"509c3f0ecfadf5c5": "0.26", "5cbdac2327cf92f1": "0.32"},
    ),
    Patch(
        *("sampled_logprobs", "sampled_logprobs:without_ranks", "fast"),
        modules=("v1.sample.sampler", "v1.outputs"),
        checked={"cdb074ac61e5e926": "0.26", "283adfa67f79d678": "0.32"},
    ),
    Patch(
        *("sampled_logprobs_v2", "sampled_logprobs:second_without_ranks", "fast"),
        modules=("v1.worker.gpu.sample.sampler", "v1.worker.gpu.sample.logprob", "v1.outputs"),
        checked={"e3211f12fd6ad56d": "0.26", "a4eaf8c386fe3131": "0.32"},
    ),
    Patch(
        *("shared_kernels", "shared_kernels:share_operations", "required", "gpu"),
        setting="shared_kernels",
        lost="it does not compute as the trainer does: set model.shared_kernels = false",
    ),
    Patch(
        "checked_tokens", "delivery:check_tokens", "required", lost="a token outside of the vocabulary is found late"
    ),
    Patch(
        *("adapter_file_at_once", "adapters:read_at_once", "fast", "gpu", "model"),
        modules=("lora.lora_model",),
        checked={"c7c7d9fb8d103271": "0.26", "35a85447741fa86d": "0.32, 0.33"},
    ),
)
"""In the order of application."""

_applied: list[str] = []
_left_out: dict[str, str] = {}


def applied() -> tuple[str, ...]:
    """Names of the patches in force in this process."""
    return tuple(_applied)


def left_out() -> dict[str, str]:
    """The other patches of `TABLE`, each with the reason why it is not in force."""
    return dict(_left_out)


def require(name: str) -> None:
    """Raises RuntimeError unless the patch `name` is in force."""
    if name not in _applied:
        (patch,) = (patch for patch in TABLE if patch.name == name)
        raise RuntimeError(f"{_left_out.get(name, f'the patch {name} was not applied')}, and {patch.lost}")


def apply_all() -> tuple[str, ...]:
    """Apply the patches of vLLM's classes chosen by `VARIABLE`; safe to call again. Returns those in force."""
    from vllm.platforms import current_platform

    device = "cpu" if current_platform.is_cpu() else "gpu"
    _apply(device, "vllm")
    return applied()


def apply_to(runner: Any) -> None:
    """Apply the patches of a loaded model to vLLM's model runner."""
    device = "cpu" if runner.device.type == "cpu" else "gpu"
    _apply(device, "model", runner)


def _apply(device: str, to: str, *arguments: Any) -> None:
    choice: Any = os.environ.get(VARIABLE, "auto")
    for patch in TABLE:
        if patch.to != to or patch.on not in ("any", device) or patch.name in (*_applied, *_left_out):
            continue
        reason = reason_against(patch, choice) or _lacking(patch) or _attempt(patch, *arguments)
        if reason:
            _left_out[patch.name] = reason
        else:
            _applied.append(patch.name)


def asking(settings: Any) -> list[Patch]:
    """The patches asked for by an engine's settings."""
    return [patch for patch in TABLE if patch.setting and getattr(settings, patch.setting)]


def _lacking(patch: Patch) -> str:
    if patch.setting and patch.setting not in os.environ.get(ASKED, "").split(","):
        return f"not needed: model.{patch.setting} is off"
    missing = [name for name in patch.needs if name not in _applied]
    return f"it builds on {', '.join(missing)}" if missing else ""


def _attempt(patch: Patch, *arguments: Any) -> str:
    module, function = patch.where.split(":")
    try:
        getattr(importlib.import_module(f"{__package__}.{module}"), function)(*arguments)
    except Absent as error:
        return f"this vLLM has no {error} for the patch {patch.name}"
    except NotNeeded as error:
        return f"not needed: {error}"
    return ""


def reason_against(patch: Patch, choice: Choice) -> str:
    """Why a patch is not applied to the installed vLLM, judged by its source files; empty when it is."""
    if patch.kind == "required" or choice == "all":
        return ""
    if choice == "required":
        return 'inference.patches = "required" leaves out fast paths'
    found = digest(patch.modules)
    if found in patch.checked:
        return ""
    return f"this vLLM's source ({found or 'not found'}) is not one that it was checked against"


def foreseen(choice: Choice, *, on_cpu: bool) -> dict[str, str]:
    """For each patch of the device, why the installed vLLM will not get it; empty when it will."""
    device = "cpu" if on_cpu else "gpu"
    return {patch.name: reason_against(patch, choice) for patch in TABLE if patch.on in ("any", device)}


def digest(modules: tuple[str, ...], folder: Path | None = None) -> str:
    """SHA-256 of the source of these modules, 16 hexadecimal digits; empty when one is missing. `folder` is vLLM's."""
    folder = folder or vllm_folder()
    sources = [_source(folder, module) for module in modules] if folder else [b""]
    named = (b"%s\n%s" % (name.encode(), source) for name, source in zip(modules, sources, strict=False))
    return hashlib.sha256(b"".join(named)).hexdigest()[:16] if all(sources) else ""


def vllm_folder() -> Path | None:
    """Folder of the installed vLLM; None without one."""
    spec = importlib.util.find_spec("vllm")
    return next((Path(folder) for folder in spec.submodule_search_locations or ()), None) if spec else None


@cache
def _source(folder: Path, module: str) -> bytes:
    path = folder.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_bytes()
    return b""
