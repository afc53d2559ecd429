"""The environment `detection`: rows, their mistakes, and F1 as the reward."""

import json

import pytest
from PIL import Image

from slipstream.config.environment import EnvironmentConfig
from slipstream.envs.registry import load_environment
from slipstream.errors import ConfigError, DataError

GOOD = {"images": ["a.png"], "objects": [{"desc": "cat", "bbox_2d": [10, 20, 300, 400]}], "width": 64, "height": 48}


@pytest.fixture
def environment(tmp_path):
    """Of rows, with an image of 64 x 48 pixels beside them."""
    Image.new("RGB", (64, 48), "white").save(tmp_path / "a.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "a.png").read_bytes()[:-30])
    (tmp_path / "words.png").write_text("no picture")

    def make(*rows, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"path": str(path), "eval_path": str(path), **settings}
        return load_environment(EnvironmentConfig(name="detection", settings=given))

    return make


def answer(*objects):
    return json.dumps(
        {
            f"object_{number}": {"desc": desc, "bbox_2d": [f"<|coord_{bin_}|>" for bin_ in box]}
            for number, (desc, box) in enumerate(objects, 1)
        }
    )


def test_a_row_is_a_task_with_its_image_objects_and_answer(environment):
    second = {
        **GOOD,
        "prompt": "Which animals?",
        "objects": [*GOOD["objects"], {"desc": "dog", "bbox_2d": [1, 2, 3, 4]}],
    }
    found = environment(GOOD, second, prompt="Detect.").tasks("train", 10)
    assert [task.prompt[0].content for task in found] == ["<image>Detect.", "<image>Which animals?"]
    assert found[0].prompt[0].media[0].width == 64
    assert found[0].answer == answer(("cat", (10, 20, 300, 400)))
    assert found[1].answer == answer(("dog", (1, 2, 3, 4)), ("cat", (10, 20, 300, 400)))
    assert found[1].info["objects"][0] == {"desc": "cat", "bbox_2d": [10, 20, 300, 400]}


def test_one_image_in_ten_is_held_out_by_its_content(tmp_path):
    rows = []
    for number in range(60):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({**GOOD, "images": [f"{number}.png"], "width": 8, "height": 8})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"path": str(tmp_path / "rows.jsonl")}
    made = load_environment(EnvironmentConfig(name="detection", settings=settings))
    train, held_out = (made.tasks(split, 100) for split in ("train", "eval"))
    assert len(train) + len(held_out) == 60
    assert 0 < len(held_out) < 20
    digests = [{task.prompt[0].media[0].sha256 for task in tasks} for tasks in (train, held_out)]
    assert not digests[0] & digests[1]


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (answer(("cat", (10, 20, 300, 400))), 1.0),
        (answer(("another", (12, 25, 310, 390))), 1.0),  # by masks, not by names
        (answer(("cat", (10, 20, 300, 400)), ("cat", (600, 600, 700, 700))), pytest.approx(2 / 3)),
        (answer(("cat", (600, 600, 700, 700))), 0.0),
        (answer(("cat", (10, 20, 300, 400)))[:-1], 1.0),  # truncated after a closed object
        ("{}", 0.0),
        ("a cat, é", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_f1_without_repair(environment, said, reward):
    made = environment(GOOD)
    (task,) = made.tasks("train", 1)
    assert made.score(task, said).reward == reward


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"images": ["b.png"]}, "b.png"),
        ({"images": None}, "has no image: give the column images"),
        ({"images": ["a.png", "b.png"]}, "b.png"),
        ({"objects": None}, "give a list of objects"),
        ({"objects": []}, "has no objects: leave it out"),
        ({"width": 63}, "says 63 x 48 pixels, and its image has 64 x 48"),
        ({"width": 0}, "width is 0: give a number of pixels"),
        ({"height": "48"}, "height is '48'"),
        ({"prompt": 3}, "prompt is 3: give a text"),
        ({"boxes": []}, "has the key 'boxes', which nothing reads"),
        ({"images": ["torn.png"]}, "cannot be decoded"),
        ({"images": ["words.png"]}, "in no known format of images"),
        ({"images": ["https://a.org/b.png"]}, "lies on a network"),
        ({"prompt": "<image> or <image>?"}, "images holds 1 images, and the messages have 2 places"),
    ],
)
def test_a_broken_row_is_one_sentence_with_its_file_and_number(environment, change, sentence):
    made = environment(GOOD, {**GOOD, **change})
    with pytest.raises(DataError) as caught:
        made.tasks("train", 10)
    text = str(caught.value)
    assert sentence in text
    assert "rows.jsonl" in text
    assert "2" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"order": "random"}, "has no such setting"), ({"prompt": ""}, "is not a text"), ({"path": 3}, "is not a text")],
)
def test_settings_are_checked(environment, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        environment(GOOD, **settings)


def test_a_path_is_needed():
    with pytest.raises(ConfigError, match=r"environment\.settings\.path is missing"):
        load_environment(EnvironmentConfig(name="detection"))
