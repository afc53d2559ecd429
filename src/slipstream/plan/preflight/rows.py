"""The rows of [data]: the training set, the held-out set, and a row's place in its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from slipstream.config import DataConfig, RunConfig
from slipstream.data.conversations import Builder, Columns, parts_of, plain_conversation, read_conversations
from slipstream.data.examples import split_off, without
from slipstream.data.files.folders import held_out_split, subset_of
from slipstream.data.readers import Row, read_rows
from slipstream.errors import DataError
from slipstream.orchestrator.method import method_of
from slipstream.records import Message, Task

Conversations = list[Sequence[Message]]


def builder_of(config: RunConfig) -> Builder:
    """Makes the conversation of a row."""
    method = method_of(config)
    return plain_conversation if method is None else method.conversation


def read_data(
    data: DataConfig, dropped: dict[str, int], *, holds_out: bool, build: Builder = plain_conversation
) -> tuple[Conversations, Conversations]:
    """The rows to train on and, if it `holds_out`, those to hold out."""
    columns = _columns(data)
    whole = read_conversations(data.path, columns, data.split, dropped, subset=data.subset, build=build)
    rows: Conversations = [*whole]
    if data.max_examples is not None and len(rows) > data.max_examples:
        dropped["row beyond data.max_examples"] = len(rows) - data.max_examples
        rows = rows[: data.max_examples]
    if not holds_out:
        return rows, []
    if data.eval_fraction:
        return split_off(rows, data.eval_fraction)
    path, split, subset = _held_out(data)
    setting = "data.eval_path"
    held_out: Conversations = [*read_conversations(path, columns, split, subset=subset, setting=setting, build=build)]
    kept = without(rows, held_out)
    if len(kept) < len(rows):
        dropped["also_held_out"] = len(rows) - len(kept)
    return kept, held_out


def _columns(data: DataConfig) -> Columns:
    return Columns(data.messages_column, data.prompt_column, data.completion_column)


def _held_out(data: DataConfig) -> tuple[str, str, str]:
    """Path, split and configuration of rows held out by a data set of its own, or by another split."""
    path = data.path if data.eval_path is None else data.eval_path
    subset = data.subset if path == data.path else subset_of(path, data.subset)
    if data.eval_split or not Path(path).is_dir():
        return path, data.eval_split, subset
    return path, held_out_split(Path(path), setting="data.eval_path", subset=subset), subset


def source_of(config: RunConfig, tasks: Sequence[Task], conversation: Sequence[Message]) -> str:
    """The row or task of a conversation, or of a task's prompt."""
    places: Iterator[str] = iter(())
    if config.data is not None:
        columns, build = _columns(config.data), builder_of(config)
        places = (row.where for row in _all_rows(config.data) if _is(row, columns, tuple(conversation), build))
    named = (f"task {task.id}" for task in tasks if task.prompt == tuple(conversation[: len(task.prompt)]))
    return next(chain(places, named), repr(conversation[-1].content)[:60])


def _all_rows(data: DataConfig) -> Iterator[Row]:
    yield from read_rows(data.path, data.split, subset=data.subset)
    if data.eval_path or data.eval_split:
        path, split, subset = _held_out(data)
        yield from read_rows(path, split, "data.eval_path", subset)


def _is(row: Row, columns: Columns, conversation: tuple[Message, ...], build: Builder) -> bool:
    try:
        return conversation in parts_of([build(row, columns)[0]])
    except DataError:  # of rows beyond `max_examples`, or held-out rows in a run without any
        return False
