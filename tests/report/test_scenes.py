"""Pictures of boxes: what is drawn, of which answers, and what becomes of images that are gone and of hostile text."""

import base64
import hashlib
import io
import json
import re
import sys

import pytest
from PIL import Image, ImageDraw

from slipstream.records import Rollout, Sequence
from slipstream.report import write_report
from slipstream.runlog.samples import sample_of
from tests.matching.matching_runs import picture
from tests.report.browser import browser, find, needs_browser
from tests.report.conftest import HOSTILE, write_run
from tests.report.test_browser import check
from tests.report.test_report import report

RED, BLUE = ("red", (100, 100, 400, 400)), ("big blue", (500, 500, 900, 950))


def answer(*objects):
    rows = enumerate(objects, 1)
    return json.dumps({f"object_{n}": {"desc": d, "bbox_2d": [f"<|coord_{at}|>" for at in b]} for n, (d, b) in rows})


def drawn(path, width=160, height=120):
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    for colour, (x1, y1, x2, y2) in (("red", RED[1]), ("blue", BLUE[1])):
        corners = (x1 * width, y1 * height, x2 * width, y2 * height)
        pen.rectangle([round(corner / 999) for corner in corners], colour)
    image.save(path)
    return path


def kept(path, number, completion, *, step=6, truths=(RED, BLUE), **changes):
    with Image.open(path) as image:
        width, height = image.size
    seen = {"uri": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "width": width, "height": height}
    sample = {"step": step, "id": f"eval.{number}", "task": f"eval_path/{number}", "prompt": "<image>Detect."}
    sample |= {"split": "eval", "answer": answer(*truths), "completion": completion, "reward": 0.5, "outcome": "done"}
    return sample | {"images": [seen], "version": "0.0"} | changes


@pytest.fixture
def detector(tmp_path):
    """A run that kept these samples."""

    def make(*samples, name="run"):
        log = write_run(tmp_path / name)
        for sample in samples:
            log.sample(sample)
        log.close()
        return tmp_path / name

    return make


def scenes_of(text):
    return re.findall(r'<figure class="scene">.*?</figure>', text, re.DOTALL)


def kinds(scene):
    return re.findall(r'<g class="box (\w+)">', scene)


def test_true_and_predicted_boxes_are_drawn_over_the_image_the_worst_first(detector, tmp_path):
    path = drawn(tmp_path / "a.png")
    near = ("red", (110, 110, 410, 400))
    samples = [
        kept(path, 1, answer(RED, BLUE)),
        kept(path, 2, answer(near, ("green", (900, 0, 999, 90)))),
        kept(path, 3, "nothing of the kind"),
        kept(path, 4, answer(near, BLUE)[:-9]),
    ]
    text, page = report(tmp_path, detector(*samples))
    found = scenes_of(text)
    assert [re.search(r"eval_path/(\d)", scene)[1] for scene in found] == ["3", "2", "4", "1"]
    assert kinds(found[0]) == ["missed", "missed"]
    assert kinds(found[1]) == ["truth", "missed", "match", "wrong"]
    assert kinds(found[2]) == ["truth", "missed", "match"]
    assert kinds(found[3]) == ["truth", "truth", "match", "match"]
    assert "0 of 2 found · F1 0" in found[0]
    assert "1 of 2 found · 1 matching nothing · F1 0.5000 · mean overlap 0.9" in found[1]
    assert "1 part of the answer not valid" in found[2]
    assert "2 of 2 found · F1 1 · mean overlap 1" in found[3]
    assert 'viewBox="0 0 320 240"' in found[0]
    # Bin 100 of 999 on 320 x 240 units, and 300 bins on.
    assert '<rect x="32.0" y="24.0" width="96.1" height="72.1"/>' in found[3]
    assert "All 4 held-out answers that were kept of step 6, the worst first" in page.words
    data = base64.b64decode(re.search(r'href="data:image/jpeg;base64,([^"]+)"', found[0])[1])
    assert Image.open(io.BytesIO(data)).size == (160, 120), "nothing is scaled up"


def test_of_many_the_worst_and_the_best_are_shown_and_the_report_stays_small(detector, tmp_path):
    path = tmp_path / "noise.png"
    Image.effect_noise((1600, 1200), 90).save(path)
    edges = range(20, 300, 10)
    samples = [kept(path, edge, answer(("red", (100 + edge, 100, 400 + edge, 400)), BLUE)) for edge in edges]
    plain = len(report(tmp_path, detector(name="plain"))[0])
    text, page = report(tmp_path, detector(*samples, kept(path, 1, answer(RED, BLUE), step=3)))
    found = scenes_of(text)
    # Beyond 160 bins aside the red one matches nothing: all of these have the same figures.
    assert [re.search(r"eval_path/(\d+)", scene)[1] for scene in found] == ["170", "180", "190", "40", "30", "20"]
    assert f"6 of the {len(edges)} held-out answers that were kept of step 6" in page.words
    images = re.findall(r'href="data:image/jpeg;base64,([^"]+)"', text)
    assert len(images) == 6
    assert {Image.open(io.BytesIO(base64.b64decode(image))).size for image in images} == {(320, 240)}
    assert len(text) - plain < 600_000


def test_training_answers_are_shown_where_none_was_held_out(detector, tmp_path):
    path = drawn(tmp_path / "a.png")
    sample = kept(path, 1, answer(RED), id="4.1")
    del sample["split"]
    _, page = report(tmp_path, detector(sample))
    assert "All 1 training answers that were kept of step 6" in page.words


