"""Finds a model by its folder, hub id, run, checkpoint or adapter, as named by a user, and plans its engine.

Guarantees: nothing is started and no weights are loaded; anything missing or incomplete is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import Loaded, ModelConfig
from slipstream.config.addresses import hub_reference, run_reference
from slipstream.errors import ConfigError
from slipstream.inference.settings import EngineSettings
from slipstream.plan.bridge import NOT_ADAPTED
from slipstream.plan.derive import SMALL_MODEL_PARAMETERS
from slipstream.plan.machine import measure_gpus, usable_cpus, usable_memory_bytes
from slipstream.plan.measure import read_model
from slipstream.plan.memory.sizes import CPU_BLOCK_TOKENS, GIB, gib, kv_bytes_per_sequence, round_up
from slipstream.plan.memory.split import MAX_KV_PART, MIN_KV_CACHE_GIB
from slipstream.plan.preflight.model_folder import check_hub_id, check_model, hub_id
from slipstream.runlog import holds_run, read_settings

if TYPE_CHECKING:
    from slipstream.weights.adapter_folder import AdapterConfig

MAX_CONTEXT, MAX_CPU_CONTEXT = 32_768, 8_192
"""Default limit of a conversation in tokens: the KV cache must hold it."""


@dataclass(frozen=True)
class Deployable:
    """A model for an engine to serve: a folder or hub id, and optionally an adapter."""

    name: str
    """Its name in messages and for clients."""
    model: str
    adapter: Path | None = None
    run_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings (`section.key`) of the run behind it; empty without one."""


