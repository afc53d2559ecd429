"""Builds conversations (SFT) and problems (RL) from rows of data files.

A row that cannot be used raises an error with its file, number and column; none is skipped. A message keeps all of its
fields for the chat template. Columns are found by their usual names or named by the caller; a dot selects a nested
column (`reward_model.ground_truth`).
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from slipstream.data.images.parts import COLUMNS, joined, with_images
from slipstream.data.plain_values import kind_of, not_plain, plain_or_text, text_of
from slipstream.data.readers import Row, columns_of, read_rows
from slipstream.data.tool_calls import calls_of, earlier_calls, json_or_none, tools_of
from slipstream.errors import DataError
from slipstream.records import Media, Message, Role

Conversation = tuple[Message, ...]
Form = Literal["auto", "verl", "messages", "prompt-answer"]
MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "instruction", "query", "problem", "input")
COMPLETIONS = ("completion", "response", "output", "solution", "answer")
ANSWERS = ("answer", "ground_truth", "target", "label", "completion", "response", "output", "solution")
SYSTEMS = ("system", "system_prompt")
_FORMS = '{"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}'
_ROLES = {
    **dict.fromkeys(("gpt", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
    "human": "user",
}
"""Role names of the ShareGPT format."""
_WEIGHTS = ("weight", "train", "training", "loss")
"""Message fields that are 0 or false where a message carries no loss: OpenAI's, axolotl's two, ms-swift's."""
_PARTIAL_WEIGHTS = ("mask", "loss_mask", "loss_scale", "train_detail", "training_detail")
"""Message fields that weigh parts of a message, or are 0 in one system where they are 1 in another."""
_FIELDS = ("role", "content", "from", "value", "tool_calls", "tool_call_id", *_WEIGHTS)
"""Message fields that are converted rather than passed on."""
_JUDGED = ("label", "kto_tag")
"""Columns that are false where a completion is a bad one: of KTO in TRL, in LLaMA-Factory."""
_INPUTS = ("input", "context")
"""Columns that continue an `instruction`: of Alpaca, of Dolly."""
_REFUSED = {
    **dict.fromkeys(("videos", "video", "audio", "audios"), "only text and images are trained on: remove it"),
    "chat_template_kwargs": "variables of the template are the run's: set model.chat_template_kwargs",
    "history": "earlier turns are read from messages alone: give the row as messages",
}
"""Columns that change the meaning of a row and are not supported."""


class Judged(tuple[Message, ...]):
    """A conversation with a reward, perhaps with others of the same row; it equals the conversation alone."""

    others: tuple[Conversation, ...] = ()
    rewards: tuple[float, ...] = (0.0,)
    """Of itself and of the `others`."""


