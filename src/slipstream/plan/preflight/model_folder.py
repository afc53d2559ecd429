"""Checks that the model to train, and the teacher, are complete and supported: reads files, loads no weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import ModelConfig, RunConfig
from slipstream.config.schema import TeacherConfig
from slipstream.config.traits import starts_teacher
from slipstream.errors import ConfigError
from slipstream.regular_files import open_regular

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
    check_there(model.path)
    from slipstream.trainer.model.loading import resolve_folder

    snapshot = resolve_folder(model.path, model.revision, weights=weights)
    return model.model_copy(update={"path": str(snapshot), "revision": snapshot.name})


def hub_id(path: str) -> str:
    """Return the hub id whose snapshot `path` is; any other path unchanged."""
    return hub_commit(path)[0]


def hub_commit(path: str) -> tuple[str, str | None]:
    """The hub id and the commit whose snapshot `path` is; any other path unchanged, and None."""
    parts = Path(path).parts
    if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]
    return path, None


def check_adapter(model: ModelConfig, adapter: str | None) -> None:
    """Raise `ConfigError` if `lora.path` was trained on another commit, or other weights, of the model, or not at
    all."""
    from slipstream.weights.adapter_folder import changes_nothing, check_base, read_adapter_config

    if adapter is None:
        return
    (name, commit), trained_on = hub_commit(model.path), read_adapter_config(Path(adapter))
    is_commit = trained_on.revision is not None and re.fullmatch(r"[0-9a-f]{40}", trained_on.revision)
    if is_commit and name == trained_on.base and commit != trained_on.revision:
        raise ConfigError(
            f"the adapter in lora.path = {adapter} was trained on commit {trained_on.revision} of {name}, and "
            f'model.path is at {commit}: set model.revision = "{trained_on.revision}"'
        )
    if name == trained_on.base and commit is None:
        check_base(Path(adapter), Path(model.path))
    if changes_nothing(Path(adapter)):
        raise ConfigError(
            f"every B of the adapter in lora.path = {adapter} is zero, so it was not trained and changes nothing: give "
            "a trained one, or leave out lora.path"
        )


def check_model(model: ModelConfig, *, packing: bool, weights: bool = True, quantized: bool = False) -> None:
    """Raise `ConfigError` unless the folder `model.path` is a complete causal language model; without `weights`, these
    may be missing. `quantized`: its weights may be quantized, as no trainer loads and no fingerprint names them."""
    folder = Path(model.path)
    _refuse_missing(folder)
    if not folder.is_dir():
        return
    values = read_config_file(folder)
    from slipstream.trainer.model.loading import check_architecture

    check_architecture(folder, model.trust_remote_code, packing=packing)
    names = _check_weights(folder) if weights else []
    if not quantized:
        _refuse_quantized(folder, names, values)
    if not model.trust_remote_code and not has_tokenizer(folder):
        raise ConfigError(
            f'model.path = "{folder}" has no tokenizer ({", ".join(_TOKENIZERS[:3])}, ...): copy the files of its '
            "tokenizer there, or save it with save_pretrained"
        )


def find_teacher(config: RunConfig, *, weights: bool) -> TeacherConfig | None:
    """The teacher with the snapshot of its hub id, see `find_model`."""
    teacher = config.teacher
    if teacher is None or teacher.path is None or not starts_teacher(config) or Path(teacher.path).is_dir():
        return teacher
    wanted = config.model.model_copy(update={"path": teacher.path, "revision": None})
    try:
        return teacher.model_copy(update={"path": find_model(wanted, weights=weights).path})
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "teacher.path")) from error


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a vocabulary."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights, or a part of them, in whatever format."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors*", "*.bin", "*.pt", "*.pth", "*.gguf"))


def check_teacher(config: RunConfig, tokenizer: ChatTokenizer, *, weights: bool) -> None:
    """Raise `ConfigError` when the model folder `teacher.path` cannot be a teacher of this policy. Without `weights`,
    those of a snapshot of the hub may be missing."""
    if config.teacher is None or not starts_teacher(config):
        return
    model = config.model.model_copy(update={"path": config.teacher.path})
    try:
        check_model(model, packing=False, weights=weights or hub_commit(model.path)[1] is None)
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


def check_there(path: str) -> None:
    """Raise `ConfigError` for neither a folder nor a model of the hub."""
    if not Path(path).is_dir():
        _refuse_missing(Path(path))
        check_hub_id(path)


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


def read_config_file(folder: Path) -> dict[str, Any]:
    """The values in `config.json`. Raises `ConfigError` if the file is missing or unreadable."""
    file = folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not file.is_file():
        raise ConfigError(
            f'model.path = "{folder}" is a LoRA adapter: give its base as model.path and this folder as lora.path, or '
            "make a whole model of it with slipstream export --merged"
        )
    if not file.is_file():
        remedy = "give a folder in Hugging Face format"
        if (folder / "events.jsonl").is_file() or (folder / "manifest.json").is_file():
            remedy = "it belongs to a run, so give the folder weights of one of its checkpoints"
        raise ConfigError(f'model.path = "{folder}" has no config.json: {remedy}')
    values = _read_json(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a JSON object: save the model again")
    return values


def _refuse_quantized(folder: Path, tensors: Sequence[str], values: dict[str, Any]) -> None:
    """Raise `ConfigError` for a checkpoint of which the `values` of its config, or the types of its `tensors`, say
    that it is quantized."""
    parts = [part for part in (values, values.get("text_config")) if isinstance(part, dict)]
    given = [part[name] for part in parts for name in _QUANTIZATION if part.get(name)]
    if not given and not tensors:
        return
    method = given[0].get("quant_method") if given and isinstance(given[0], dict) else None
    remedy = "" if tensors else ", or remove quantization_config from its config.json if the weights are not quantized"
    raise ConfigError(
        f'model.path = "{folder}" is quantized ({method or (tensors[0] if tensors else given[0])}), and the weights '
        f"that are trained and verified have 16 or 32 bits: give its unquantized checkpoint{remedy}"
    )


_QUANTIZATION = ("quantization_config", "compression_config")


def _is_quantized(name: str, dtype: str) -> bool:
    """Whether a stored tensor holds quantized weights; integers and masks are buffers in many models."""
    packed = dtype in ("U8", "I8", "I32") or dtype.startswith(("F8", "F6", "F4"))
    return packed and re.search(r"weight|_blocks|packed", name.rpartition(".")[2]) is not None


def _check_weights(folder: Path) -> list[str]:
    """Raise `ConfigError` unless all files that the index names exist, and every file is as long as its header says.
    Returns the names and types of quantized tensors, which may be none."""
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
    quantized: list[str] = []
    for file in files:
        try:
            open_regular(file).close()  # safe_open calls a file without read permission missing
            with safe_open(file, framework="numpy") as tensors:
                types = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
            quantized += [f"{name} is {kind}" for name, kind in types.items() if _is_quantized(name, kind)]
        except PermissionError:
            raise
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is not a whole file of weights ({error}): save or download it again") from error
    return quantized


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): save or download the model again") from error