@dataclass(frozen=True)
class ServeOptions:
    """The address to listen at, and vLLM's settings."""

    name: str | None = None
    """The model's name for clients; None: the deployable's name."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """Concurrent conversations; None: 16 on a CPU, 256 on a GPU."""
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool | None = None
    trust_remote_code: bool = False


def weights_folder(path: Path) -> Path:
    """Find the folder of a model or adapter in `path`: a run (its best checkpoint, else its latest), a checkpoint, or
    the folder itself. Raises ConfigError when it is none of them or incomplete."""
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore, damage
    from slipstream.weights.adapter_folder import is_adapter_folder

    path = Path(local_path(str(path)))
    if holds_run(path):
        store = CheckpointStore(path / "checkpoints")
        best, named = store.folder / "best", store.named()
        if not best.is_symlink() and not named:
            raise ConfigError(
                f"the run in {path} has no whole checkpoint yet: wait for its first if it still runs, or name a model"
            )
        # A damaged one is not passed over: an older model in its place would look like the newest.
        path = best.resolve() if best.is_symlink() else named[-1]
        is_checkpoint = True
    else:
        is_checkpoint = (path / "manifest.json").is_file()
    if is_checkpoint:
        if reason := damage(path):
            raise ConfigError(f"checkpoint {path} is damaged ({reason}): use another one of its run")
        return path / "weights"
    if is_adapter_folder(path) or (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} holds neither a model nor an adapter, checkpoint or run: name one of these folders")
    problem = "is a file" if path.exists() else "does not exist"
    raise ConfigError(f"{path} {problem}: name the folder of a model, adapter, checkpoint or run")


def local_path(named: str) -> str:
    """The folder of `run:ID`, `run:ID/step-N` or `hub:OWNER/NAME@REVISION`, verified; any other path unchanged. Raises
    ConfigError."""
    if (on_hub := hub_reference(named)) is not None:
        from slipstream.artifacts.hub_files import located_on_hub

        return str(located_on_hub(on_hub))
    if (reference := run_reference(named)) is None:
        return named
    from slipstream.artifacts.references import located

    return str(located(reference))


def _holds_weights(folder: Path) -> bool:
    """Whether it is the folder of a run or of a checkpoint."""
    return holds_run(folder) or (folder / "manifest.json").is_file()


def with_weights_folder(loaded: Loaded) -> Loaded:
    """Replace a run or checkpoint in `model.path` or `lora.path` by the folder of its weights, see `weights_folder`.
    Raises ConfigError if these belong into the other of the two."""
    from slipstream.weights.adapter_folder import is_adapter_folder

    config, lora = loaded.config, loaded.config.lora
    given = {"model.path": config.model.path, "teacher.path": config.teacher and config.teacher.path}
    given["lora.path"] = lora and lora.path
    located = {name: path for name, text in given.items() if text and (path := local_path(text)) != text}
    if "teacher.path" in located:
        located["teacher.path"] = str(weights_folder(Path(located["teacher.path"])))
    loaded = loaded.with_values(located) if located else loaded
    lora = loaded.config.lora
    if lora is not None and lora.path is not None and _holds_weights(adapter := Path(lora.path).expanduser()):
        folder = weights_folder(adapter)
        if not is_adapter_folder(folder):
            raise ConfigError(f'lora.path = "{adapter}" holds a whole model: give it as model.path')
        loaded = loaded.with_values({"lora.path": str(folder)})
    path = Path(loaded.config.model.path).expanduser()
    if not _holds_weights(path):
        return loaded
    folder = weights_folder(path)
    if is_adapter_folder(folder):
        raise ConfigError(
            f'model.path = "{given["model.path"]}" holds a LoRA adapter: give its base as model.path and '
            f"{given['model.path'] if 'model.path' in located else folder} as lora.path, or "
            "make a whole model of it with slipstream export --merged"
        )
    return loaded.with_values({"model.path": str(folder)})


def find_deployable(
    named: str, base: str | None = None, *, trust_remote_code: bool = False, quantized: bool = False
) -> Deployable:
    """Find the model `named`: a folder, see `weights_folder`, or a hub id. `base`: the base model of an adapter,
    instead of the one in the adapter's folder. `quantized`: see `check_model`."""
    from slipstream.trainer.model.loading import resolve_folder
    from slipstream.weights.adapter_folder import is_adapter_folder

    given, named = named, local_path(named)
    path = Path(named).expanduser()
    if not path.exists() and named.count("/") == 1 and not named.startswith((".", "~", "/")):
        if path.parent.is_dir():
            raise ConfigError(f"{path} does not exist, and {path.parent}/ does: correct the name")
        try:
            check_hub_id(named)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("model.path = ")) from error
        path = resolve_folder(named)
    folder = weights_folder(path)
    name = given if given != named else named.rstrip("/") if not Path(named).expanduser().exists() else _name_of(path)
    settings = run_settings(folder)
    adapter = folder if is_adapter_folder(folder) else None
    if adapter is None and base is not None:
        raise ConfigError(f"{named} is a whole model, so it has no base: leave out --base {base}")
    if adapter is not None:
        folder = base_folder(adapter, base)
    model = ModelConfig(path=str(folder), trust_remote_code=trust_remote_code)
    check_model(model, packing=False, quantized=quantized)
    return Deployable(name, str(folder), adapter, settings)


def base_folder(adapter: Path, named: str | None = None) -> Path:
    """The folder of the adapter's base model, for a hub id at the commit of the adapter's training. `named`: the
    model, instead of the one in the adapter's folder."""
    from slipstream.trainer.model.loading import resolve_folder
    from slipstream.weights.adapter_folder import check_base, read_adapter_config

    config, run = read_adapter_config(adapter), run_settings(adapter)
    base = named or config.base
    if not base:
        raise ConfigError(
            f"the adapter in {adapter} does not say which model it belongs to: write base_model_name_or_path into its "
            "adapter_config.json, or give --base to slipstream chat or serve-model"
        )
    # Adapters of older versions name no commit, and their run does.
    recorded = run.get("model.revision") if run.get("model.path") == config.base else None
    try:
        folder = resolve_folder(base, (config.revision or recorded) if base == config.base else None)
    except ConfigError as error:
        raise ConfigError(
            f"the adapter in {adapter} belongs to the model {base}{f' at {config.revision}' if config.revision else ''}"
            ", which is not there: put it there again, or give --base to slipstream chat or serve-model"
        ) from error
    if named is None:
        check_base(adapter, folder)
    return folder


def _name_of(path: Path) -> str:
    """The last part of the path, without names inside a checkpoint."""
    parts = [part for part in path.resolve().parts if part not in ("weights", "checkpoints", "best", "/")]
    names = [part for part in parts if not part.startswith("step-")]
    return (names or parts or ["model"])[-1]


