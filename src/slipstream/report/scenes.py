"""Draws what a detector answered: true boxes, predicted ones and their matches over the image, of the worst and the
best kept answers.

Whatever the settings say, a rollout is one of a detector if it saw an image and its right answer lists objects. Images
are scaled down and embedded; one that has gone or changed leaves its boxes on an empty canvas. `MOST` pictures of
`_SIDE` pixels bound the size of a report.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from slipstream.data.images.reading import bytes_of, decoded
from slipstream.errors import SlipstreamError
from slipstream.records import TRAINABLE_OUTCOMES, Media
from slipstream.report.headline import setting
from slipstream.report.markup import Child, Html, h, join, number
from slipstream.runlog import RunRecord
from slipstream.runlog.samples import sample_id
from slipstream_matching.coordinates import fraction_of
from slipstream_matching.matching import Matching, MatchSettings, match
from slipstream_matching.objects import SceneObject
from slipstream_matching.text_tokens import parsed_text

MOST = 6
"""Pictures, half of them of the worst answers and half of the best."""
_SIDE = 320
"""Of a picture's longer side, in pixels of the image and units of the drawing."""
_QUALITY = 80
_LABEL = 24
"""Characters of a description on a picture."""
_LETTER = 6.5
"""About the width of a letter on a picture."""
_BOXES = 100
"""Boxes drawn of each kind: an answer that repeats itself may have thousands."""
_KINDS = {
    "truth": "true, found",
    "missed": "true, missed",
    "match": "predicted, matched",
    "wrong": "predicted, matching nothing",
}


@dataclass(frozen=True)
class _Scene:
    sample: Mapping[str, Any]
    image: Media
    truths: list[SceneObject]
    predictions: list[SceneObject]
    num_dropped: int
    matching: Matching

    @property
    def f1(self) -> float:
        return 2 * len(self.matching.pairs) / (len(self.predictions) + len(self.truths))

    @property
    def iou(self) -> float:
        """Mean over the matches, 0 without one."""
        pairs = self.matching.pairs
        return sum(pair.iou for pair in pairs) / len(pairs) if pairs else 0.0


