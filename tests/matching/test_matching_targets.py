"""From tasks and rollouts to what is trained on: masks token by token, drops, figures."""

import pytest
from tests.matching.matching_runs import answer_ids, new_detector, rollout, target_of, task

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import ConfigError, DataError
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.method import with_figures
from slipstream_matching.answers import answer_tokens
from slipstream_matching.coordinates import LITERALS
from slipstream_matching.image_rows import Detection
from slipstream_matching.method import Matching
from slipstream_matching.settings import MatchingConfig
from slipstream_matching.targets import (
    conversations_of,
    detection_metrics,
    examples_of,
    matched,
)


@pytest.fixture(scope="module", params=["char", "byte"])
def detector(request, tmp_path_factory):
    return new_detector(tmp_path_factory.mktemp("detector") / "model", request.param)


def shown(detector, sequence):
    """The trained text: what has a weight as it is, coordinates of boxes as `#`, the rest as `.`, a character each."""
    slots = {slot for box in target_of(sequence).boxes for slot in box.slots}
    weights = target_of(sequence).weights
    found = []
    for place, id_ in enumerate(sequence.token_ids):
        text = detector.tokens.piece(id_).decode()
        if place in slots:
            assert sequence.mask[place]
            assert weights[place] == 0.0
            found.append("#")
        else:
            assert sequence.mask[place] == (weights[place] > 0.0)
            found.append(text if sequence.mask[place] else "." * (1 if text in LITERALS else len(text)))
    return "".join(found)


def match(detector, number, ids, *, times=1, longest=512):
    """What becomes of a rollout of this task, as often as that."""
    rollouts, tasks = [rollout(detector, number, ids)] * times, [detector.tasks[number]] * times
    return matched(rollouts, tasks, detector.tokens, MatchingConfig(), longest)


def after_prompt(detector, number, text):
    prompt = detector.tokenizer.render(detector.tasks[number].prompt)
    length = sum(len(detector.tokens.piece(id_).decode()) for id_ in prompt)
    assert text[:length] == "." * length
    return text[length:]


def test_channel_a_trains_the_whole_answer_and_its_end(detector):
    text = after_prompt(detector, 1, shown(detector, detector.examples[1]))
    assert text == (
        '{"object_1": {"desc": "big blue", "bbox_2d": ["#", "#", "#", "#"]}, '
        '"object_2": {"desc": "tiny", "bbox_2d": ["#", "#", "#", "#"]}}<|im_end|>'
    )
    boxes = target_of(detector.examples[1]).boxes
    assert [box.coordinates for box in boxes] == [(0, 0, 999, 500), (7, 600, 90, 700)]
    assert all(
        tuple(detector.tokens.bins[detector.examples[1].token_ids[slot]] for slot in box.slots) == box.coordinates
        for box in boxes
    )


def test_channel_b_trains_matched_json_and_what_was_missed(detector):
    ids = answer_ids(detector, ("x", (500, 500, 600, 600)), ("tinny", (9, 590, 95, 705)))
    found = match(detector, 1, ids)
    (trained,) = found.rollouts
    (sequence,) = trained.sequences
    text = after_prompt(detector, 1, shown(detector, sequence))
    context = len('{"object_1": {"desc": "x", "bbox_2d": ["#", "#", "#", "#"]}, "object_2": ')
    assert text[:context] == "." * context
    assert text[context:] == (
        '{"desc": ".....", "bbox_2d": ["#", "#", "#", "#"]}, '
        '"object_3": {"desc": "big blue", "bbox_2d": ["#", "#", "#", "#"]}}<|im_end|>'
    )
    boxes = [(box.coordinates, box.is_appended) for box in target_of(sequence).boxes]
    assert boxes == [((7, 600, 90, 700), False), ((0, 0, 999, 500), True)]
    assert target_of(sequence).is_rollout
    num_prompt = len(detector.tokenizer.render(detector.tasks[1].prompt))
    kept = len(ids) - 2  # neither the last brace nor the end of the turn
    assert sequence.token_ids[num_prompt : num_prompt + kept] == ids[:kept]
    assert sequence.media == rollout(detector, 1, ids).sequences[0].media


def test_what_a_rollout_gets_wrong_changes_no_target(detector):
    def texts(wrong):
        ids = answer_ids(detector, ("tiny", (9, 590, 95, 705)), wrong)
        return shown(detector, match(detector, 1, ids).rollouts[0].sequences[0])

    assert texts(("x", (500, 500, 600, 600))) == texts(("y", (1, 980, 7, 999)))


@pytest.mark.parametrize("text", ["", "no json at all", '{"object_1": {"desc": "a", "bbox'])
def test_an_invalid_rollout_is_trained_on_the_true_objects_and_counted(detector, text):
    ids = detector.tokenizer.plain_tokens(text)
    found = match(detector, 0, ids)
    metrics = found.metrics()
    assert (metrics["stage2/invalid_rollout"], metrics["stage2/empty_rollout"], metrics["rollout/f1"]) == (1, 0, 0)
    assert found.invalid == [rollout(detector, 0, ids).completion]
    trained = shown(detector, found.rollouts[0].sequences[0])
    assert '"object_1": {"desc": "red", "bbox_2d": ["#", "#", "#", "#"]}}<|im_end|>' in trained


