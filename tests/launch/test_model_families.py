"""What the plan says of models that are not the common kind."""

import dataclasses
import json
import re

import pytest

from slipstream.config import with_values
from slipstream.launch import make_plan
from slipstream.launch.facts import read_model

from .test_facts import SHAPE
from .test_plan import SFT, SFT_DATA, facts, plan


def test_the_plan_says_which_of_two_sets_of_rotary_factors_is_trained():
    for length, says in ((256, "is within it.*short factors.*within it, too"), (257, "is above it.*long factors")):
        made = plan({"inference.max_model_len": length}, original_context=256)
        (note,) = [note for note in made.notes if note.name == "original context"]
        assert note.value == 256
        assert re.search(says, note.how)
    assert not [note for note in plan().notes if note.name == "original context"]


def test_under_sft_the_longest_conversation_decides_the_rotary_factors():
    for original, evaluation, length in ((85, None, 90), (85, SFT.evaluation, 96), (0, SFT.evaluation, 80)):
        measured = dataclasses.replace(facts(original_context=original), data=SFT_DATA)
        made = make_plan(SFT.model_copy(update={"evaluation": evaluation}), measured)
        assert made.config.inference.max_model_len == length
        assert not made.warnings
    measured = dataclasses.replace(facts(original_context=85), data=SFT_DATA)
    (warning,) = make_plan(with_values(SFT, {"inference.max_model_len": 85}), measured).warnings
    assert "conversations of up to 90 tokens" in warning


@pytest.mark.parametrize(
    ("rotary", "original"),
    [
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "other": {"rope_type": "default"}}}, 512),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32}}, 0),
        ({"rope_scaling": None}, 0),
    ],
)
def test_the_original_context_is_read(rotary, original, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | rotary))
    assert read_model(str(tmp_path)).original_context == original
