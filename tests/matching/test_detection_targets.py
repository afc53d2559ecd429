import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.matching.scripted_tokens import END, END_ID, Pieces
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from slipstream_matching.answer import answer_text
from slipstream_matching.coordinates import AnswerTokens, coordinate_ids, literal
from slipstream_matching.matching import MatchSettings, match
from slipstream_matching.objects import SceneObject
from slipstream_matching.parser import parse
from slipstream_matching.row_targets import BoxTarget, from_rollout, teacher_forced

RULES = MatchSettings(maskiou_resolution=64)
CAT = SceneObject("black cat", "bbox_2d", (100, 100, 400, 400))
DOG = SceneObject("dog", "bbox_2d", (500, 500, 900, 900))
PROMPT = [1, 2, 3]


def channel_b(text, truths, pieces):
    pieces.bytes.update(dict.fromkeys(PROMPT, b"<prompt>"))
    answer = parse(pieces.encode(text), pieces.tokens())
    matching = match([each.value for each in answer.objects], truths, RULES)
    return from_rollout(PROMPT, answer, matching, truths, pieces.tokens()), answer, matching


def table(target, pieces, desc_ce_weight=0.5):
    """Each token with its weight; of coordinate tokens the bin they are to become, or what stands there."""
    shown = [pieces.bytes[id_].decode() for id_ in target.token_ids]
    to = {slot: str(bin_) for each in target.boxes for slot, bin_ in zip(each.slots, each.coordinates, strict=True)}
    weights = target.ce_weights(desc_ce_weight)
    assert len(weights) == len(shown) == len(target.regions)
    assert {place for place, region in enumerate(target.regions) if region == "coordinate"} == set(to)
    return [(text, weight, to.get(place, "")) for place, (text, weight) in enumerate(zip(shown, weights, strict=True))]


def rows(text, weight):
    return [(piece, weight, "") for piece in text]


def coordinates(written, true):
    found = []
    for place, (bin_, other) in enumerate(zip(written, true, strict=True)):
        found += [('", "', 1.0, "")] if place else []
        found.append((literal(bin_), 0.0, str(other)))
    return found


START = ['{"', "object", "_", "1"]


def test_checklist_12_channel_a_token_by_token():
    pieces = Pieces()
    pieces.bytes.update(dict.fromkeys(PROMPT, b"<prompt>"))
    target = teacher_forced(PROMPT, [CAT, DOG], pieces.tokens())
    assert table(target, pieces) == [
        *rows(["<prompt>"] * 3, 0.0),
        *rows([*START, '": {"desc": "'], 1.0), *rows(["black", " cat"], 0.5), *rows(['", "bbox_2d": ["'], 1.0),
        *coordinates((100, 100, 400, 400), (100, 100, 400, 400)),
        *rows(['"]}', ", ", '"object_', "2", '": {"desc": "'], 1.0),
        *rows(["dog"], 0.5), *rows(['", "bbox_2d": ["'], 1.0),
        *coordinates((500, 500, 900, 900), (500, 500, 900, 900)),
        *rows(['"]}}', "<|im_end|>"], 1.0),
    ]  # fmt: skip
    assert (target.num_prompt, target.num_prefix, target.token_ids[-1]) == (3, 0, END_ID)
    assert [each.is_appended for each in target.boxes] == [True, True]


