"""Broken rows and files: each is refused in one sentence that names file, row and column, before anything is started.

In the table `row` is the row that must be named, `said` the column or what else the sentence says.
"""

import datetime
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from slipstream.config.environment import EnvironmentConfig
from slipstream.data.conversations import Columns, read_conversations
from slipstream.envs.registry import load_environment
from slipstream.envs.single_turn import make_tasks
from slipstream.errors import SlipstreamError

GOOD = {"prompt": "What is 1 + 1?", "answer": "2"}
VERL = {
    "data_source": "s",
    "prompt": [{"role": "user", "content": "q"}],
    "reward_model": {"style": "rule", "ground_truth": "1"},
    "extra_info": {"index": 0},
}
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def plain(**changes):
    return lines(GOOD, {**GOOD, **changes})


def verl(**changes):
    return lines(VERL, {name: value for name, value in {**VERL, **changes}.items() if value != "GONE"})


def asked(*messages):
    return verl(prompt=list(messages))


FILES = {
    "no_json": (lines(GOOD, "{'prompt': 1}"), 2, "is not JSON"),
    "cut_line": (lines(GOOD) + '{"prompt": "q", "ans', 2, "truncated"),
    "a_number_for_a_row": (lines(GOOD, "3"), 2, "is a number"),
    "one_list": (json.dumps([GOOD, GOOD], indent=1), None, "is one JSON list"),
    "nan": (lines(GOOD, '{"prompt": "q", "answer": NaN}'), 2, "is not JSON"),
    "latin_1": (lines(GOOD).encode() + '{"prompt": "ü", "answer": "1"}'.encode("latin1"), 2, "utf-8"),
    "utf_16": (lines(GOOD).encode("utf-16"), None, "is UTF-16 text"),
    "zeros": (b"\0" * 100, 1, "is not JSON"),
    "half_a_surrogate": (lines(GOOD, '{"prompt": "\\ud800", "answer": "1"}'), 2, "surrogate"),
    "nested_too_deeply": (lines(GOOD, "[" * 100_000), 2, "too deeply"),
    "an_integer_of_5000_digits": (lines(GOOD, f'{{"prompt": "q", "answer": {"1" * 5000}}}'), 2, "out of range"),
    "empty_file": ("", None, "holds no row"),
    "blank_lines": ("\n\n", None, "holds no row"),
    "missing_file": (None, None, "No such file"),
    "no_known_columns": (lines(GOOD, {"text": "q", "label": "1"}), 2, "only label, text"),
    "no_prompt": (lines(GOOD, {"answer": "1"}), 2, "as a prompt"),
    "no_answer": (lines(GOOD, {"prompt": "q"}), 2, "as an answer"),
    "null_prompt": (plain(prompt=None), 2, "prompt is null"),
    "null_answer": (plain(answer=None), 2, "answer is null"),
    "empty_prompt": (plain(prompt=""), 2, "prompt is an empty text"),
    "blank_prompt": (plain(prompt="  "), 2, "prompt is an empty text"),
    "empty_answer": (plain(answer=""), 2, "answer is empty"),
    "prompt_a_number": (plain(prompt=7), 2, "prompt = 7"),
    "tools_a_text": (plain(tools="add"), 2, "tools = 'add'"),
    "no_messages": (asked(), 2, r"prompt = \[\]"),
    "message_a_text": (asked("q"), 2, r"prompt\[0\] is a text"),
    "unknown_role": (asked({"role": "usr", "content": "q"}), 2, r"prompt\[0\]\.role = 'usr'"),
    "no_role": (asked({"content": "q"}), 2, r"prompt\[0\]\.role = None"),
    "content_a_number": (asked({"role": "user", "content": 3}), 2, r"prompt\[0\]\.content = 3"),
    "no_content": (asked({"role": "user"}), 2, r"prompt\[0\]\.content = None"),
    "ends_with_an_answer": (asked(*TALK), 2, "the prompt ends with an assistant's message"),
    "two_system_prompts": (
        verl(prompt=[{"role": "system", "content": "a"}, *TALK[:1]], system="b"),
        2,
        "column system",
    ),
    "no_data_source": (verl(data_source="GONE"), 2, "'data_source'"),
    "data_source_a_number": (verl(data_source=3), 2, "data_source = 3"),
    "no_reward_model": (verl(reward_model="GONE"), 2, "'reward_model.ground_truth'"),
    "reward_model_a_text": (verl(reward_model="x"), 2, "reward_model = 'x'"),
    "no_ground_truth": (verl(reward_model={"style": "rule"}), 2, "reward_model .* no column 'ground_truth'"),
    "null_ground_truth": (verl(reward_model={"ground_truth": None}), 2, r"reward_model\.ground_truth is empty"),
    "extra_info_a_list": (verl(extra_info=[1]), 2, r"extra_info = \[1\]"),
    "extra_info_no_literal": (verl(extra_info="{[]: 1}"), 2, r"extra_info = '{\[\]: 1}'"),
    "null_data_source": (verl(data_source=None), 2, "data_source = None"),
    "videos": (verl(videos=["a.mp4"]), 2, "videos is not empty"),
    "images": (verl(images=["a.png"]), 2, r"images\[0\] = 'a.png' cannot be read"),
}
WITH_SETTINGS = {
    "unknown_data_source": (verl(data_source="t"), 2, "data_source = 't' has no reward", {"reward": {"s": "exact"}}),
    "no_mathematics": (plain(answer="\\frac{1}{"), 2, "answer .* not mathematics", {"reward": "math"}),
    "no_number": (plain(answer="seven"), 2, "answer 'seven' holds no number", {"reward": "number"}),
    "no_tests": (plain(), 1, "call no function", {"reward": "code"}),
    "no_such_gold": (verl(), 1, "extra_info .* no column 'answer'", {"gold_column": "extra_info.answer"}),
    "no_such_column": (plain(), 1, "'question'", {"prompt_column": "question"}),
}