def test_a_whole_answer_of_nothing_is_counted_apart(detector):
    ids = [*detector.tokenizer.plain_tokens("{}"), detector.tokens.end_id]
    metrics = match(detector, 0, ids).metrics()
    assert (metrics["stage2/invalid_rollout"], metrics["stage2/empty_rollout"]) == (0, 1)


def test_a_rollout_that_leaves_the_context_is_dropped_and_counted(detector):
    ids = answer_ids(detector, ("tiny", (9, 590, 95, 705)))
    found = match(detector, 1, ids, longest=100)
    assert not found.rollouts
    assert found.metrics()["dropped/too_long"] == 1


def test_lengths_add_up(detector):
    ids = answer_ids(detector, ("tiny", (9, 590, 95, 705)))
    metrics = match(detector, 1, ids, times=2).metrics()
    mean = {name: metrics[f"rollout/{name}_mean"] for name in ("prompt_len", "prefix_len", "append_len", "encoded_len")}
    assert mean["encoded_len"] == mean["prompt_len"] + mean["prefix_len"] + mean["append_len"]
    assert metrics["rollout/rollout_len_p90"] == len(ids)
    assert all(value == value for value in metrics.values())


def test_figures_of_an_evaluation_are_those_of_all_objects(detector):
    right = answer_ids(detector, ("big blue", (0, 0, 999, 500)), ("tiny", (7, 600, 90, 700)))
    wrong = answer_ids(detector, ("red", (900, 900, 950, 950)))
    failed = rollout(detector, 0, [])
    failed.outcome = "engine_error"
    tasks = [detector.tasks[1], detector.tasks[0], detector.tasks[0]]
    rollouts = [rollout(detector, 1, right), rollout(detector, 0, wrong), failed]
    found = detection_metrics(tasks, rollouts, detector.tokenizer, MatchingConfig())
    assert found["eval/precision"] == pytest.approx(2 / 3)
    assert found["eval/recall"] == pytest.approx(2 / 4)
    assert found["eval/f1"] == pytest.approx(4 / 7)
    assert found["eval/matched_maskiou_mean"] == 1.0
    assert found["eval/num_objects"] == 4


@pytest.mark.parametrize("gate", [None, 0.3, 0.95])
def test_one_definition_of_a_match(detector, gate):
    """Of the reward, of the figures, and of both where a model's address sends texts only."""
    environment = Detection(path="rows.jsonl")
    method = None if gate is None else Matching(MatchingConfig(maskiou_gate=gate))
    near = answer_ids(detector, ("big blue", (0, 0, 999, 470)), ("tiny", (7, 600, 90, 700)))
    tasks = detector.tasks[1:] if method is None else method.tasks(detector.tasks[1:])
    made = rollout(detector, 1, near)
    made.reward = environment.score(tasks[0], made.completion).reward
    found = Evaluation(1, 0, 0, made.reward, 0.0, 0.0, rollouts=[made])
    received = (detector.tokenizer, None)
    figures = [with_figures(found, tasks, environment, method, each).metrics() for each in received]
    assert figures[0] == figures[1]
    assert figures[0]["eval/f1"] == figures[0]["eval/reward"] == (0.5 if gate == 0.95 else 1.0)


def test_order_of_objects(detector):
    given = task(1, [("low", [0, 500, 10, 600]), ("high", [0, 1, 10, 100])])
    first = {}
    for order in ("sorted", "as_given"):
        config = MatchingConfig(object_order=order)
        examples = examples_of([given], detector.tokenizer, detector.tokens, config, 512)
        first[order] = target_of(examples[0]).boxes[0].coordinates
    assert first == {"sorted": (0, 1, 10, 100), "as_given": (0, 500, 10, 600)}


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ([], "has no objects: leave it out"),
        ([("a", [5, 5, 1, 9])], "corners in the wrong order"),
        ([("a", [0, 0, 1000, 9])], "no bin"),
        ([("a", [0, 0, 9])], "give 4 values"),
        ([("<|coord_5|>", [0, 0, 9, 9])], "contains '<|'"),
        ([("a, b", [0, 0, 9, 9])], "reword it"),
        ([("a", [0, 0, 9, 9])] * 12, "more than the model's context of 512 tokens"),
    ],
)
def test_tasks_that_cannot_be_trained_on_are_named(detector, described, sentence):
    given = task(2, described)
    with pytest.raises(DataError, match=rf"^task 2\b.*{sentence.replace('|', '[|]')}"):
        examples_of([given], detector.tokenizer, detector.tokens, MatchingConfig(), 512)


def test_an_environment_of_several_turns_is_refused():
    (conversation,) = conversations_of([task(0, [("red", [1, 2, 3, 4])])], MatchingConfig(), 1)
    assert conversation[-1].role == "assistant"
    with pytest.raises(ConfigError, match=r"matches one answer .* up to 3 turns: use one of a single turn"):
        conversations_of([], MatchingConfig(), 3)


def test_a_tokenizer_without_coordinates_is_refused(tmp_path):
    folder = new_vision_model(tmp_path / "model", num_layers=1, hidden_size=64, num_heads=2, added_tokens=LITERALS[1:])
    with pytest.raises(ConfigError, match=r"model\.path = .*: the tokenizer has no token <\|coord_0\|>"):
        answer_tokens(ChatTokenizer(folder))
