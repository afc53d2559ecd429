import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.matching.scripted_tokens import END, Pieces

from slipstream_matching.answer import answer_text
from slipstream_matching.coordinates import literal, literal_bin
from slipstream_matching.objects import SceneObject, has_arity
from slipstream_matching.parser import parse

A = ", ".join(f'"{literal(bin_)}"' for bin_ in (1, 2, 3, 4))
P = ", ".join(f'["{literal(bin_)}", "{literal(bin_)}"]' for bin_ in (1, 2, 3))
CAT = f'{{"desc": "cat", "bbox_2d": [{A}]}}'
DOG = f'{{"desc": "dog", "bbox_2d": [{A}]}}'
THREE = A.rpartition(",")[0]


def read(text):
    pieces = Pieces()
    found = parse(pieces.encode(text), pieces.tokens())
    kept = pieces.text(found.prefix_ids)
    assert kept == "{" or text.startswith(kept)
    return found, kept


ONE = f'{{"object_1": {CAT}'

VALUES = {
    # What is under the key of an only object, and the reason for which it is dropped.
    f'{{"desc": "a", "bbox_2d": [{A}], "score": 1}}': "keys",
    f'{{"desc": "a", "bbox_2d": [{A}], "poly": [{P}]}}': "keys",
    f'{{"desc": "a", "bbox_2d": [{A}], "bbox_2d": [{A}]}}': "keys",
    f'{{"desc": "a", "desc": "b", "bbox_2d": [{A}]}}': "keys",
    f'{{"desc": "a", "line": [{A}]}}': "no_geometry",
    '{"desc": "a"}': "no_geometry",
    "{}": "no_geometry",
    f'{{"desc": "a", "poly": [{P}]}}': "polygon",
    f'{{"desc": "a", "bbox_2d": [{THREE}]}}': "coordinates",
    f'{{"desc": "a", "bbox_2d": [{A}, "{literal(5)}"]}}': "coordinates",
    '{"desc": "a", "bbox_2d": [1, 2, 3, 4]}': "coordinates",
    f'{{"desc": "a", "bbox_2d": [{THREE}, 4]}}': "coordinates",
    f'{{"desc": "a", "bbox_2d": [{THREE}, "<|coord_1000|>"]}}': "coordinates",
    f'{{"desc": "a", "bbox_2d": [{THREE}, "{literal(4)} "]}}': "coordinates",
    f'{{"desc": "a", "bbox_2d": [[{A}]]}}': "coordinates",
    f'{{"desc": "a", "bbox_2d": "{literal(4)}"}}': "coordinates",
    '{"desc": "a", "bbox_2d": null}': "coordinates",
    f'{{"desc": "{literal(9)}", "bbox_2d": [{A}]}}': "coordinates",
    f'{{"desc": "a", "bbox_2d": [{literal(1)}]}}': "json",
    f'{{"desc" "a", "bbox_2d": [{A}]}}': "json",
    f'{{"desc": "a", "bbox_2d": [{A}],}}': "json",
    f'{{"desc": "a\n", "bbox_2d": [{A}]}}': "json",
    f'{{"bbox_2d": [{A}]}}': "desc",
    f'{{"desc": " ", "bbox_2d": [{A}]}}': "desc",
    f'{{"desc": 5, "bbox_2d": [{A}]}}': "desc",
    f'{{"desc": {{}}, "bbox_2d": [{A}]}}': "desc",
    f'{{"desc": "\\ud800", "bbox_2d": [{A}]}}': "desc",
}


@pytest.mark.parametrize(("value", "reason"), VALUES.items())
def test_checklist_8_invalid_objects_stay_in_the_prefix(value, reason):
    found, prefix = read(f'{{"object_1": {value}, "object_2": {DOG}}}')
    assert [(each.reason, each.text) for each in found.dropped] == [(reason, value)]
    assert [each.value.desc for each in found.objects] == ["dog"]
    assert not found.is_truncated
    found, prefix = read(f'{{"object_1": {value}}}')
    assert ([each.reason for each in found.dropped], found.objects) == ([reason], [])
    assert prefix == f'{{"object_1": {value}'