def scenes(record: RunRecord) -> Html | None:
    """The section; None for a run that kept no answer of a detector."""
    candidates = [sample for sample in record.samples if sample.get("images") and _is_graded(sample)]
    held_out = [sample for sample in candidates if sample.get("split") == "eval"]
    of = held_out or candidates
    last = max((sample["step"] for sample in of), default=0)
    try:
        found = [scene for each in of if each["step"] == last and (scene := _scene(each, _settings(record)))]
    except SlipstreamError as error:  # without scipy nothing can be matched
        return h("p.missing", f"Boxes are not shown: {error}")
    if not found:
        return None
    ranked = sorted(found, key=lambda scene: (scene.f1, scene.iou))
    shown = ranked if len(ranked) <= MOST else [*ranked[: MOST // 2], *ranked[-(MOST // 2) :]]
    which = f"{'held-out' if held_out else 'training'} answers that were kept of step {last}, the worst first"
    words = f"All {len(ranked)} {which}" if shown is ranked else f"{len(shown)} of the {len(ranked)} {which}"
    keys = [h("span.key", h("i", class_=f"box {kind}"), text) for kind, text in _KINDS.items()]
    return join(
        h("p.note", f"{words}. Boxes are matched by their overlap, descriptions play no part."),
        h("p.legend", keys),
        h("div.scenes", [_figure(scene) for scene in shown]),
    )


def _is_graded(sample: Mapping[str, Any]) -> bool:
    texts = sample.get("answer"), sample.get("completion")
    return all(isinstance(text, str) for text in texts) and sample.get("outcome", "done") in TRAINABLE_OUTCOMES


def _settings(record: RunRecord) -> MatchSettings:
    """Those of the run's [matching], else the defaults."""
    found = asdict(MatchSettings())
    for name, usual in found.items():
        with contextlib.suppress(ValueError):
            found[name] = type(usual)(setting(record, f"matching.{name}"))
    return MatchSettings(**found)


def _scene(sample: Mapping[str, Any], settings: MatchSettings) -> _Scene | None:
    """None where the right answer is no list of objects, or what was kept of the image is damaged."""
    truth = parsed_text(sample["answer"])
    if not truth.objects or truth.dropped or truth.is_truncated or (image := _image(sample["images"])) is None:
        return None
    answer = parsed_text(sample["completion"])
    truths, predictions = ([each.value for each in found.objects] for found in (truth, answer))
    matching = match(predictions, truths, settings)
    return _Scene(sample, image, truths, predictions, len(answer.dropped), matching)


def _image(images: Any) -> Media | None:
    """The first image, as the sample refers to it."""
    if not isinstance(images, list) or not isinstance(images[0], dict):
        return None
    image = cast("Mapping[str, Any]", images[0])
    width, height, digest = image.get("width"), image.get("height"), image.get("sha256")
    if not (isinstance(width, int) and isinstance(height, int) and isinstance(digest, str)) or min(width, height) < 1:
        return None
    return Media("image", str(image.get("uri", "")), digest, width=width, height=height)


def _figure(scene: _Scene) -> Html:
    scale = _SIDE / max(scene.image.width, scene.image.height)
    width, height = (max(1, round(scale * side)) for side in (scene.image.width, scene.image.height))
    picture, problem = _embedded(scene.image)
    drawn = h(
        "svg",
        h("title", f"boxes of {scene.sample.get('task', '')}"),
        h("image", href=picture, width=width, height=height) if picture else None,
        _boxes(scene, width, height),
        viewBox=f"0 0 {width} {height}",
        role="img",
    )
    return h("figure.scene", drawn, h("figcaption", _caption(scene, problem)))


def _boxes(scene: _Scene, width: int, height: int) -> list[Html]:
    """Rectangles with their descriptions, predicted ones over true ones."""
    of_truth = {pair.truth: pair for pair in scene.matching.pairs}
    of_prediction = {pair.prediction: pair for pair in scene.matching.pairs}
    true = [("truth" if place in of_truth else "missed", each) for place, each in enumerate(scene.truths)]
    predicted = [("match" if place in of_prediction else "wrong", each) for place, each in enumerate(scene.predictions)]
    found: list[Html] = []
    for kind, each in [*true[:_BOXES], *predicted[:_BOXES]]:
        x1, x2 = (round(width * fraction_of(bin_), 1) for bin_ in each.bounds[::2])
        y1, y2 = (round(height * fraction_of(bin_), 1) for bin_ in each.bounds[1::2])
        told = h("title", f"{_KINDS[kind]}: {each.desc[:200]}")
        frame = h("rect", x=x1, y=y1, width=round(x2 - x1, 1), height=round(y2 - y1, 1))
        # True ones are named above their upper edge, predicted ones within their lower edge.
        y = max(11.0, y1 - 3) if kind in ("truth", "missed") else min(height - 3.0, y2 - 4)
        name = each.desc if len(each.desc) <= _LABEL else f"{each.desc[:_LABEL]}\u2026"
        is_left = x1 + _LETTER * len(name) <= width or x1 < width / 2
        place = {"x": round(x1 + 2 if is_left else x2 - 2, 1), "y": round(y, 1)}
        text = h("text", name, **place, text_anchor=None if is_left else "end")
        found.append(h("g", told, frame, text, class_=f"box {kind}"))
    return found


def _caption(scene: _Scene, problem: str) -> list[Child]:
    pairs, sample = scene.matching.pairs, scene.sample
    wrong, dropped = len(scene.matching.false_positives), scene.num_dropped
    facts = [
        f"{len(pairs)} of {len(scene.truths)} found",
        f"{wrong} matching nothing" if wrong else "",
        f"{dropped} part{'s' * (dropped > 1)} of the answer not valid" if dropped else "",
        f"F1 {number(scene.f1)}",
        f"mean overlap {number(scene.iou)}" if pairs else "",
        f"only the first {_BOXES} are drawn" if max(len(scene.truths), len(scene.predictions)) > _BOXES else "",
        problem,
    ]
    name = f"{sample.get('task', '')} · {sample_id(str(sample.get('id', '')), sample['step'])}"
    return [h("p.task", name), h("p.note", " · ".join(filter(None, facts)))]


def _embedded(image: Media) -> tuple[str, str]:
    """The image as a `data:` URI, scaled down, and why it is not there."""
    if not image.uri:
        return "", "the run kept no path of the image"
    try:
        picture = decoded(bytes_of(image), "the image")
    except SlipstreamError:
        return "", "the image is gone, or not the one that the run saw"
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}", ""
