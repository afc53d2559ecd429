"""Characters for which a tokenizer has no token, against tokenizers of several kinds."""

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.unknown_characters import Vocabulary, check_vocabulary, read_vocabulary
from slipstream.errors import DataError


@pytest.fixture
def make(tmp_path):
    def make(kind):
        new_tokenizer(kind).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return make


def of(tokenizer, unknown="<unk>"):
    return Vocabulary(lambda text: tokenizer.encode(text).ids, tokenizer.token_to_id(unknown))


def test_both_ways_of_reading_a_tokenizer_find_the_same(make):
    for kind, unknown in (("char", ["ü", "🐍", "\t"]), ("byte", [])):
        folder = make(kind)
        vocabulary = read_vocabulary(folder)
        assert vocabulary is not None
        for found in (vocabulary, ChatTokenizer(folder).vocabulary):
            assert found.unknown_in("über ü 🐍\t<unk> ~") == unknown
            assert found.unknown_in("a plain text\n") == []


def test_a_folder_without_a_tokenizer_says_nothing(tmp_path):
    assert read_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="save the model again"):
        read_vocabulary(tmp_path)


def test_a_vocabulary_of_words_knows_words_whose_letters_it_does_not():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert of(words).unknown_in("hello world") == []
    assert of(words).unknown_in("hello mars") != []


def test_what_a_tokenizer_drops_without_a_trace_is_found_as_well():
    from tokenizers import Tokenizer, models

    bare = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert bare.encode("aüb").ids == [0, 1]
    assert of(bare).unknown_in("aüb") == ["ü"]


def test_bytes_that_a_tokenizer_falls_back_to_are_no_loss():
    from tokenizers import Tokenizer, models

    vocabulary = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    falls_back = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    assert of(falls_back).unknown_in("aü🐍") == []


def test_what_is_imitated_is_refused_and_what_is_read_is_told(make):
    vocabulary = read_vocabulary(make("char"))
    assert vocabulary is not None
    texts = [("row 1", "plain"), (lambda: "row 2", "Größe"), ("row 3", "é")]
    with pytest.raises(DataError, match=r"2 of 3 answers to imitate .*'ö' \(U\+00F6\), 'ß' .*'é' .*first: row 2\)"):
        check_vocabulary(vocabulary, trained=texts)
    (warning,) = check_vocabulary(vocabulary, trained=texts[:1], read=texts)
    assert "2 of 3 prompts" in warning
    assert "row 2" in warning


def test_answers_that_cannot_be_said_are_told_and_refused_when_there_are_no_others(make):
    vocabulary = read_vocabulary(make("char"))
    assert vocabulary is not None
    (warning,) = check_vocabulary(vocabulary, answers=[("task 1", "yes"), ("task 2", "ü")])
    assert "1 of 2 right answers" in warning
    assert "task 2" in warning
    with pytest.raises(DataError, match="2 of 2 right answers"):
        check_vocabulary(vocabulary, answers=[("task 1", "ä"), ("task 2", "ü")])