def answered(**changes):
    return {"messages": [TALK[0], {**TALK[1], **changes}]}


CONVERSATIONS = {
    "nothing_to_imitate": ({"messages": TALK[:1]}, "no assistant message"),
    "nothing_of_weight": ({"messages": [TALK[0], TALK[1] | {"weight": 0}]}, "has weight 0 in each assistant message"),
    "no_messages": ({"messages": []}, r"messages = \[\]"),
    "messages_a_text": ({"messages": "hello"}, "messages = 'hello'"),
    "no_image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        r"content\[0\] = .* has no image",
    ),
    "weight": (answered(weight=3), r"messages\[1\]\.weight = 3"),
    "calls": (answered(tool_calls="x"), r"messages\[1\]\.tool_calls = 'x'"),
    "other_columns": ({"question": "a", "said": "b"}, "the keys question, said"),
    "empty_completion": ({"prompt": "q", "completion": ""}, "completion is an empty text"),
    "completion_a_number": ({"prompt": "q", "completion": 3}, "completion = 3 is a number"),
}


def refusal(path, settings=()):
    """The sentence with which the environment `rows` refuses the file."""
    given = {"path": str(path), "eval_path": str(path), **dict(settings)}
    environment = load_environment(EnvironmentConfig.model_validate({"name": "rows", "settings": given}))
    with pytest.raises(SlipstreamError) as caught:
        make_tasks(environment, "train", 10)
    return str(caught.value)


def check(sentence, path, row, said):
    assert "\n" not in sentence
    assert len(sentence) < 500
    assert f"row {row} of {path}" in sentence if row else str(path) in sentence
    assert re.search(said, sentence), sentence


@pytest.mark.parametrize("kind", FILES | WITH_SETTINGS)
def test_rows(tmp_path, kind):
    content, row, said, *settings = (FILES | WITH_SETTINGS)[kind]
    path = tmp_path / f"{kind}.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    check(refusal(path, *settings), path, row, said)


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_conversations_of_sft(tmp_path, kind):
    row, said = CONVERSATIONS[kind]
    path = tmp_path / f"{kind}.jsonl"
    path.write_text(lines({"messages": TALK}, row))
    with pytest.raises(SlipstreamError) as caught:
        read_conversations(path, Columns())
    check(str(caught.value), path, 2, said)


@pytest.mark.parametrize(
    ("truth", "said"), [(b"\x00", "the answer is a bytes"), (datetime.date(2024, 1, 1), "the answer is a date")]
)
def test_values_of_parquet_that_no_reward_can_be_sent(tmp_path, truth, said):
    path = tmp_path / "rows.parquet"
    rows = [{**VERL, "reward_model": {"ground_truth": value}} for value in (truth, truth)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    check(refusal(path), path, 1, said)


@pytest.mark.parametrize("cut", [50, 4000])
def test_a_parquet_file_that_was_cut_off(tmp_path, cut):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**GOOD, "i": i} for i in range(3000)]), path)
    path.write_bytes(path.read_bytes()[:-cut])
    check(refusal(path), path, None, "not a whole parquet file")


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\nq,1\n")
    check(refusal(path), path, None, "not a JSONL file")