def test_an_image_that_is_gone_or_another_leaves_its_boxes(detector, tmp_path):
    paths = [drawn(tmp_path / f"{number}.png") for number in range(3)]
    samples = [kept(path, number, answer(RED)) for number, path in enumerate(paths)]
    paths[0].unlink()
    drawn(paths[1], 200, 120)
    del samples[2]["images"][0]["uri"]
    found = scenes_of(report(tmp_path, detector(*samples))[0])
    assert [kinds(scene) for scene in found] == [["truth", "missed", "match"]] * 3
    assert not any("<image" in scene for scene in found)
    assert ["the image is gone, or not the one that the run saw" in scene for scene in found] == [True, True, False]
    assert "the run kept no path of the image" in found[2]


def test_hostile_descriptions_stay_text(detector, tmp_path):
    path = drawn(tmp_path / "a.png")
    hostile = HOSTILE.replace("\x00", "").replace("\x1b", "").replace("\u202e", "")
    text, _ = report(tmp_path, detector(kept(path, 1, answer((hostile, RED[1])), task=HOSTILE)))
    (scene,) = scenes_of(text)
    assert kinds(scene) == ["truth", "missed", "match"]
    assert [each in scene for each in ("window.hacked", "<img", "<script")] == [True, False, False]


def test_the_runs_gate_decides_what_matches(detector, tmp_path):
    path = drawn(tmp_path / "a.png")
    folder = detector(kept(path, 1, answer(("red", (150, 150, 450, 450)))))
    assert kinds(scenes_of(report(tmp_path, folder)[0])[0]) == ["truth", "missed", "match"]
    settings = folder / "resolved.toml"
    settings.write_text(settings.read_text() + "[matching]\nmaskiou_gate = 0.9  # run.toml:9\n")
    assert kinds(scenes_of(report(tmp_path, folder)[0])[0]) == ["missed", "missed", "wrong"]


def test_an_answer_of_very_many_boxes_is_cut(detector, tmp_path):
    path = drawn(tmp_path / "a.png")
    many = answer(*[("red", (number, 0, number + 9, 9)) for number in range(300)])
    (scene,) = scenes_of(report(tmp_path, detector(kept(path, 1, many)))[0])
    assert len(kinds(scene)) == 102
    assert "only the first 100 are drawn" in scene


@pytest.mark.parametrize(
    "change",
    [
        {"images": []},
        {"images": None},
        {"images": "a.png"},
        {"images": ["a.png"]},
        {"images": [{"uri": "a.png"}]},
        {"images": [{"uri": "a.png", "sha256": "x", "width": 0, "height": 4}]},
        {"answer": "2"},
        {"answer": None},
        {"answer": "{}"},
        {"completion": None},
        {"outcome": "engine_error"},
    ],
)
def test_what_is_no_detectors_answer_has_no_picture(detector, tmp_path, change):
    sample = kept(drawn(tmp_path / "a.png"), 1, answer(RED)) | change
    text, page = report(tmp_path, detector(sample))
    assert scenes_of(text) == []
    assert 'id="boxes"' not in text
    assert "Rollouts" in page.words


def test_without_scipy_a_sentence_takes_the_pictures_place(detector, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    _, page = report(tmp_path, detector(kept(drawn(tmp_path / "a.png"), 1, answer(RED))))
    assert "Boxes are not shown: matching needs the package scipy" in page.words


def test_several_runs_have_their_own(detector, tmp_path):
    path = drawn(tmp_path / "a.png")
    folders = [detector(kept(path, number, answer(RED)), name=f"run-{number}") for number in (1, 2)]
    assert len(scenes_of(report(tmp_path, *folders)[0])) == 2


def test_samples_refer_to_their_images_without_bytes(tmp_path):
    inline = picture(0)
    path = drawn(tmp_path / "a.png")
    sequence = Sequence([1], [True], media=[inline, inline])
    rollout = Rollout("0.0.0", "t", "0.0", [sequence], 0.0, "done", completion="x")
    assert sample_of(rollout, 0, "0.0")["images"] == [{"sha256": inline.sha256, "width": 64, "height": 64}]
    sequence.media = []
    assert "images" not in sample_of(rollout, 0, "0.0")
    assert path.exists()


SCENES = """
[...document.querySelectorAll(".scene")].map(scene => {
  const svg = scene.querySelector("svg").getBoundingClientRect(), image = scene.querySelector("image");
  const rects = [...scene.querySelectorAll("rect")].map(rect => rect.getBoundingClientRect());
  const inside = rects.every(r => r.left >= svg.left - 2 && r.right <= svg.right + 2 && r.bottom <= svg.bottom + 2);
  const strokes = new Set([...scene.querySelectorAll("rect")].map(rect => getComputedStyle(rect).stroke));
  return [svg.width > 100 && svg.height > 50, !!image && image.getBBox().width, inside, strokes.size];
})
"""


@needs_browser
async def test_pictures_in_a_real_browser(detector, tmp_path):
    path = drawn(tmp_path / "a.png", 400, 300)
    tall = drawn(tmp_path / "tall.png", 150, 400)
    samples = [
        kept(path, 1, answer(RED, BLUE)),
        kept(path, 2, answer(("red", (110, 120, 410, 420)), ("green thing", (850, 20, 990, 120)))),
        kept(tall, 3, answer(("red", (130, 90, 420, 420)), BLUE)),
        kept(path, 4, "nothing of the kind"),
    ]
    made = write_report([detector(*samples)], tmp_path / "boxes.html")
    async with browser(find()) as page:
        for width in (1280, 400):
            await check(page, made, width)
            found = await page.ask(SCENES)
            assert [scene[1] for scene in found] == [320, 320, 120, 320]
            assert all(scene[0] and scene[2] for scene in found)
            assert [scene[3] for scene in found] == [1, 4, 2, 2]
        await check(page, made, 1280, dark=True)
