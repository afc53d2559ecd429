"""Is there a model that can be trained? Asked of the files alone, before anything starts; no weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError

_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece*"),
    *("spm.model", "tekken.json", "*.tiktoken", "*tokenizer*.py"),
)
"""Any of these holds a vocabulary."""


def check_model(model: ModelConfig, *, packing: bool) -> None:
    """Raises `ConfigError` when the local folder `model.path` is no causal language model that is all there.

    A hub id is not looked at: it is loaded, and refused, where it is used.
    """
    folder = Path(model.path)
    if not folder.is_dir():
        if folder.exists() or folder.is_absolute():
            said = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f'model.path = "{folder}" {said}: give the folder of a model, or make one first')
        if len(folder.parts) > 1 and folder.parent.is_dir():
            # Asking the hub for it would take a minute where there is no network.
            raise ConfigError(
                f'model.path = "{folder}" does not exist, and {folder.parent}/ does: correct the name, or make the '
                "model first (a hub id must not begin with the name of a folder that is here)"
            )
        return
    _check_config_file(folder)
    from slipstream.trainer.model import check_architecture

    check_architecture(folder, model.trust_remote_code, packing=packing)
    _check_weights(folder)
    if not model.trust_remote_code and not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        raise ConfigError(
            f'model.path = "{folder}" has no tokenizer ({", ".join(_TOKENIZERS[:3])}, ...): copy the files of its '
            "tokenizer there, or save it with save_pretrained"
        )


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
    """Every file of weights that there is, or that the index names; each whole, as its header says."""
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