ANSWERS = {
    # The answer: descriptions that are read, reasons for which others are dropped, what is kept, is it truncated.
    ONE + "}": (["cat"], [], ONE, False),
    f'{ONE}, "object_2": {DOG}}}': (["cat", "dog"], [], f'{ONE}, "object_2": {DOG}', False),
    f'{ONE}}}{END}{{"object_2": {DOG}}}': (["cat"], [], ONE, False),
    f'{ONE}, "object_2": {{{END}': (["cat"], ["unclosed"], ONE, True),
    f'{ONE}, "object_2": {{"desc": "do': (["cat"], ["unclosed"], ONE, True),
    f'{ONE}, "object_2": {{"desc": "do\\': (["cat"], ["unclosed"], ONE, True),
    f'{ONE}, "object_2": {DOG[:-20]}': (["cat"], ["unclosed"], ONE, True),
    f'{ONE}, "object_2": {{"desc": "a", "bbox_2d": [12': (["cat"], ["unclosed"], ONE, True),
    f'{ONE}, "object_2": ': (["cat"], [], ONE, True),
    f'{ONE}, "obj': (["cat"], [], ONE, True),
    f"{ONE}, ": (["cat"], [], ONE, True),
    ONE: (["cat"], [], ONE, True),
    "{": ([], [], "{", True),
    "Here: {": ([], [], "Here: {", True),
    "I see a cat.": ([], [], "{", True),
    "": ([], [], "{", True),
    "{}": ([], [], "{", False),
    "{cat}": ([], [], "{", False),
    f"Sure! {ONE}}}": (["cat"], [], f"Sure! {ONE}", False),
    f'{ONE}}} {{"object_2": {DOG}}}': (["cat"], ["trailing"], ONE, False),
    f'{{"object_1": {{"desc": "a", "bbox_2d": [{A}}}, "object_2": {DOG}}}': (
        ["dog"], ["json"], f'{{"object_1": {{"desc": "a", "bbox_2d": [{A}}}, "object_2": {DOG}', True,
    ),
    f'{{"thing": {CAT}, "object_2": {DOG}, "last": 1}}': (
        ["dog"], ["key", "key"], f'{{"thing": {CAT}, "object_2": {DOG}', False,
    ),
    f'{{{CAT}, "object_2": {DOG}}}': (["dog"], ["key"], f'{{{CAT}, "object_2": {DOG}', False),
    CAT: ([], ["key", "key"], "{", False),
    f'{ONE}, "object_01": {DOG}}}': (["cat"], ["repeated_key"], f'{ONE}, "object_01": {DOG}', False),
    f'{{"object_1": [{CAT}], "object_2": {DOG}}}': (
        ["dog"], ["value"], f'{{"object_1": [{CAT}], "object_2": {DOG}', False,
    ),
    f'{{"object_1": 5, "object_2": {DOG}}}': (["dog"], ["value"], f'{{"object_1": 5, "object_2": {DOG}', False),
    f'{{"object_1": "{{}}", "object_2": {DOG}}}': (
        ["dog"], ["value"], f'{{"object_1": "{{}}", "object_2": {DOG}', False,
    ),
    f'{{"a": {ONE}}}}}': ([], ["key"], "{", False),
    f'{{"object_1": {{"desc": "}}\\"{{", "bbox_2d": [{A}]}}}}': (
        ['}"{'], [], f'{{"object_1": {{"desc": "}}\\"{{", "bbox_2d": [{A}]}}', False,
    ),
    f'{{ "object_9" :\n{{"bbox_2d":[{A}] , "desc":"cat"}} }}': (
        ["cat"], [], f'{{ "object_9" :\n{{"bbox_2d":[{A}] , "desc":"cat"}}', False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ANSWERS)
def test_checklist_8_whole_and_truncated_answers(text):
    descs, reasons, kept, truncated = ANSWERS[text]
    found, prefix = read(text)
    assert [each.value.desc for each in found.objects] == descs
    assert [each.reason for each in found.dropped] == reasons
    assert prefix == kept
    assert found.is_truncated == truncated
    assert found.has_closed == prefix.endswith("}")


def test_checklist_13_an_empty_answer_is_not_an_invalid_one():
    states = {
        text: (read(text)[0].is_empty, read(text)[0].is_invalid)
        for text in ("{}", "{ }\n", "{", "", "{cat}", "{}}", CAT)
    }
    assert states == {
        "{}": (True, False), "{ }\n": (True, False), "{}}": (True, False), "{": (False, True), "": (False, True),
        "{cat}": (False, True), CAT: (False, True),
    }  # fmt: skip
    closed = read('{"object_1": {}}')[0]  # invalid objects stay in the prefix: something is kept
    assert (closed.is_empty, closed.is_invalid, closed.objects) == (False, False, [])


def test_a_polygon_has_pairs_and_three_corners():
    for values in (A, f'{P}, ["{literal(1)}"]', P.rpartition(", [")[0], "{}", f'{{"{literal(1)}": "{literal(2)}"}}'):
        found, _ = read(f'{{"object_1": {{"desc": "a", "poly": [{values}]}}}}')
        assert [each.reason for each in found.dropped] == ["coordinates"], values


def test_coordinates_in_other_tokens_are_none():
    """The text is the same; a policy that spells it has not used the coordinate token."""
    pieces = Pieces()
    spelt = [
        *pieces.encode(f'{{"object_1": {{"desc": "a", "bbox_2d": [{THREE}, "'),
        *pieces.as_cut("<|", "coord_4", "|>"),
        *pieces.encode('"]}}'),
    ]
    found = parse(spelt, pieces.tokens())
    assert ([each.reason for each in found.dropped], found.objects) == (["coordinates"], [])


def test_a_key_never_comes_twice():
    """Also where numbers of dropped, nested and unread keys are larger than those of valid ones."""
    assert read(f'{{"object_2": {CAT}}}')[0].next_index == 3
    assert read(f'{{"object_2": {CAT}, "object_7": {{}}}}')[0].next_index == 8
    assert read(f'{{"object_9": 5, "object_2": {CAT}}}')[0].next_index == 10
    assert read(f'{{"object_9": , "object_2": {CAT}}}')[0].next_index == 10
    assert read(f'{{"object_2": {CAT}, "object_9": {{')[0].next_index == 3  # not in the prefix
    assert read("{}")[0].next_index == 1
    assert read(f'{{"object_{"9" * 4999}": {CAT}}}')[0].dropped[0].reason == "key"


def test_places_are_those_of_kept_tokens():
    pieces = Pieces()
    box = [literal(5), '", "', literal(6), '", "', literal(7), '", "', literal(8)]
    desc = ["desc", '": "', "black", " cat", '", "']
    ids = pieces.as_cut("{", '"object_1', '": {"', *desc, "bbox_2d", '": ["', *box, '"]}}', "\n")
    found = parse(ids, pieces.tokens())
    (cat,) = found.objects
    assert cat.value == SceneObject("black cat", "bbox_2d", (5, 6, 7, 8))
    assert cat.slots == (10, 12, 14, 16)
    assert cat.desc_tokens == range(5, 7)
    assert cat.tokens == range(3, 18)  # the token before holds a part of the key
    assert [pieces.bytes[id_] for id_ in found.prefix_ids[16:]] == [b"<|coord_8|>", b'"]}']


def test_checklist_8_the_end_of_the_turn_within_other_tokens():
    pieces = Pieces()
    written = pieces.encode(f'{{"object_1": {CAT}, "object_2": ')
    found = parse([*written, *pieces.as_cut("{<|im", "_end|", "> and more"), *pieces.encode(DOG)], pieces.tokens())
    assert [each.value.desc for each in found.objects] == ["cat"]
    assert [each.reason for each in found.dropped] == ["unclosed"]
    assert found.dropped[0].text == "{"


def test_checklist_9_a_fused_last_token_alone_is_replaced():
    pieces = Pieces()
    written = f'{{"object_1": {CAT}'.removesuffix('"]}')
    ids = [*pieces.encode(written), *pieces.as_cut('"]}}<|im_end|>')]
    found = parse(ids, pieces.tokens())
    assert found.prefix_ids[: len(ids) - 1] == ids[:-1]
    assert pieces.text(found.prefix_ids).endswith('"]}')
    assert found.objects[0].tokens.stop == len(found.prefix_ids)


def test_a_cut_that_no_tokens_stand_for_leaves_nothing():
    pieces = Pieces()
    half = b'\xc3\xa9"]}}'[1:]  # a token that begins within a character
    ids = [*pieces.encode(f'{{"object_1": {{"desc": "a", "bbox_2d": ["{literal(4)}'), *pieces.as_cut(b"\xc3", half)]
    found = parse(ids, pieces.tokens())
    assert [each.reason for each in found.dropped] == ["divided"]
    assert (found.is_invalid, pieces.text(found.prefix_ids)) == (True, "{")


def test_deep_nesting_and_broken_characters_are_no_errors():
    pieces = Pieces()
    deep = f'{{"object_1": {{"desc": "a", "bbox_2d": {"[" * 100_000}{"]" * 100_000}}}}}'
    found = parse(pieces.as_cut(deep), pieces.tokens())
    assert [each.reason for each in found.dropped] == ["json"]
    broken = parse(pieces.as_cut('{"object_1": {"desc": "', b"\xff", '"}}'), pieces.tokens())
    assert [each.reason for each in broken.dropped] == ["json"]
    lone = parse(pieces.encode(f'{{"object_1": {{"desc": "\\ud800", "bbox_2d": [{A}]}}}}'), pieces.tokens())
    assert [each.reason for each in lone.dropped] == ["desc"]


BINS = st.integers(0, 999)
DESCS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=8).filter(
    str.strip
)
BOXES = st.builds(SceneObject, DESCS, st.just("bbox_2d"), st.tuples(BINS, BINS, BINS, BINS))
OBJECTS = st.lists(BOXES, max_size=4)


