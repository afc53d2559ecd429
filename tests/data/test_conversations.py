import json

import pytest
from tests.data.problems import read_problems

from slipstream.data.conversations import Columns, read_conversations
from slipstream.errors import DataError
from slipstream.records import Message

GOOD = {"prompt": "hi", "completion": "hello"}


def write(tmp_path, *rows):
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_both_forms_other_keys_and_blank_lines(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "weight": 1}]
    path = write(
        tmp_path, GOOD, "", {"messages": messages, "id": 7}, {"prompt": messages[:1], "completion": messages[1:]}
    )
    assert read_conversations(path) == [(Message("user", "hi"), Message("assistant", "hello"))] * 3
    assert read_conversations(str(path)) == read_conversations(path)


def test_text_parts_are_joined_and_a_tool_call_needs_no_text(tmp_path):
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    (conversation,) = read_conversations(write(tmp_path, {"messages": messages}))
    assert [m.content for m in conversation] == ["ab", "", "5"]
    assert conversation[1].tool_calls == ({**call, "function": {"name": "f", "arguments": {}}},)
    assert conversation[2].tool_call_id == "1"


def test_a_message_keeps_all_of_its_fields_and_a_row_its_tools(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [
        {"role": "user", "content": "2+2?", "name": "ann", "audio": None},
        {"role": "assistant", "content": "5", "weight": 0},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two", "weight": 1},
    ]
    rows = [{"messages": messages, "tools": tools} for tools in ([tool], json.dumps([tool]))]
    first, second = read_conversations(write(tmp_path, *rows))
    assert first == second
    assert first[0] == Message("user", "2+2?", extra={"name": "ann"}, tools=(tool,))
    assert first[2].as_chat() == {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    assert [message.carries_loss for message in first] == [True, False, True]


def test_a_system_column_is_the_system_message(tmp_path):
    row = {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        "system": "Be brief.",
    }
    plain = {"system_prompt": "Be brief.", "question": "hi", "response": "hello"}
    found = read_conversations(write(tmp_path, row, plain))
    assert found == [(Message("system", "Be brief."), Message("user", "hi"), Message("assistant", "hello"))] * 2
    both = {"messages": [{"role": "system", "content": "Be long."}], **GOOD, "system": "Be brief."}
    both["messages"].append({"role": "assistant", "content": "x"})
    with pytest.raises(DataError, match="column system, which differ"):
        read_conversations(write(tmp_path, both))


@pytest.mark.parametrize("name", ["weight", "train", "training", "loss"])
def test_each_systems_mark_of_a_turn_without_loss_is_read(tmp_path, name):
    asked, told = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    row = {"messages": [asked, {**told, name: False}, asked, {**told, name: True}], "label": True}
    (talk,) = read_conversations(write(tmp_path, row))
    assert [message.carries_loss for message in talk] == [True, False, True, True]
    assert not any(message.extra for message in talk)


def test_columns_that_nobody_reads_are_counted(tmp_path):
    unread = {}
    alpaca = {"instruction": "add", "input": "1 2", "output": "3", "id": 7, "source": ""}
    read_conversations(write(tmp_path, GOOD, alpaca, {**GOOD, "id": 8, "source": "web"}), unread=unread)
    assert unread == {"column id, not read": 2, "column source, not read": 1}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"images": ["a.png"]}, r"images\[0\] = 'a.png' cannot be read"),
        ({"videos": ["a.mp4"]}, "videos is not empty"),
        ({"history": [["a", "b"]]}, "history is not empty"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, r"model\.chat_template_kwargs"),
        ({"tools": "search"}, "not a list of functions"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "neither 0"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, "nothing to train on"),
        ({"messages": [{"role": "assistant", "content": "x", "loss": 0.5}]}, r"\.loss = 0.5"),
        ({"messages": [{"role": "assistant", "content": "x", "mask": True}]}, r"\.mask is not read"),
        ({"messages": [{"role": "assistant", "content": "x", "train_detail": []}]}, r"\.train_detail is not read"),
        ({"label": False}, "label is false"),
        ({"kto_tag": False}, "kto_tag is false"),
    ],
)
def test_what_would_change_a_row_and_cannot_be_read_is_refused(tmp_path, more, said):
    with pytest.raises(DataError, match=f"row 1 of .*{said}"):
        read_conversations(write(tmp_path, GOOD | more))


def test_a_null_is_named(tmp_path):
    with pytest.raises(DataError, match="completion is null: fill it in or remove the row"):
        read_conversations(write(tmp_path, {"prompt": "a", "completion": None}))


def test_a_problem_has_its_rows_system_prompt_and_tools(tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    (problem,) = read_problems(write(tmp_path, {**GOOD, "system": "Be brief.", "tools": [tool]}), Columns())
    assert problem.prompt == (Message("system", "Be brief.", tools=(tool,)), Message("user", "hi"))
    with pytest.raises(DataError, match=r"images\[0\] = 'a.png' cannot be read"):
        read_problems(write(tmp_path, {**GOOD, "images": ["a.png"]}), Columns())