def test_checklist_12_channel_b_token_by_token():
    """A match, a false positive, an invalid object, and an object that was missed."""
    pieces = Pieces()
    near = SceneObject("big cat", "bbox_2d", (110, 120, 410, 380))
    wrong = SceneObject("tree", "bbox_2d", (0, 900, 50, 999))
    text = answer_text([near, wrong]).removesuffix("}") + ', "object_5": {"desc": "x"}, "object_6": {"de'
    target, answer, _ = channel_b(text, [DOG, CAT], pieces)
    outside = ["<|coord_0|>", "<|coord_900|>", "<|coord_50|>", "<|coord_999|>"]
    context = [*outside[:1], *(part for each in outside[1:] for part in ('", "', each))]
    assert table(target, pieces) == [
        *rows(["<prompt>"] * 3, 0.0),
        *rows(START, 0.0),
        # The token that opens the object also closes its key, so it is context.
        *rows(['": {"desc": "'], 0.0), *rows(["big", " cat"], 0.0), *rows(['", "bbox_2d": ["'], 1.0),
        *coordinates((110, 120, 410, 380), (100, 100, 400, 400)),
        *rows(['"]}'], 1.0),
        *rows([", ", '"object_', "2", '": {"desc": "', "tree", '", "bbox_2d": ["', *context, '"]}'], 0.0),
        *rows([", ", '"object_', "5", '": {"desc": "', "x", '"', "}"], 0.0),
        # From here on it is ours: the number is above that of every key that is kept.
        *rows([", ", '"object_', "6", '": {"desc": "'], 1.0), *rows(["dog"], 0.5), *rows(['", "bbox_2d": ["'], 1.0),
        *coordinates((500, 500, 900, 900), (500, 500, 900, 900)),
        *rows(['"]}}', "<|im_end|>"], 1.0),
    ]  # fmt: skip
    assert target.num_prompt == 3
    assert target.token_ids[3 : 3 + target.num_prefix] == answer.prefix_ids
    assert [(each.coordinates, each.is_appended) for each in target.boxes] == [
        (CAT.coordinates, False), (DOG.coordinates, True),
    ]  # fmt: skip
    assert [each.reason for each in answer.dropped] == ["no_geometry", "unclosed"]


def test_checklist_12_a_whole_object_token_by_token_where_its_brace_is_its_own():
    pieces = Pieces(merged=('"object_', '"desc": "', '", "'))
    target, _, _ = channel_b(answer_text([CAT]), [CAT], pieces)
    shown = [
        (pieces.bytes[id_].decode(), weight)
        for id_, weight in zip(target.token_ids, target.ce_weights(0.5), strict=True)
    ]
    weights = {}
    for piece, weight in shown[3 : 3 + target.num_prefix]:
        weights.setdefault(piece, []).append(weight)
    assert weights["{"] == [0.0, 1.0]  # the answer's, and the object's
    assert weights["}"] == [1.0]
    assert weights['"object_'] == weights["1"] == [0.0]
    assert weights['"desc": "'] == [1.0]
    assert weights["black"] == weights[" cat"] == [0.0]
    assert shown[3 + target.num_prefix :] == [("}", 1.0), ("<|im_end|>", 1.0)]  # nothing was missed


@pytest.mark.parametrize(
    ("text", "kept", "appended"),
    [
        ("", "{", '"object_1"'),  # no answer at all
        ("I see a cat", "{", '"object_1"'),
        ("{", "{", '"object_1"'),
        ("{}", "{", '"object_1"'),
        ("Here: {", "Here: {", '"object_1"'),
        ('{"object_3": {}}', '{"object_3": {}', ', "object_4"'),
    ],
)
def test_checklist_13_an_invalid_rollout_is_trained_with_all_objects_appended(text, kept, appended):
    pieces = Pieces()
    target, _, _ = channel_b(text, [CAT, DOG], pieces)
    assert pieces.text(target.token_ids[3 : 3 + target.num_prefix]) == kept
    assert pieces.text(target.token_ids[3 + target.num_prefix :]).startswith(appended)
    assert [(each.coordinates, each.is_appended) for each in target.boxes] == [
        (CAT.coordinates, True),
        (DOG.coordinates, True),
    ]
    assert sum(target.ce_weights(1.0)[: 3 + target.num_prefix]) == 0.0


def test_a_rollout_that_found_everything_is_only_closed():
    pieces = Pieces()
    target, answer, _ = channel_b(answer_text([DOG, CAT]), [CAT, DOG], pieces)
    assert target.token_ids == [*PROMPT, *answer.prefix_ids, *pieces.encode("}"), END_ID]
    assert [each.coordinates for each in target.boxes] == [DOG.coordinates, CAT.coordinates]
    assert pieces.text(target.token_ids[3:]) == answer_text([DOG, CAT]) + "<|im_end|>"


def test_inverted_corners_are_taught_the_right_order():
    pieces = Pieces()
    target, _, _ = channel_b(answer_text([replace(CAT, coordinates=(400, 400, 100, 100))]), [CAT], pieces)
    (found,) = target.boxes
    assert found == BoxTarget(found.slots, (100, 100, 400, 400), is_appended=False)
    assert [pieces.text([target.token_ids[slot]]) for slot in found.slots] == [literal(b) for b in (400, 400, 100, 100)]