@st.composite
def cut(draw, text, pieces):
    """The text in tokens of any bytes, coordinate tokens whole."""
    data = text.encode()
    coordinates = [found.span() for found in pieces.pattern.finditer(text) if literal_bin(found[0]) is not None]
    coordinates = [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in coordinates]
    places = {place for span in coordinates for place in span} | {0, len(data)}
    free = [place for place in range(len(data)) if not any(start < place < stop for start, stop in coordinates)]
    places |= set(draw(st.lists(st.sampled_from(free), max_size=40))) if free else set()
    ordered = sorted(places)
    return [pieces.intern(data[start:stop]) for start, stop in pairwise(ordered)]


@given(OBJECTS, st.data())
def test_what_is_written_is_read_however_it_is_cut_into_tokens(objects, data):
    pieces = Pieces()
    text = answer_text(objects)
    for ids in (pieces.encode(text), data.draw(cut(text, pieces))):
        found = parse(ids, pieces.tokens())
        assert [each.value for each in found.objects] == objects
        assert (found.dropped, found.is_truncated, found.is_empty) == ([], False, not objects)
        assert found.next_index == len(objects) + 1
        stops = list(accumulate(len(pieces.bytes[id_]) for id_ in found.prefix_ids))
        for number, each in enumerate(found.objects, 1):
            slots = [literal_bin(pieces.text([found.prefix_ids[slot]])) for slot in each.slots]
            assert tuple(slots) == each.value.coordinates
            _, _, rest = text.encode().partition(f'"object_{number}": {{"desc": "'.encode())
            start = len(text.encode()) - len(rest)
            stop = start + len(json.dumps(each.value.desc, ensure_ascii=False)[1:-1].encode())
            spans = list(enumerate(zip([0, *stops], stops, strict=False)))
            assert list(each.desc_tokens) == [place for place, (first, last) in spans if first < stop and last > start]


