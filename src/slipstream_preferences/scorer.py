"""A reward model as a reward: `reward = "model:path/to/folder"`.

The folder is a run with its last checkpoint, or one of `AutoModelForSequenceClassification` with one
label; a name of the hub is one, too. Each reward worker loads it on the CPU, in float32, before its first call.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from slipstream.envs import Score
from slipstream.errors import ConfigError, first_line
from slipstream.plugins import ChatTokenizer, Reward
from slipstream.records import Message, Task


def _missing(folder: Path) -> str:
    """The problem of a path without a model that is no name of the hub."""
    if folder.is_dir():
        return "has no checkpoint yet" if (folder / "checkpoints").is_dir() else ""
    is_local = folder.is_absolute() or folder.parts[:1] == ("..",) or (len(folder.parts) > 1 and folder.parent.is_dir())
    return "does not exist" if is_local else ""


class ModelReward(Reward):
    """The score of a conversation by a reward model. Raises `ConfigError` for a model of another kind."""

    name = "reward_model"
    answer_is_gold = False
    needs_answers = False

    def __init__(self, path: str, setting: str) -> None:
        from transformers import AutoConfig

        folder = Path(path)
        checkpoints = sorted(folder.glob("checkpoints/step-*/weights"))
        self._path = str(checkpoints[-1]) if checkpoints else path
        if problem := _missing(folder) if not checkpoints else "":
            raise ConfigError(f'{setting} = "model:{path}" {problem}: correct it, or train one first')
        try:
            config: Any = AutoConfig.from_pretrained(self._path)
        except (OSError, ValueError) as error:
            raise ConfigError(f'{setting} = "model:{path}" is no model ({first_line(error)}): correct it') from error
        kind = (config.architectures or ["a model without a head"])[0]
        if not kind.endswith("ForSequenceClassification") or config.num_labels != 1:
            raise ConfigError(
                f'{setting} = "model:{path}" is {kind} with {config.num_labels} labels, and a reward model has one '
                'number: train one with preferences.loss = "reward"'
            )
        self._setting = f'{setting} = "model:{path}"'
        for file in Path(self._path).glob("*.safetensors"):
            try:
                safe_open(file, framework="pt").keys()
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{self._setting}: {file.name} is damaged ({first_line(error)}): copy it again"
                ) from None

    def setup_scoring(self) -> None:
        """Loads model and tokenizer. Raises `ConfigError` for weights that are damaged or missing."""
        assert self._model is not None
        assert self._tokenizer is not None

    def __call__(self, task: Task, completion: str) -> Score:
        """The model's score of prompt and completion, thinking included."""
        import torch

        conversation = [*task.prompt, Message("assistant", completion)]
        token_ids = self._tokenizer.training_tokens(conversation, "everything").token_ids
        with torch.inference_mode():
            return Score(self._model(torch.tensor([token_ids])).logits.item())

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self._path)

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        torch.set_num_threads(1)  # as many workers as cores grade side by side
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self._path, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:
            raise ConfigError(f"{self._setting} cannot be loaded ({first_line(error)}): copy it again") from error
        if missing := found["missing_keys"]:  # transformers would give random ones
            raise ConfigError(f"{self._setting} lacks {', '.join(sorted(missing)[:3])}: copy it again")
        return model.eval()
