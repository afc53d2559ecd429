"""The sections [data] and [algorithm] of supervised fine-tuning: the rows, their length, and the tokens with loss."""

from __future__ import annotations

import re
from typing import Literal

from slipstream.config import bounds
from slipstream.config.bounds import Problems, Section

TrainOn = Literal["last", "all", "everything"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OF_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".csv", ".txt")


def is_hub_name(path: str) -> bool:
    """Whether `path` has the form of a data set's name on the Hugging Face hub: `org/name`."""
    return _HUB_NAME.fullmatch(path) is not None and not _is_file(path)


def _is_file(path: str) -> bool:
    """Whether `path` is named as a file is."""
    return path.lower().removesuffix(".gz").endswith(_OF_FILES)


class DataConfig(Section):
    """Training data from files or the hub (SFT only)."""

    path: str
    """JSON lines, parquet, a folder (of such files, or of `datasets.save_to_disk`), or the name of a data set on the
    Hugging Face hub, `org/name`, if there is no such folder. A row has messages (`[{"role", "content"}, ...]`), or a
    prompt and a completion; and perhaps `tools` and `system`. All fields of a message reach the chat template; a
    `weight` of 0 keeps one out of the loss. Unread rows are counted."""
    split: str = ""
    """The split to read of a folder with several. Not set: `train`, or the only one."""
    subset: str = ""
    """The configuration of a data set with several, on the hub or in a folder: `main` of `openai/gsm8k`, say."""
    max_examples: bounds.Items | None = None
    """Most rows of `path` to use, the first ones; the others are counted. Not set: all."""
    messages_column: str = ""
    """The column of messages. Not set: `messages`, `conversations`."""
    prompt_column: str = ""
    """The column of prompts, text or messages. Not set: the first of a row's `prompt`, `question`, `instruction`,
    `query`, `problem`, `input`. A dot leads into a column: `extra_info.question`."""
    completion_column: str = ""
    """The column of completions. Not set: the first of `completion`, `response`, `output`, `solution`, `answer`."""
    eval_path: str | None = None
    """Held-out rows, in any of the forms of `path`: their loss is measured at the times of [evaluation], as
    `eval/loss`. A row in both is not trained on. Not set: those of `eval_split` or `eval_fraction`, or none."""
    eval_split: str = ""
    """The held-out split of `eval_path`, or without it of `path`."""
    eval_fraction: bounds.BelowOne = 0.0
    """About this part of the rows of `path` is held out, each by its text alone, so in every run the same; 0: none."""
    max_length: bounds.Tokens | None = None
    """Most tokens of a conversation, within the model's context. Not set: the context."""
    too_long: Literal["drop", "truncate", "error"] = "drop"
    """Handling of a longer conversation: it is left out, only its first `max_length` tokens are trained on, or the
    run does not start. Omitted and cut conversations are counted."""

    @property
    def has_eval(self) -> bool:
        """Whether rows are held out."""
        return bool(self.eval_path or self.eval_split or self.eval_fraction)

    def problems(self) -> Problems:
        """A sentence for each contradiction."""
        for name in ("path", "eval_path"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                yield f'data.{name} = "" is empty: give the path of a file or folder of rows'
        if self.eval_fraction and (self.eval_path or self.eval_split):
            other = "eval_path" if self.eval_path else "eval_split"
            yield (
                f"data.eval_fraction = {self.eval_fraction:g} holds out rows of data.path, and data.{other} names "
                "those to hold out: give one of the two"
            )
        if self.eval_split and self.eval_split == (self.split or "train") and not self.eval_path:
            yield f'data.eval_split = "{self.eval_split}" is the split that is trained on: name another one'
        if self.subset and _is_file(self.path):
            yield f'data.subset = "{self.subset}" is a part of a data set, and data.path is a file: remove it'


class SFTConfig(Section):
    """Learning from rows: cross-entropy on the assistant's tokens, or on all, or the loss of a method's section."""

    kind: Literal["sft"] = "sft"
    train_on: TrainOn = "all"
    """The tokens with loss: the `last` assistant turn of a conversation, `all` its assistant turns, or `everything`,
    every token of the conversation, prompts and system message included."""
