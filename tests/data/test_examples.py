"""Conversations as tokens: kept, cut, held out, and counted."""

import pytest

from slipstream.data.examples import Examples, holds_thoughts, split_off, tokenized, without
from slipstream.errors import DataError
from slipstream.records import Message, Sequence


def talk(question, answer, **extra):
    return (Message("user", question), Message("assistant", answer, extra=extra))


class Letters:
    """A token for each letter; the answer's carry loss. Counts its calls."""

    def __init__(self):
        self.calls = 0

    def training_tokens(self, messages, train_on):
        self.calls += 1
        question, answer = (message.content for message in messages)
        return Sequence([ord(letter) for letter in question + answer], [False] * len(question) + [True] * len(answer))


ROWS = [talk("ab", "c"), talk("ab", "cdef"), talk("abcdef", "gh"), talk("a", "b")]


def run(too_long, limit=4):
    dropped = {}
    found = tokenized(ROWS, Letters(), "all", limit, too_long, dropped, where=lambda row: f"row {ROWS.index(row)}")
    return *found, dropped


def test_examples_are_what_was_put_in():
    sequences = [Letters().training_tokens(row, "all") for row in ROWS]
    examples = Examples()
    for sequence in sequences:
        examples.append(sequence)
    assert [*examples] == sequences
    assert examples[2] == sequences[2]
    assert type(examples[0].mask[0]) is bool
    assert (len(examples), examples.lengths, examples.num_trainable) == (4, [3, 6, 8, 2], 8)
    assert sequences[1] in examples


def test_too_long_ones_are_dropped_cut_or_refused():
    kept, examples, dropped = run("drop")
    assert kept == [ROWS[0], ROWS[3]]
    assert (examples.lengths, dropped) == ([3, 2], {"conversation_too_long": 2})
    kept, examples, dropped = run("truncate")
    assert kept == [ROWS[0], ROWS[1], ROWS[3]], "of the third nothing that carries loss is left"
    assert examples[1] == Sequence([97, 98, 99, 100], [False, False, True, True])
    assert dropped == {
        "end of a conversation, beyond 4 tokens": 1,
        "conversation whose first 4 tokens carry no loss": 1,
    }
    with pytest.raises(DataError, match=r"row 1 has 6 tokens, more than the limit: shorten it, or set data.too_long"):
        run("error")
    with pytest.raises(DataError, match="every one of the 4 conversations is longer than the limit"):
        run("drop", limit=1)


def test_each_is_tokenized_once():
    tokenizer = Letters()
    tokenized(ROWS, tokenizer, "all", 4, "truncate", {}, where=str)
    assert tokenizer.calls == len(ROWS)


def test_what_is_held_out_depends_on_its_text_alone():
    rows = [talk(f"question {number}", str(number)) for number in range(2000)]
    train, held_out = split_off(rows, 0.1)
    assert 150 < len(held_out) < 250
    assert not {*map(id, train)} & {*map(id, held_out)}
    assert len(train) + len(held_out) == 2000
    again, fewer = split_off([*reversed(rows[:1000])], 0.1)
    assert [*reversed(fewer)] == [row for row in held_out if row in rows[:1000]]
    assert set(split_off(rows, 0.05)[1]) < set(held_out)
    assert again[0] == rows[999] or rows[999] in fewer
    with pytest.raises(DataError, match="holds out none of 1 rows, each of which is chosen by its text: raise it"):
        split_off(rows[:1], 1e-9)


def test_a_row_that_is_held_out_is_not_trained_on():
    same_question = talk("ab", "other")
    assert without([*ROWS, same_question], [ROWS[0], ROWS[2]]) == [ROWS[1], ROWS[3], same_question]
    with pytest.raises(DataError, match="every one of the 4 rows to train on is also a held-out one"):
        without(ROWS, ROWS)
    with_tools = talk("ab", "c", tool="x")
    assert without([with_tools], [ROWS[0]]) == [with_tools]


def test_thoughts_are_found_in_text_and_in_fields():
    assert not holds_thoughts([talk("<think>?", "b")])
    assert holds_thoughts([ROWS[0], talk("a", "<think>hm</think>b")])
    assert holds_thoughts([talk("a", "b", reasoning_content="hm")])


@pytest.mark.parametrize(
    ("too_long", "said"), [("truncate", "raise data.max_length"), ("drop", 'too_long = "truncate"')]
)
def test_where_nothing_is_left_the_error_names_what_helps(too_long, said):
    rows = [talk("abcdef", "gh")] * 2
    with pytest.raises(DataError, match=said) as refused:
        tokenized(rows, Letters(), "all", 4, too_long, {}, where=str)
    assert too_long not in str(refused.value)


class Refusing:
    def training_tokens(self, messages, train_on):
        raise DataError("no")


def test_an_error_of_the_template_names_the_row():
    with pytest.raises(DataError, match=r"^row 3 of a file: no$"):
        tokenized(ROWS, Refusing(), "all", 4, "drop", {}, where=lambda row: "row 3 of a file")
