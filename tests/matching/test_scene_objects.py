import pytest
from tests.matching.scripted_tokens import Pieces

from slipstream.errors import DataError
from slipstream_matching.answer import answer_fragments, answer_text, tokenized
from slipstream_matching.coordinates import literal
from slipstream_matching.objects import SceneObject, in_reading_order, true_objects

CAT = {"desc": "black cat", "bbox_2d": ["<|coord_110|>", "<|coord_310|>", "<|coord_410|>", "<|coord_705|>"]}
SAIL = {"desc": "sail", "poly": [1, 2, 30, 4, 5, 60], "poly_points": 3}


def test_objects_are_read_from_bins_and_tokens():
    assert true_objects([CAT, {"desc": "Ü", "bbox_2d": [0, 5, 0, 999]}], "row 1") == [
        SceneObject("black cat", "bbox_2d", (110, 310, 410, 705)),
        SceneObject("Ü", "bbox_2d", (0, 5, 0, 999)),  # without a width, which is allowed
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "row 7 has no objects: leave it out"),
        (None, "row 7: objects is None: give a list"),
        ("cat", "row 7: objects is 'cat': give a list"),
        (["cat"], "row 7, object 1 is 'cat': give desc"),
        ([SAIL], "row 7, object 1 is a polygon, and only boxes can be trained on"),
        ([CAT, CAT | {"line": [1, 2]}], "row 7, object 2 has the key 'line', which nothing reads"),
        ([CAT | {"poly": SAIL["poly"]}], "has bbox_2d and poly: give exactly one"),
        ([{"desc": "cat"}], "has no geometry: give exactly one"),
        ([{"bbox_2d": [1, 2, 3, 4]}], "desc is None: give a text"),
        ([CAT | {"desc": "  "}], "desc is '  ': give a text"),
        ([CAT | {"desc": 5}], "desc is 5: give a text"),
        ([CAT | {"desc": "cat "}], "begins or ends with a space: strip it"),
        ([CAT | {"desc": "<|coord_5|>"}], r"contains '<|', which answers cannot hold: reword it"),
        ([CAT | {"desc": "\ud800"}], "is not valid Unicode"),
        ([CAT | {"bbox_2d": [1, 2, 3]}], r"bbox_2d is \[1, 2, 3\]: give 4 values"),
        ([CAT | {"bbox_2d": "1234"}], "bbox_2d is '1234': give 4 values"),
        ([CAT | {"bbox_2d": [5, 2, 4, 9]}], r"bbox_2d \[5, 2, 4, 9\] has its corners in the wrong order"),
        ([CAT | {"bbox_2d": [1, 9, 4, 2]}], "in the wrong order"),
        ([CAT | {"bbox_2d": [1, 2, 3, 1000]}], "the coordinate 1000, which is no bin"),
        ([CAT | {"bbox_2d": [-1, 2, 3, 4]}], "the coordinate -1, which is no bin"),
        ([CAT | {"bbox_2d": [0.1, 2, 3, 4]}], "the coordinate 0.1, which is no bin"),
        ([CAT | {"bbox_2d": [True, 2, 3, 4]}], "the coordinate True, which is no bin"),
        ([CAT | {"bbox_2d": ["<|coord_1000|>", 2, 3, 4]}], r"the coordinate '<\|coord_1000\|>', which is no bin"),
    ],
)
def test_checklist_2_what_is_wrong_is_named_with_its_sample(given, message):
    with pytest.raises(DataError, match=message) as caught:
        true_objects(given, "row 7")
    assert str(caught.value).startswith("row 7")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\tb", "a ,b", "a, b", "a /b", "a/ b", "a :b", "a: b", "a  b"])
def test_checklist_2_ambiguous_descriptions(text):
    with pytest.raises(DataError, match="which answers cannot hold"):
        true_objects([CAT | {"desc": text}], "row 7")


def test_reading_order_is_by_y_then_x_of_the_top_left_corner():
    boxes = [
        SceneObject(str(i), "bbox_2d", c)
        for i, c in enumerate([(5, 5, 9, 9), (7, 1, 9, 9), (2, 5, 3, 6), (5, 5, 6, 6)])
    ]
    assert "".join(each.desc for each in in_reading_order(boxes)) == "1203"


def test_answers_are_one_line_of_json():
    objects = true_objects([CAT, CAT | {"desc": 'a "Ü"\\', "bbox_2d": [1, 2, 30, 4]}], "row 1")
    bins = ", ".join(f'"{literal(bin_)}"' for bin_ in (1, 2, 30, 4))
    assert answer_text(objects) == (
        '{"object_1": {"desc": "black cat", "bbox_2d": ["<|coord_110|>", "<|coord_310|>", "<|coord_410|>", '
        '"<|coord_705|>"]}, "object_2": {"desc": "a \\"Ü\\"\\\\", "bbox_2d": [' + bins + "]}}"
    )
    assert answer_text([]) == "{}"


def test_each_token_of_an_answer_has_a_region():
    pieces = Pieces()
    found = tokenized(answer_fragments(true_objects([CAT], "row 1")), pieces.tokens())
    shown = [(pieces.bytes[id_].decode(), region) for id_, region in zip(found.ids, found.regions, strict=True)]
    assert shown == [
        ('{"', "structure"), ("object", "structure"), ("_", "structure"), ("1", "structure"),
        ('": {"desc": "', "structure"), ("black", "desc"), (" cat", "desc"), ('", "bbox_2d": ["', "structure"),
        ("<|coord_110|>", "coordinate"), ('", "', "structure"), ("<|coord_310|>", "coordinate"), ('", "', "structure"),
        ("<|coord_410|>", "coordinate"), ('", "', "structure"), ("<|coord_705|>", "coordinate"), ('"]}}', "structure"),
    ]  # fmt: skip
    assert found.slots == [8, 10, 12, 14]


def test_a_token_that_holds_a_part_of_a_description_belongs_to_it():
    pieces = Pieces(('"a', 'b", '))
    found = tokenized(answer_fragments([SceneObject("ab", "bbox_2d", (1, 2, 3, 4))]), pieces.tokens())
    assert [pieces.bytes[i] for i, region in zip(found.ids, found.regions, strict=True) if region == "desc"] == [
        b'"a', b'b", ',
    ]  # fmt: skip


def test_tokens_that_cannot_hold_an_answer_are_refused():
    pieces = Pieces()
    with pytest.raises(DataError, match="coordinates that are not one token each: correct its descriptions"):
        tokenized(answer_fragments([SceneObject("<|coord_5|>", "bbox_2d", (1, 2, 3, 4))]), pieces.tokens())
    tokens = pieces.tokens()
    object.__setattr__(tokens, "encode", lambda text: pieces.encode(text.lower()))
    with pytest.raises(DataError, match="does not give back the answer"):
        tokenized(answer_fragments([SceneObject("Cat", "bbox_2d", (1, 2, 3, 4))]), tokens)
