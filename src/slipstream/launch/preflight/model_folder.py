"""Checks that the model to train, and the teacher, are complete and supported: reads files, loads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import ModelConfig, RunConfig
from slipstream.config.traits import starts_teacher
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer

_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece*"),
    *("spm.model", "tekken.json", "*.tiktoken", "*tokenizer*.py"),
)
"""Files that hold a vocabulary; one is enough."""
_HUB_TIMEOUT_S = 5.0


def find_model(model: ModelConfig, *, weights: bool) -> ModelConfig:
    """Resolve a hub id to the folder of its snapshot and its commit, once, so that everything reads the same files.
    Without `weights` these are not downloaded. Raises `ConfigError` when there is no such model."""
    folder = Path(model.path)
    if folder.is_dir():
        if model.revision is not None and model.revision != folder.name:
            raise ConfigError(
                f'model.revision = "{model.revision}" is of a hub id, and "{folder}" is a folder: remove it'
            )
        return model
    _refuse_missing(folder)
    check_hub_id(model.path)
    from slipstream.trainer.model.loading import resolve_folder

    snapshot = resolve_folder(model.path, model.revision, weights=weights)
    return model.model_copy(update={"path": str(snapshot), "revision": snapshot.name})


def hub_id(path: str) -> str:
    """Return the hub id whose snapshot `path` is; any other path unchanged."""
    parts = Path(path).parts
    if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return path


def check_model(model: ModelConfig, *, packing: bool, weights: bool = True) -> None:
    """Raise `ConfigError` unless the folder `model.path` is a complete causal language model; without `weights`, these
    may be missing."""
    folder = Path(model.path)
    _refuse_missing(folder)
    if not folder.is_dir():
        return
    _check_config_file(folder)
    from slipstream.trainer.model.loading import check_architecture

    check_architecture(folder, model.trust_remote_code, packing=packing)
    if weights:
        _check_weights(folder)
    if not model.trust_remote_code and not has_tokenizer(folder):
        raise ConfigError(
            f'model.path = "{folder}" has no tokenizer ({", ".join(_TOKENIZERS[:3])}, ...): copy the files of its '
            "tokenizer there, or save it with save_pretrained"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a vocabulary."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights, or a part of them, in whatever format."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors*", "*.bin", "*.pt", "*.pth", "*.gguf"))


def check_teacher(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raise `ConfigError` when the model folder `teacher.path` cannot be a teacher of this policy."""
    if config.teacher is None or not starts_teacher(config):
        return
    model = config.model.model_copy(update={"path": config.teacher.path})
    try:
        check_model(model, packing=False)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "teacher.path")) from error
    try:
        problem = tokenizer.differs_from(model.path, model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"teacher.path = {model.path}: no tokenizer can be loaded ({reason}): give a model folder or a hub id"
        ) from error
    if problem:
        raise ConfigError(
            f"teacher.path has another tokenizer than model.path ({problem}), and a teacher scores its student's own "
            "tokens: use a teacher of the same family"
        )


def _refuse_missing(folder: Path) -> None:
    """Raise `ConfigError` for a path that is no folder and cannot be a hub id."""
    if not folder.is_dir():
        if folder.exists() or folder.is_absolute():
            problem = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f'model.path = "{folder}" {problem}: give the folder of a model, or make one first')
        if len(folder.parts) > 1 and folder.parent.is_dir():
            raise ConfigError(
                f'model.path = "{folder}" does not exist, and {folder.parent}/ does: correct the name, or make the '
                "model first (a hub id must not begin with the name of a folder that is here)"
            )


def check_hub_id(name: str) -> None:
    """Raise `ConfigError` for a name that is no model of the hub and was not downloaded before. The hub is asked once,
    with a short timeout: its own library retries an unreachable hub for half a minute."""
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    prefix = f'model.path = "{name}" is no folder here, and'
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        model_info(name, timeout=_HUB_TIMEOUT_S)
    except (GatedRepoError, OfflineModeIsEnabled):
        return  # loading it raises an error that says what to do
    except HFValidationError:
        raise ConfigError(f"{prefix} no name of a model on the hub: correct the path, or give owner/name") from None
    except RepositoryNotFoundError:
        raise ConfigError(f"{prefix} the hub has no such model: correct the path, or make the model first") from None
    except Exception as error:  # whatever the network's library raises
        raise ConfigError(
            f"{prefix} the hub cannot be asked for it ({type(error).__name__}): correct the path, or make the model "
            "first"
        ) from error


def _check_config_file(folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        remedy = "give a folder in Hugging Face format"
        if _is_run(folder):
            remedy = "it belongs to a run, so give the folder weights of one of its checkpoints"
        raise ConfigError(f'model.path = "{folder}" has no config.json: {remedy}')
    values = _read_json(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a JSON object: save the model again")


def _is_run(folder: Path) -> bool:
    return (folder / "events.jsonl").is_file() or (folder / "manifest.json").is_file()


def _check_weights(folder: Path) -> None:
    """Raise `ConfigError` unless all files that the index names exist, and every file is as long as its header says."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        listed = _read_json(index)
        names: Any = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(names, dict):
            raise ConfigError(f"{index} has no weight_map: save or download the model again")
        missing = sorted({str(name) for name in names.values()} - {file.name for file in files})
        if missing:
            raise ConfigError(
                f'model.path = "{folder}" lacks {missing[0]}, which its index names ({len(missing)} such files are not '
                "there): save or download the model again"
            )
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f", only {others[0]}: save it with save_pretrained, which writes safetensors" if others else ""
        raise ConfigError(
            f'model.path = "{folder}" has no weights (*.safetensors){hint or ": save or download the model again"}'
        )
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is not a whole file of weights ({error}): save or download it again") from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): save or download the model again") from error
