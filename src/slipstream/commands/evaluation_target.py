"""Finds the model and the tasks of `slipstream eval`: a run file, a run or a checkpoint, and perhaps another
model, adapter or address.

Guarantees: nothing is started. Anything missing is a ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.config import Loaded, LoraConfig, load_config, with_values
from slipstream.config.parse.load import COMMAND_LINE
from slipstream.errors import ConfigError
from slipstream.plan.deployable import adapts_tower, find_deployable, local_path, weights_folder
from slipstream.regular_files import read_regular
from slipstream.runlog import REDACTED, holds_run

_RESOLVED = "resolved.toml"


@dataclass(frozen=True)
class Target:
    """A model and the settings to evaluate it with."""

    loaded: Loaded
    name: str
    """The model, in kept results."""
    address: str = ""
    """Base URL of a server, if one is evaluated."""
    run: Path | None = None
    """The run with the weights as a checkpoint; its folder keeps the results."""


def find_target(named: Path, model: str | None, overrides: Sequence[str]) -> Target:
    """`named`: the run file, run or checkpoint with the tasks. `model`: the model to evaluate instead of its
    own: a run, a checkpoint, the folder of a model or adapter, a hub id, or a base URL."""
    run = run_of(named)
    if named.is_dir() and run is None:
        raise ConfigError(
            f"{named} belongs to no run that would say on which tasks to evaluate it: slipstream eval RUN_FILE --model "
            f"{named}"
        )
    if str(named).startswith("run:"):
        raise ConfigError(f"{named} is a model without tasks: slipstream eval RUN_FILE --model {named}")
    if not named.exists() and named.suffix != ".toml":
        raise ConfigError(f"{named} does not exist: name a run file, a run, or a checkpoint of one")
    loaded = load_config(_settings_of(run) if run else named, overrides)
    if run is not None:
        loaded = _without_a_trainer(loaded)
    if model is not None and is_address(model):
        return Target(loaded, model, address=model.rstrip("/"))
    if model is None and run is None:
        lora = loaded.config.lora
        return Target(loaded, (lora.path if lora else None) or loaded.config.model.path)
    chosen = str(named) if model is None else model
    owner = run if model is None else run_of(Path(model).expanduser())
    return Target(with_model(loaded, chosen), chosen, run=owner)


def _without_a_trainer(loaded: Loaded) -> Loaded:
    """A run's settings without those for the agreement of trainer and engine: another machine or model may not have
    them. Settings of the command line stay."""
    left = {"model.shared_kernels": "auto", "run.exact": False, "inference.servers": (), "weights.every": 1}
    values = {name: value for name, value in left.items() if loaded.origins.get(name) != COMMAND_LINE}
    return loaded.with_values(values)


def is_address(model: str) -> bool:
    """Whether it is a URL."""
    return model.startswith(("http://", "https://"))


def run_of(path: Path) -> Path | None:
    """The run of a folder, or of a checkpoint; None if it is neither."""
    if holds_run(path):
        return path
    folder = path.resolve()
    if folder.name == "weights":
        folder = folder.parent
    is_checkpoint = (folder / "manifest.json").is_file() and holds_run(folder.parent.parent)
    return folder.parent.parent if is_checkpoint else None


def _settings_of(run: Path) -> Path:
    file = run / _RESOLVED
    if not file.is_file():
        raise ConfigError(f"{run} has no {_RESOLVED}, as the run ended before it was planned: name its run file")
    if REDACTED in read_regular(file).decode(errors="replace"):
        raise ConfigError(
            f"{file} was written without the secrets in it, which the environment may need: slipstream eval RUN_FILE "
            f"--model {run}"
        )
    return file


def with_model(loaded: Loaded, model: str) -> Loaded:
    """The settings with another model, or with an adapter and its base. The adapter's folder gives its shape."""
    from slipstream.weights.adapter_folder import adapted_modules, is_adapter_folder, read_adapter_shapes

    model = local_path(model)
    path = Path(model).expanduser()
    folder = weights_folder(path) if path.exists() else None
    if folder is None or not is_adapter_folder(folder):
        found = str(folder or model)
        values = {"model.path": found, **({} if loaded.config.lora is None else {"lora.path": None})}
        if found != loaded.config.model.path:
            values["model.revision"] = None  # it is another repository's
        return loaded.with_values(values)
    from slipstream.weights.adapter_folder import read_adapter_config

    adapter = read_adapter_config(folder)
    deployable = find_deployable(str(folder), None if adapter.base else loaded.config.model.path)
    modules = adapted_modules(read_adapter_shapes(folder))
    values = {
        "model.path": deployable.model,
        "model.revision": None,  # it is another repository's, or the folder's own
        "lora.path": str(folder.resolve()),
        "lora.rank": adapter.rank,
        "lora.alpha": float(adapter.alpha),
        "lora.target_modules": _targets(adapter.target_modules, modules),
        "lora.dora": adapter.dora,
        "model.train_tower": adapts_tower(
            deployable.model, modules, trust_remote_code=loaded.config.model.trust_remote_code
        ),
    }
    config = loaded.config if loaded.config.lora else loaded.config.model_copy(update={"lora": LoraConfig()})
    return replace(loaded, config=with_values(config, values))


def _targets(named: tuple[str, ...], modules: tuple[str, ...]) -> tuple[str, ...]:
    """Names to select these adapted modules: the fitting ones of the adapter's file, unless it has a pattern of
    PEFT."""
    from slipstream.weights.adapter_folder import selects

    used = tuple(name for name in named if any(selects([name], module) for module in modules))
    if all(selects(used, module) for module in modules):
        return used
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))