def run_settings(weights: Path) -> dict[str, Any]:
    """Read the settings of the run with these weights as a checkpoint; empty without one."""
    run = weights.resolve().parent.parent.parent
    is_checkpoint = weights.name == "weights" and holds_run(run)
    return read_settings(run) if is_checkpoint else {}


def adapter_config_of(deployable: Deployable, *, trust_remote_code: bool = False) -> AdapterConfig | None:
    """Rank, scale and adapted layers of its adapter, None without one. Raises ConfigError if vLLM cannot load it."""
    from slipstream.weights.adapter_folder import (
        AdapterConfig,
        adapted_modules,
        read_adapter_config,
        read_adapter_shapes,
    )

    if deployable.adapter is None:
        return None
    adapter = read_adapter_config(deployable.adapter)
    if adapter.dora:
        raise ConfigError(
            f"the adapter in {deployable.adapter} is DoRA, which vLLM does not load: make a whole model of it with "
            "slipstream export --merged"
        )
    modules = adapted_modules(read_adapter_shapes(deployable.adapter))
    targets = tuple(sorted({name.rpartition(".")[2] for name in modules}))
    has_tower = adapts_tower(deployable.model, modules, trust_remote_code=trust_remote_code)
    kind = read_model(deployable.model, trust_remote_code=trust_remote_code).architecture
    if has_tower and kind in NOT_ADAPTED:
        raise ConfigError(
            f"the adapter in {deployable.adapter} has layers of the vision tower of {kind}, for which vLLM has other "
            "names: make a whole model of it with slipstream export --merged"
        )
    return AdapterConfig(adapter.rank, adapter.alpha, targets, hub_id(deployable.model), with_tower=has_tower)


def adapts_tower(model: str, modules: Iterable[str], *, trust_remote_code: bool = False) -> bool:
    """Whether an adapter of these modules reaches into the model's vision tower."""
    from slipstream.trainer.model.vision_towers import names_in_towers

    return bool(names_in_towers(model, modules, trust_remote_code=trust_remote_code))


def deployed_engine(deployable: Deployable, options: ServeOptions) -> EngineSettings:
    """Settings of an engine for the model: dtype, context length and memory, without any `auto`.

    On a CPU it is compiled only if `enforce_eager` is False. Raises ConfigError if it does not fit.
    """
    facts = read_model(deployable.model, trust_remote_code=options.trust_remote_code)
    on_cpu = measure_gpus()[0] == 0
    max_num_seqs = options.max_num_seqs or (16 if on_cpu else 256)
    dtype = "float16" if facts.dtype == "float16" else "bfloat16"
    if on_cpu and facts.num_parameters < SMALL_MODEL_PARAMETERS:
        dtype = "float32"
    # As vLLM does: beyond its original context, a model with scaled RoPE uses other factors for short sequences too.
    context = facts.original_context or facts.context_length
    length = options.max_model_len or min(context, MAX_CPU_CONTEXT if on_cpu else MAX_CONTEXT)
    if length > facts.context_length:
        raise ConfigError(
            f"--max-model-len {length} is above the model's context of {facts.context_length} tokens: use at most that"
        )
    # vLLM reserves one block.
    each = kv_bytes_per_sequence(facts, dtype, length)
    need = max_num_seqs * each + kv_bytes_per_sequence(facts, dtype, CPU_BLOCK_TOKENS)
    if on_cpu and need > (available := usable_memory_bytes() * MAX_KV_PART):
        raise ConfigError(
            f"{max_num_seqs} conversations of {length} tokens take {gib(need)} of KV cache, more than a quarter of the "
            f"memory ({gib(available)}): use less with --max-model-len"
        )
    return EngineSettings(
        model=deployable.model,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        enforce_eager=on_cpu if options.enforce_eager is None else options.enforce_eager,
        kv_cache_bytes=max(int(MIN_KV_CACHE_GIB * GIB), round_up(need, GIB // 16)),
        gpu_memory_utilization=options.gpu_memory_utilization,
        trust_remote_code=options.trust_remote_code,
        threads=usable_cpus() if on_cpu else None,
    )