def parts_of(conversations: Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    """All conversations, with the others of judged ones."""
    return [part for each in conversations for part in (each, *(each.others if isinstance(each, Judged) else ()))]


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read; empty: the usual names."""

    messages: str = ""
    prompt: str = ""
    answer: str = ""
    """SFT: the column of completions."""
    gold: str = ""
    """RL: the column of a correct completion, if it is not the answer itself."""


Builder = Callable[[Row, Columns], tuple[Conversation, set[str]]]
"""Makes the conversation of a row, and names the columns used."""


@dataclass(frozen=True)
class Problem:
    """One row as a task for RL."""

    where: str
    prompt: Conversation
    answer: Any
    """The ground truth, of JSON types."""
    gold: str | None
    source: str = ""
    extra: dict[str, Any] | None = None
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """The row as it was read."""


def read_conversations(
    path: str | Path,
    columns: Columns | None = None,
    split: str = "",
    unread: dict[str, int] | None = None,
    *,
    subset: str = "",
    setting: str = "data.path",
    build: Builder | None = None,
) -> list[Conversation]:
    """Reads the conversations of a file or folder, in order; each has at least one assistant turn to train on.

    A row has messages, or a prompt and a completion, either of which is text or a list of messages; and optionally
    `tools` and a system prompt. Rows with other columns are counted in `unread`, by column; blank lines are skipped.
    `subset` and `setting`: see `read_rows`. `build`: makes other conversations of a row than `plain_conversation`.
    Raises `DataError`.
    """
    rows = read_rows(path, split, setting, subset)
    columns, build = columns or Columns(), build or plain_conversation
    unread = {} if unread is None else unread
    _check_named(rows, (columns.messages, columns.prompt, columns.answer))
    found: list[Conversation] = []
    for row in rows:
        conversation, read = build(row, columns)
        found.append(conversation)
        for name, value in row.values.items():
            if value not in (None, "", [], {}) and name not in read:
                unread[f"column {name}, not read"] = unread.get(f"column {name}, not read", 0) + 1
    return found


def conversation_of(row: Row, columns: Columns) -> Conversation:
    """Builds the conversation of one row. Raises `DataError`."""
    return plain_conversation(row, columns)[0]


def plain_conversation(row: Row, columns: Columns, *, is_judged: bool = False) -> tuple[Conversation, set[str]]:
    """Builds the conversation of one row, and names the columns used. Unless it `is_judged`, it must be a good one.
    Raises `DataError`."""
    where = row.where
    messages = columns.messages or ("" if columns.prompt or columns.answer else first_of(row.values, MESSAGES))
    if messages:
        turns, read = turns_of(value_at(row, messages), messages, None, row), [messages]
    else:
        prompt = columns.prompt or first_of(row.values, PROMPTS)
        completion = columns.answer or first_of(row.values, COMPLETIONS)
        if not prompt or not completion:
            _refuse_null(row, prompt, PROMPTS)
            _refuse_null(row, completion, COMPLETIONS)
            keys = ", ".join(sorted(row.values)) or "none"
            raise DataError(f"{where} has the keys {keys}: give {_FORMS}, or name the columns in [data]")
        turns = [
            *_prompt(row, prompt, is_found=not columns.prompt),
            *turns_of(value_at(row, completion), completion, "assistant", row),
        ]
        read = [prompt, completion, *(_INPUTS if prompt == "instruction" and not columns.prompt else ())]
    for name in () if is_judged else _JUDGED:
        if row.values.get(name) is False:
            raise DataError(
                f"{where}: {name} is false, so its completion is a bad one to imitate: remove such rows, or "
                f"the column {name} if it means something else"
            )
    for place, turn in enumerate(turns):
        is_empty = not (turn.content.strip() or turn.tool_calls or any(turn.extra.values()))
        if turn.role == "assistant" and turn.carries_loss and is_empty:
            raise DataError(
                f"{where}: message {place}, the assistant's, is empty, so only its end would be learned: fill it in, "
                "give it weight 0, or remove the row"
            )
    spoken = [turn for turn in turns if turn.role == "assistant"]
    if not any(turn.carries_loss for turn in spoken):
        lacks = "has weight 0 in each assistant message" if spoken else "has no assistant message"
        raise DataError(f"{where} {lacks}, so nothing to train on: add one or remove the row")
    read = {name if name in row.values else name.partition(".")[0] for name in read}
    return tuple(completed(turns, row)), read | {"tools", *SYSTEMS, *COLUMNS}


def problems_of(rows: Sequence[Row], columns: Columns, form: Form = "auto", *, answers: bool = True) -> list[Problem]:
    """The problems of these rows. If the format is `auto`, the first row determines it. Without `answers` a row may
    have none. Raises `DataError`."""
    _check_named(rows, (columns.messages, columns.prompt, columns.answer, columns.gold))
    if form == "auto":
        form = _form_of(rows[0], columns)
    plain = partial(_plain_problem, answers=answers)
    make = {"verl": _verl_problem, "messages": _messages_problem, "prompt-answer": plain}[form]
    problems = [replace(make(row, columns), columns=row.values) for row in rows]
    for problem in problems:
        if problem.prompt[-1].role == "assistant":
            raise DataError(
                f"{problem.where}: the prompt ends with an assistant's message, and the policy answers next: end it "
                "with what is to be answered"
            )
        if complaint := not_plain(problem.answer, "the answer") or not_plain(problem.extra, "extra_info"):
            raise DataError(f"{problem.where}: {complaint}: keep to text, numbers, booleans, lists and dictionaries")
    return problems


def value_at(row: Row, column: str) -> Any:
    """The value of a column, or of the nested column `outer.inner`. Raises `DataError` that lists the columns."""
    if column in row.values:
        return row.values[column]
    outer, _, inner = column.partition(".")
    if not inner or outer not in row.values:
        raise DataError(f"{row.where} has no column {column!r}: it has {', '.join(sorted(row.values)) or 'none'}")
    value = as_mapping(row.values[outer], outer, row.where)
    return value_at(row._replace(where=f"column {outer} of {row.where}", values=value), inner)


def as_mapping(value: Any, column: str, where: str) -> dict[str, Any]:
    """A nested column as a mapping. Some data sets store it as text, in JSON or as a Python literal."""
    found = value
    if isinstance(value, str) and (found := json_or_none(value)) is None:
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found = ast.literal_eval(value)
    if not isinstance(found, dict):
        raise DataError(f"{where}: {column} = {value!r:.60} is not a dictionary, nor JSON text of one: correct it")
    return cast("dict[str, Any]", found)


def _form_of(row: Row, columns: Columns) -> Literal["verl", "messages", "prompt-answer"]:
    named = columns.prompt or columns.answer
    if "reward_model" in row.values and not columns.answer:
        return "verl"
    if columns.messages or (not named and first_of(row.values, MESSAGES)):
        return "messages"
    return "prompt-answer"


def _verl_problem(row: Row, columns: Columns) -> Problem:
    turns = _prompt(row, columns.prompt or "prompt", is_found=False)
    answer = _given(row, columns.answer or "reward_model.ground_truth")
    return _problem(row, columns, turns, answer, _text_at(row, "data_source"))


def _plain_problem(row: Row, columns: Columns, *, answers: bool) -> Problem:
    prompt = columns.prompt or first_of(row.values, PROMPTS)
    answer = columns.answer or first_of(row.values, ANSWERS)
    is_unanswered = not answers and (not answer or value_at(row, answer) in (None, "", [], {}))
    if prompt and is_unanswered:
        return _problem(row, columns, _prompt(row, prompt, is_found=not columns.prompt), None)
    _refuse_null(row, prompt, PROMPTS)
    _refuse_null(row, answer, ANSWERS, "give the right answer")
    if not prompt or not answer:
        what = "a prompt" if not prompt else "an answer"
        keys = ", ".join(sorted(row.values)) or "none"
        raise DataError(
            f"{row.where} has no column that is known as {what}, only {keys}: name it with "
            f"environment.settings.{'prompt' if not prompt else 'answer'}_column"
        )
    return _problem(row, columns, _prompt(row, prompt, is_found=not columns.prompt), _given(row, answer))


def _problem(row: Row, columns: Columns, turns: list[Message], answer: Any, source: str | None = None) -> Problem:
    extra = row.values.get("extra_info")
    return Problem(
        row.where,
        tuple(completed(turns, row)),
        answer,
        _gold(row, columns, answer),
        str(row.values.get("data_source") or "") if source is None else source,
        {} if extra is None else as_mapping(extra, "extra_info", row.where),
    )


def _messages_problem(row: Row, columns: Columns) -> Problem:
    """A problem whose answer is the last message, the assistant's."""
    column = columns.messages or first_of(row.values, MESSAGES) or MESSAGES[0]
    turns = turns_of(value_at(row, column), column, None, row)
    if turns[-1].role != "assistant" or len(turns) < 2:
        raise DataError(f"{row.where}: {column} does not end with an assistant's answer to something: add one")
    answer = _given(row, columns.answer) if columns.answer else turns[-1].content
    return Problem(row.where, tuple(completed(turns[:-1], row)), answer, _gold(row, columns, turns[-1].content))


def _given(row: Row, column: str) -> Any:
    value = value_at(row, column)
    if value is None or value in ("", [], {}):
        raise DataError(
            f"{row.where}: {column} is empty, and a reward needs the right answer: give it or remove the row"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(
            f"{row.where}: {column} is {value}, which pandas writes for a missing number: give the right answer or "
            "remove the row"
        )
    return value


def _gold(row: Row, columns: Columns, answer: Any) -> str | None:
    if columns.gold:
        return _text_at(row, columns.gold)
    return text_of(answer) if isinstance(answer, str | int | float) and not isinstance(answer, bool) else None


def _text_at(row: Row, column: str) -> str:
    value = value_at(row, column)
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {column} = {value!r:.60} is not text: give it as text")
    return value


def _prompt(row: Row, column: str, *, is_found: bool) -> list[Message]:
    """A prompt from text or messages; `input` (Alpaca) or `context` (Dolly) is appended to an instruction."""
    value = value_at(row, column)
    if is_found and column == "instruction" and isinstance(value, str):
        value = "\n\n".join([value, *(_text_at(row, name) for name in _INPUTS if row.values.get(name))])
    return turns_of(value, column, "user", row)


def completed(turns: list[Message], row: Row) -> list[Message]:
    """Adds the row's images, system prompt and tools to the turns."""
    for name, reason in _REFUSED.items():
        if row.values.get(name):
            raise DataError(f"{row.where}: {name} is not empty, and {reason}")
    turns = with_images(turns, row.values, row.where, row.folder)
    column = next((name for name in SYSTEMS if row.values.get(name)), "")
    if column and (turns[0].role, turns[0].content) != ("system", text := _text_at(row, column)):
        if turns[0].role == "system":
            raise DataError(f"{row.where} has a system message and the column {column}, which differ: keep one of them")
        turns = [Message("system", text), *turns]
    tools = tools_of(row.rendered(row.values.get("tools")), row.where)
    return [msgspec.structs.replace(turns[0], tools=tools), *turns[1:]] if tools else turns


def _check_named(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Raises an error for a named column that no row has: one mistake in the settings rather than one in each row."""
    known = columns_of(rows)
    for name in names:
        if name and name not in known and name.partition(".")[0] not in known:
            raise DataError(f"no row has the column {name!r}: there are {', '.join(known)} (first: {rows[0].where})")


def _refuse_null(row: Row, found: str, names: Sequence[str], remedy: str = "fill it in") -> None:
    """Raise DataError where none of these columns was found, and one of them is null."""
    if not found and (empty := next((name for name in names if name in row.values), "")):
        raise DataError(f"{row.where}: {empty} is null: {remedy} or remove the row")


def first_of(row: dict[str, Any], names: Sequence[str]) -> str:
    """The first of these columns that the row has; empty if none."""
    return next((name for name in names if row.get(name) is not None), "")


def turns_of(value: Any, key: str, text_role: Role | None, row: Row) -> list[Message]:
    """The messages of a value: text is one of `text_role`. Raises `DataError`."""
    where = row.where
    if isinstance(value, str) and text_role is not None:
        if not value.strip():
            raise DataError(f"{where}: {key} is an empty text: fill it in or remove the row")
        return [Message(text_role, value)]
    turns = json_or_none(value) if isinstance(value, str) else value
    if text_role is not None and not isinstance(turns, list):
        raise DataError(f"{where}: {key} = {value!r:.60} is {kind_of(value)}: give text, or a list of messages")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: {key} = {value!r:.60} is not a list of messages: give {_FORMS}")
    return [_message(turn, f"{key}[{place}]", row) for place, turn in enumerate(cast("Sequence[Any]", turns))]


def _message(turn: Any, path: str, row: Row) -> Message:
    where = row.where
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {path} is {kind_of(turn)}: give {{'role': ..., 'content': ...}}")
    entry = {name: value for name, value in row.rendered(cast("dict[str, Any]", turn)).items() if value is not None}
    if "from" in entry and "role" not in entry:
        speaker = entry["from"]
        entry["role"] = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        entry["function_call" if speaker == "function_call" else "content"] = entry.get("value")
    if entry.get("role") == "function":
        entry["role"] = "tool"
    if entry.get("role") == "assistant" and "function_call" in entry and "tool_calls" not in entry:
        entry["tool_calls"] = earlier_calls(entry.pop("function_call"))
    role = entry.get("role")
    if role not in get_args(Role):
        raise DataError(f"{where}: {path}.role = {role!r} is unknown: use {', '.join(get_args(Role))}")
    calls = calls_of(entry.get("tool_calls"), f"{where}: {path}.tool_calls")
    content = entry.get("content")
    if content is None and calls:
        content = ""
    media: tuple[Media, ...] = ()
    if isinstance(content, list):  # content parts of OpenAI's format
        content, media = joined(cast("list[Any]", content), f"{where}: {path}.content", row.folder)
    if not isinstance(content, str):
        raise DataError(f"{where}: {path}.content = {content!r:.60} is not text: give it as text")
    weights = {name: entry[name] for name in _WEIGHTS if name in entry}
    for name, weight in weights.items():
        if weight not in (0, 1):
            raise DataError(f"{where}: {path}.{name} = {weight!r:.60} is neither 0 (no loss) nor 1: give one of these")
    if partial := next((name for name in _PARTIAL_WEIGHTS if name in entry), ""):
        raise DataError(
            f"{where}: {path}.{partial} is not read, and a message carries loss as a whole or not at all: give weight, "
            "0 or 1, instead"
        )
    extra = {name: plain_or_text(value) for name, value in entry.items() if name not in _FIELDS}
    id_ = str(entry.get("tool_call_id") or "")
    return Message(cast("Role", role), content, media, calls, id_, extra, carries_loss=all(weights.values()))