def reference(text):
    """The valid objects of an answer that is JSON as a whole, by a parser of JSON."""
    found, seen = [], set()
    for key, value in json.loads(text, object_pairs_hook=tuple):
        digits = key.removeprefix("object_")
        if not key.startswith("object_") or not (digits.isascii() and digits.isdigit()) or int(digits) in seen:
            continue
        seen.add(int(digits))
        if not isinstance(value, tuple) or len(value) != 2 or len(dict(value)) != 2 or "desc" not in dict(value):
            continue
        fields = dict(value)
        kind = (set(fields) - {"desc"}).pop()
        values = fields[kind]
        if kind != "bbox_2d" or not isinstance(values, list) or not isinstance(fields["desc"], str):
            continue
        bins = [literal_bin(each) if isinstance(each, str) else None for each in values]
        if fields["desc"].strip() and None not in bins and has_arity(kind, len(bins)):
            found.append(SceneObject(fields["desc"], kind, tuple(bins)))
    return found


def check(ids, pieces):
    """What holds for every answer."""
    found = parse(ids, pieces.tokens())
    text = b"".join(pieces.bytes[id_] for id_ in ids)
    kept = b"".join(pieces.bytes[id_] for id_ in found.prefix_ids)
    # Checklist 9: verbatim but for the last.
    length, same = 0, 0
    while same < min(len(ids), len(found.prefix_ids)) and ids[same] == found.prefix_ids[same]:
        length += len(pieces.bytes[ids[same]])
        same += 1
    if kept != b"{":
        assert text.startswith(kept)
        assert length == len(kept) or length + len(pieces.bytes[ids[same]]) > len(kept)
    for each in found.objects:
        assert tuple(pieces.tokens().bins[found.prefix_ids[slot]] for slot in each.slots) == each.value.coordinates
        assert all(slot in each.tokens and slot not in each.desc_tokens for slot in each.slots)
        if "<|" not in each.value.desc:  # else the serialiser refuses it
            again = parse(pieces.encode(answer_text([each.value])), pieces.tokens())
            assert [other.value for other in again.objects] == [each.value]
    return found