BINS = st.integers(0, 999)
OBJECTS = st.lists(
    st.builds(SceneObject, st.sampled_from(["cat", "dog", "Ü"]), st.just("bbox_2d"), st.tuples(BINS, BINS, BINS, BINS)),
    max_size=4,
)


@settings(max_examples=60)
@given(OBJECTS, OBJECTS.filter(len), st.data())
def test_checklist_10_the_whole_holds_every_object_once(predictions, truths, data):
    pieces = Pieces()
    truths = [replace(each, coordinates=each.bounds) for each in truths]
    text = answer_text(predictions)
    text = text[: data.draw(st.integers(0, len(text)))]
    target, answer, matching = channel_b(text, truths, pieces)
    whole = target.token_ids[3:]
    again = parse(whole, pieces.tokens())
    assert (again.dropped, again.is_truncated) == ([], False)
    missed = [truths[place] for place in matching.missed]
    assert [each.value for each in again.objects] == [*[each.value for each in answer.objects], *missed]
    keys = [key for key, _ in json.loads(pieces.text(whole).removesuffix("<|im_end|>"), object_pairs_hook=list)]
    assert len(set(keys)) == len(keys) == len(again.objects)
    assert sorted(each.coordinates for each in target.boxes) == sorted(each.coordinates for each in truths)
    places = {slot for each in again.objects for slot in each.slots}
    assert {slot - 3 for each in target.boxes for slot in each.slots} <= places


@settings(max_examples=30)
@given(st.sampled_from(["tree", "hat"]), st.tuples(*[st.integers(800, 999)] * 2, *[st.integers(0, 50)] * 2))
def test_checklist_12_a_false_positive_changes_no_target(desc, coordinates):
    pieces = Pieces()
    found = []
    for wrong in (SceneObject("sea", "bbox_2d", (900, 0, 990, 50)), SceneObject(desc, "bbox_2d", coordinates)):
        target, _, matching = channel_b(
            answer_text([CAT, wrong, DOG]), [CAT, DOG, replace(CAT, desc="new", coordinates=(0, 500, 90, 999))], pieces
        )
        assert matching.false_positives == [1]
        trained = [id_ for id_, weight in zip(target.token_ids, target.ce_weights(1.0), strict=True) if weight]
        found.append((trained, target.regions, target.boxes))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def byte_pairs():
    """A tokenizer as Qwen's are: byte pairs, learned on answers so that pieces of JSON are merged."""
    tokenizer = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = [END, *map(literal, range(1000))]
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator([answer_text([CAT, DOG])] * 9, trainer)
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's printable bytes; the others come after 255
    of_character = {chr(byte): byte for byte in kept}
    of_character |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in kept)}

    def piece(id_):
        token = tokenizer.id_to_token(id_)
        return token.encode() if token in special else bytes(of_character[character] for character in token)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    return AnswerTokens(encode, piece, coordinate_ids(tokenizer.token_to_id), tokenizer.token_to_id(END))


@settings(max_examples=40)
@given(st.sampled_from(["cat", "Ünder 5", "a-b", '"!"']), st.integers(0, 80))
def test_byte_pairs_hold_answers_and_targets(byte_pairs, desc, num_cut):
    tokens = byte_pairs
    ids = tokens.encode(answer_text([replace(CAT, desc=desc), DOG]) + END)
    ids = ids[: max(0, len(ids) - num_cut)]
    answer = parse(ids, tokens)
    truths = [DOG, replace(CAT, desc="new"), replace(DOG, coordinates=(0, 0, 50, 50))]
    target = from_rollout(PROMPT, answer, match([each.value for each in answer.objects], truths, RULES), truths, tokens)
    whole = parse(target.token_ids[3:], tokens)
    assert sorted(each.value.coordinates for each in whole.objects) == sorted(each.coordinates for each in truths)
    assert (whole.dropped, whole.is_truncated) == ([], False)
    trained = [
        tokens.piece(id_) for id_, weight in zip(target.token_ids, target.ce_weights(0.0), strict=True) if weight
    ]
    assert all(desc.encode() not in piece for piece in trained)
    assert not any(
        id_ in tokens.bins for id_, weight in zip(target.token_ids, target.ce_weights(1.0), strict=True) if weight
    )
    slots = [slot for each in target.boxes for slot in each.slots]
    assert len(set(slots)) == 4 * len(truths)
    assert all(target.token_ids[slot] in tokens.bins for slot in slots)
