import pytest
from tests.matching.scripted_tokens import END_ID, FIRST_COORDINATE, Pieces

from slipstream.errors import ConfigError
from slipstream_matching.coordinates import AnswerTokens, coordinate_ids, fraction_of, literal, literal_bin


def test_checklist_1_bins_are_of_999():
    assert fraction_of(0) == 0.0
    assert fraction_of(999) == 1.0
    assert fraction_of(500) == 500 / 999


def test_checklist_1_literals():
    assert [literal_bin(literal(bin_)) for bin_ in range(1000)] == list(range(1000))
    wrong = ("<|coord_1000|>", "<|coord_-1|>", "<|coord_007|>", "<|coord_|>", " <|coord_1|>", "<|coord_1|>\n", "5", "")
    assert [literal_bin(text) for text in wrong] == [None] * len(wrong)


def test_checklist_1_a_thousand_distinct_ids_or_no_start():
    assert coordinate_ids(lambda text: literal_bin(text) + 7) == tuple(range(7, 1007))
    with pytest.raises(ConfigError, match=r"has no token <\|coord_17\|>: add"):
        coordinate_ids(lambda text: None if literal_bin(text) == 17 else literal_bin(text))
    with pytest.raises(ConfigError, match=r"no token <\|coord_0\|>"):
        coordinate_ids(lambda text: -1)
    unknown = {f"<|coord_{bin_}|>": 0 for bin_ in (3, 4)}
    with pytest.raises(ConfigError, match=r"gives <\|coord_3\|> and <\|coord_4\|> the same id 0"):
        coordinate_ids(lambda text: unknown.get(text, 2000 + literal_bin(text)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coordinate_ids": tuple(range(1999, 999, -1))}, r"encodes <\|coord_0\|> as \[1000\], and its id is 1999"),
        ({"piece": lambda id_: b"?"}, "does not give back the text '{'"),
    ],
)
def test_a_tokenizer_that_cannot_write_answers_is_refused(change, message):
    pieces = Pieces()
    given = {
        "encode": pieces.encode,
        "piece": lambda id_: pieces.bytes[id_],
        "coordinate_ids": tuple(range(FIRST_COORDINATE, FIRST_COORDINATE + 1000)),
        "end_id": END_ID,
    }
    assert AnswerTokens(**given).bins[1017] == 17
    with pytest.raises(ConfigError, match=message):
        AnswerTokens(**{**given, **change})