@settings(max_examples=100)
@given(OBJECTS.filter(len), st.data())
def test_no_change_of_an_answer_raises_and_what_is_json_is_read_as_json(objects, data):
    pieces = Pieces()
    text = answer_text(objects)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        removed = data.draw(st.integers(0, 3))
        text = (
            text[:place]
            + data.draw(st.sampled_from(["", "}", "{", "]", "[", '"', ",", ":", "\\", " ", "object_2", literal(7)]))
            + text[place + removed :]
        )
    found = check(pieces.encode(text), pieces)
    try:
        expected = reference(text)
    except ValueError:
        return
    spelt = [each for each in expected if literal_bin(each.desc) is None and "<|coord_" not in each.desc]
    if spelt == expected:
        assert [each.value for each in found.objects] == expected


FRAGMENTS = st.sampled_from([
    "{", "}", "[", "]", '"', ":", ", ", "\\", '"object_1": ', '"object_2": {', '"desc": "a"', '"bbox_2d": [', '"]}',
    CAT, f'"object_3": {DOG}', literal(3), "<|im_", "end|>", END, "\u00e9", " ", "5",
])  # fmt: skip


@settings(max_examples=200)
@given(st.lists(FRAGMENTS.map(str.encode) | st.binary(min_size=1, max_size=3), max_size=25))
def test_no_answer_raises(parts):
    pieces = Pieces()
    check([pieces.intern(part) for part in parts], pieces)
