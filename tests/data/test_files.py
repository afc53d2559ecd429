import json

import pytest

from slipstream.data.files import read_conversations
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
    assert conversation[1].tool_calls == (call,)
    assert conversation[2].tool_call_id == "1"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{broken", "row 2 of .*talk.jsonl is not JSON"),
        ("[1]", "row 2 of .* is a list"),
        ({"text": "x"}, "row 2 of .* has the keys text"),
        ({"messages": []}, "is not a list of messages"),
        ({"messages": "hi"}, "is not a list of messages"),
        ({"messages": ["hi"]}, r"messages\[0\] is a str"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"messages\[0\].role = 'bot' is unknown: use system, user"),
        (
            {"prompt": "x", "completion": [{"role": "assistant", "content": 5}]},
            r"completion\[0\].content = 5 is not text",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is not text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "row 2 of .* no assistant message"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, said):
    with pytest.raises(DataError, match=said):
        read_conversations(write(tmp_path, GOOD, row))


def test_a_bad_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read \(No such file"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no row"):
        read_conversations(write(tmp_path, ""))
    (tmp_path / "rows.csv").touch()
    with pytest.raises(DataError, match="is not a JSONL file"):
        read_conversations(tmp_path / "rows.csv")
