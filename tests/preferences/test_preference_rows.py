"""Rows of pairs and of labelled completions: their forms, and what is refused with file and row."""

import json

import pytest

from slipstream.data.conversations import Columns, parts_of, read_conversations
from slipstream.errors import DataError
from slipstream_preferences.rows import labelled, pair

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "2+2="), ("assistant", "4"),
                                                                      ("assistant", "5")))  # fmt: skip


def read(tmp_path, kind, *rows, **columns):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unread = {}
    build = pair if kind == "dpo" else labelled
    return read_conversations(path, Columns(**columns), unread=unread, build=build), unread


def plain(conversation):
    return [(turn.role, turn.content, turn.carries_loss) for turn in conversation]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"question": "2+2=", "chosen": "4", "rejected": [BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2+2=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["text", "text and messages", "messages", "whole conversations", "and the prompt again"],
)
def test_pairs(row, tmp_path):
    (found,), unread = read(tmp_path, "dpo", row)
    assert plain(found) == [("user", "2+2=", False), ("assistant", "4", True)]
    assert plain(found.others[0]) == [("user", "2+2=", False), ("assistant", "5", True)]
    assert found.rewards == (1.0, 0.0)
    assert parts_of([found]) == [tuple(found), *found.others]
    assert unread == {}


def test_earlier_turns_belong_to_the_prompt(tmp_path):
    before = [USER, GOOD, {"role": "user", "content": "3+3="}]
    six, seven = ({"role": "assistant", "content": text} for text in "67")
    (found,), _ = read(tmp_path, "dpo", {"chosen": [*before, six], "rejected": [*before, seven], "system": "Add."})
    assert plain(found) == [
        ("system", "Add.", False), ("user", "2+2=", False), ("assistant", "4", False), ("user", "3+3=", False),
        ("assistant", "6", True),
    ]  # fmt: skip
    assert plain(found.others[0])[-1] == ("assistant", "7", True)


@pytest.mark.parametrize("label", [True, False, 1, 0])
@pytest.mark.parametrize("form", [{"prompt": "2+2=", "completion": "4"}, {"messages": [USER, GOOD]}])
def test_labelled_completions(form, label, tmp_path):
    (found,), unread = read(tmp_path, "kto", form | {"label": label})
    assert plain(found) == [("user", "2+2=", False), ("assistant", "4", True)]
    assert found.rewards == (float(label),)
    assert unread == {}


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, "has no rejected, but the keys chosen, prompt"),
        ("dpo", {"prompt": "a", "completion": "b"}, "has no chosen and no rejected"),
        ("dpo", {"chosen": "b", "rejected": "c"}, "has completions and no prompt"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "give two that differ"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is an empty text"),
        ("dpo", {"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen = 3 is a number"),
        ("dpo", {"chosen": [USER, GOOD], "rejected": [BAD]}, "begin with different messages"),
        (
            "dpo",
            {"chosen": [USER, GOOD, USER], "rejected": [USER, GOOD, USER, BAD]},
            "one of chosen and rejected begins the other",
        ),
        ("dpo", {"chosen": [USER, GOOD], "rejected": [USER, USER]}, "has no assistant message"),
        ("kto", {"prompt": "a", "completion": "b"}, "has no label, but the keys completion, prompt"),
        ("kto", {"prompt": "a", "completion": "b", "label": "good"}, "has label = 'good'"),
        ("kto", {"prompt": "a", "label": True}, "has the keys label, prompt"),
    ],
)
def test_rows_that_cannot_be_used_are_named(kind, row, says, tmp_path):
    well = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "b", "label": True}
    with pytest.raises(DataError, match=rf"row 2 of .*rows\.jsonl.*{says}"):
        read(tmp_path, kind, well, row)
