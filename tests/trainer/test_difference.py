"""What a large difference between engine and trainer looks like: causes have signatures, which the message tells."""

from __future__ import annotations

import json
import math
from functools import partial

import msgspec
import pytest
import torch

from slipstream import records
from slipstream.algo.importance_sampling import difference_means, difference_sums
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import MismatchError
from slipstream.records import SamplingParams
from slipstream.report.series import GROUPS
from slipstream.trainer.learner import Scores, score
from slipstream.trainer.metrics import explain_difference, refuse_difference
from slipstream.trainer.model.policy import PolicyModel

PROBABILITIES = (1e-9, 0.05, 0.3, 0.7, 0.95)
PLAIN = SamplingParams(max_tokens=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(
        tmp_path_factory.mktemp("model") / "model", hidden_size=64, num_layers=3, seed=3, context_length=256
    )


def sharp(path):
    """A model whose outputs are as sharp as a trained one's."""
    model = PolicyModel.load(path)
    with torch.no_grad():
        for name, weight in model.network.named_parameters():
            if "norm" not in name:
                weight.mul_(2.5)
    return model


def drawn(model, under):
    """Sequences as the engine would return them, which draws by `model` and `under`."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(4):
        ids = torch.randint(4, 90, (200,), generator=generator).tolist()
        sequences.append(records.Sequence(ids, [False] * 20 + [True] * 180))
    found = score(model, sequences, under, micro_batch_tokens=1024).logprobs
    return [
        msgspec.structs.replace(each, logprobs=[0.0] * 20 + own.tolist())
        for each, own in zip(sequences, found, strict=True)
    ]


def explained(model, sequences, sampling=PLAIN, earlier=None):
    return explain_difference(partial(score, model, micro_batch_tokens=1024), sequences, sampling, earlier)


def test_a_wrong_temperature_is_named(folder):
    model = sharp(folder)
    cooler = msgspec.structs.replace(PLAIN, temperature=0.7)
    assert explained(model, drawn(model, PLAIN), cooler).startswith(
        "temperature 1 leaves 0: the engine draws with other"
    )
    assert explained(model, drawn(model, cooler)).startswith("temperature 0.7 leaves 0: the engine")


def test_filters_that_the_engine_leaves_out_are_named(folder):
    model = sharp(folder)
    filtered = msgspec.structs.replace(PLAIN, top_p=0.9)
    text = explained(model, drawn(model, PLAIN), filtered)
    assert text.startswith(
        "the whole vocabulary, without top_p, top_k and min_p, leaves 0: the engine draws with other"
    )


def test_positions_that_are_embedded_differently_are_named(folder, tmp_path):
    model = sharp(folder)
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 1.002}
    (other / "config.json").write_text(json.dumps(config))
    text = explained(model, drawn(sharp(other), PLAIN))
    assert text.startswith("it grows with the position, from "), text
    assert text.endswith("the two embed positions differently (rope parameters, inference.max_model_len)")


def test_what_is_no_number_is_said(folder):
    model = sharp(folder)
    sequences = drawn(model, PLAIN)
    sequences[2].logprobs[60] = math.nan
    assert explained(model, sequences) == "some log-probabilities are no numbers: look at the engine's log"


def test_the_report_draws_all_places():
    bins = {
        "position": torch.tensor([0, *(2**bit for bit in range(6, 16))]),
        "probability": torch.tensor(PROBABILITIES),
    }
    num = max(map(len, bins.values()))
    filled = {name: torch.nn.functional.pad(each, (0, num - len(each))) for name, each in bins.items()}
    sums = difference_sums(torch.ones(num), filled["position"], filled["probability"].log())
    drawn = {line.metric for group in GROUPS for panel in group.panels for line in panel.lines}
    assert {name for name in drawn if "/at_" in name} == {f"mismatch/{name}" for name in difference_means(sums)}


def test_nothing_but_equality_is_exact():
    refuse_difference(0.0, "version 3")
    for value in (1e-9, math.nan):
        with pytest.raises(MismatchError, match=r"at version 3, and run\.exact = true allows no difference"):
            refuse_difference(value, "version 3")


def flat(*means, sampling=PLAIN, earlier=None):
    """What is said of sequences whose tokens have these differences, which no other parameters explain."""
    sequences = [
        records.Sequence([1, *(1 for _ in m)], [False, *(True for _ in m)], [-1.0 - value for value in (0.0, *m)])
        for m in means
    ]
    asked = []

    def forward(given, under):
        asked.append(under)
        return Scores([torch.full((each.num_trainable,), -1.0) for each in given], [])

    return explain_difference(forward, sequences, sampling, earlier), asked


def test_every_temperature_is_tried_and_the_filters_only_where_there_are_some():
    _, asked = flat([1.0] * 4)
    temperatures = [under.temperature for under in asked]
    assert temperatures == [1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0]
    cool = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=5, min_p=0.1)
    _, asked = flat([1.0] * 4, sampling=cool)
    assert (asked[0], asked[1]) == (cool, SamplingParams(max_tokens=9, temperature=0.8))
    assert [under.temperature for under in asked[2:]] == [1.0, 0.5, 0.6, 0.7, 0.9, 1.1, 1.2, 1.5, 2.0]
    assert all((under.top_p, under.top_k, under.min_p) == (1.0, 0, 0.0) for under in asked[2:])


def test_what_is_left_out_by_the_filters_is_infinite():
    assert flat([1.0] * 4, [math.inf] * 4)[0] == "the engine draws tokens that [sampling] leaves out"


def test_growth_is_from_the_first_quarter_of_the_tokens_to_the_last():
    text, _ = flat([1.0, 9.0, 9.0, 4.0], [1.0, 0.0, 0.0, 4.0])
    assert text.startswith("it grows with the position, from 1 in the first quarter of the tokens to 4 in the last")
    text, _ = flat([1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 2.0, 6.0])
    assert text.startswith("it grows with the position, from 1 in the first quarter of the tokens to 4 in the last")
    assert flat([1.0, 9.0, 9.0, 3.0])[0].startswith("it is as large everywhere: ")
    assert flat([2.0, 9.0, 9.0, 6.0])[0].startswith("it is as large everywhere: ")
    assert flat([0.01] * 4)[0].startswith("it is as large everywhere: "), (
        "a small difference is explained as a large one"
    )


@pytest.mark.parametrize(
    ("earlier", "text"),
    [
        ((1.0, 0.25), "it was 0.25 at the version before"),
        ((0.5, 0.5), "it has grown from 0.5 at first"),
        ((1.0, 1.0 / 3), "it is as large everywhere and was from the first version on: "),
        ((0.75, 0.75), "it is as large everywhere and was from the first version on: "),
    ],
)
def test_earlier_differences_decide_what_is_said(earlier, text):
    mean = 1.125 if earlier[0] == 0.75 else 1.0
    assert flat([mean] * 4, earlier=earlier)[0].startswith(text)
