"""What the tests of rollout matching share: a small detector, tasks and rollouts."""

import io
from types import SimpleNamespace

from PIL import Image, ImageDraw

from slipstream import records
from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.images.reading import read_image
from slipstream_matching.answer import answer_fragments, tokenized
from slipstream_matching.answers import answer_tokens
from slipstream_matching.coordinates import LITERALS
from slipstream_matching.objects import SceneObject
from slipstream_matching.row_boxes import APPENDED, BINS, IN_ROLLOUT, ORIGINS, WEIGHTS
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.targets import examples_of

BOXES = ([("red", [10, 20, 300, 400])], [("big blue", [0, 0, 999, 500]), ("tiny", [7, 600, 90, 700])])


def picture(seed):
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).rectangle((4 * seed, 8, 40, 30), fill=("red", "blue", "green")[seed])
    file = io.BytesIO()
    image.save(file, "PNG")
    return read_image(file.getvalue(), "picture")


def task(number, described):
    objects = [{"desc": desc, "bbox_2d": box} for desc, box in described]
    prompt = (records.Message("user", "<image>Find all.", (picture(number),)),)
    return records.Task(f"{number}", prompt, info={"objects": objects})


def new_detector(folder, tokenizer="char"):
    """A small detector's folder, tokenizer and tokens, its tasks and channel A's sequences."""
    new_vision_model(folder, tokenizer=tokenizer, num_layers=2, hidden_size=64, num_heads=2, added_tokens=LITERALS)
    chat = ChatTokenizer(folder)
    tokens = answer_tokens(chat)
    tasks = [task(number, described) for number, described in enumerate(BOXES)]
    examples = examples_of(tasks, chat, tokens, MatchingConfig(), 512)
    return SimpleNamespace(folder=folder, tokenizer=chat, tokens=tokens, tasks=tasks, examples=examples)


def answer_ids(detector, *objects):
    """The tokens of a whole answer, the end of the turn included."""
    scene = [SceneObject(desc, "bbox_2d", box) for desc, box in objects]
    return [*tokenized(answer_fragments(scene), detector.tokens).ids, detector.tokens.end_id]


def target_of(sequence):
    """What the streams of a sequence say: the weight of each token, its boxes by their slots, whether it is of a
    rollout."""
    places = [place for place, is_trained in enumerate(sequence.mask) if is_trained]
    weights, bins, origins = (sequence.values(name) for name in (WEIGHTS, BINS, ORIGINS))
    every = dict(zip(places, weights, strict=True))
    slots = [(place, int(bin_), origin) for place, bin_, origin in zip(places, bins, origins, strict=True) if bin_ >= 0]
    boxes = [slots[first : first + 4] for first in range(0, len(slots), 4)]
    return SimpleNamespace(
        weights=[every.get(place, 0.0) for place in range(len(sequence))],
        boxes=[
            SimpleNamespace(
                slots=tuple(place for place, _, _ in box),
                coordinates=tuple(bin_ for _, bin_, _ in box),
                is_appended=box[0][2] != IN_ROLLOUT,
            )
            for box in boxes
        ],
        is_rollout=any(origin in (IN_ROLLOUT, APPENDED) for *_, origin in slots),
    )


def rollout(detector, number, ids, step=0, outcome="done"):
    """What the engine made of a task."""
    prompt_ids = detector.tokenizer.render(detector.tasks[number].prompt)
    media = list(detector.tokenizer.place_images(detector.tasks[number].prompt, prompt_ids))
    sequence = records.Sequence([*prompt_ids, *ids], [False] * len(prompt_ids) + [True] * len(ids), media=media)
    text = detector.tokenizer.decode(ids)
    return records.Rollout(
        f"{step}.{number}", str(number), f"{step}.{number}", [sequence], 0.0, outcome, completion=text
    )
