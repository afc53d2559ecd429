"""[matching]: what has no effect, and what cannot be run."""

import pytest

from slipstream.config import load_settings
from slipstream.config.checks import inapplicable
from slipstream.config.schema import RunConfig
from slipstream.config.traits import rolls_out, uses_engine
from slipstream.errors import ConfigError

DETECTION = {"name": "detection", "settings": {"path": "rows.jsonl"}}


def config(matching, evaluation=None, **sections):
    given = {"environment": DETECTION, "algorithm": {"kind": "sft"}, **sections}
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "matching": matching, "evaluation": evaluation, "training": {"steps": 3}, **given}
    )


def load(**sections):
    given = {"model": {"path": "m"}, "environment": DETECTION, "algorithm": {"kind": "sft"}, "matching": {}}
    given |= {"training": {"steps": 3}, **sections}
    return load_settings({name: table for name, table in given.items() if table is not None})


@pytest.mark.parametrize(
    ("matching", "is_needed"),
    [
        ({}, False),
        ({"pattern": ["A", "A"]}, False),
        ({"pattern": ["A", "B"]}, True),
        ({"b_ratio": 0.0}, False),
        ({"b_ratio": 0.01}, True),
        ({"pattern": ["B"], "b_ratio": 0.0}, False),
    ],
)
def test_channel_a_alone_needs_no_engine(matching, is_needed):
    assert rolls_out(config(matching)) == uses_engine(config(matching)) == is_needed
    assert uses_engine(config(matching, evaluation={}))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"environment": None}, "needs an environment whose tasks have objects"),
        ({"data": {"path": "rows.jsonl"}}, "remove \\[data\\]"),
        ({"model": {"path": "m", "fp32_head": True}}, "never has the logits of coordinate tokens"),
        ({"matching": {"pattern": ["A", "B"], "temperature": 0.001}}, "vLLM would raise it"),
        ({"matching": {"pattern": ["A", "C"]}}, "pattern"),
        ({"matching": {"pattern": []}}, "pattern"),
        ({"matching": {"b_ratio": 1.5}}, "b_ratio"),
        ({"matching": {"softctx_iterations": 0}}, "softctx_iterations"),
        ({"matching": {"b_ratio": 0.5, "pattern": ["A", "B"]}}, "matching.pattern has no effect"),
        ({"matching": {"max_invalid": 0.5}}, "matching.max_invalid has no effect without a step of channel B"),
        ({"matching": {"softctx_unrolled": True}}, "matching.softctx_unrolled has no effect"),
        ({"algorithm": {"kind": "sft", "train_on": "last"}}, "algorithm.train_on has no effect under"),
        ({"algorithm": {"kind": "grpo"}}, "applies to sft, not to grpo"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(sections, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(**sections)


def test_what_matches_is_needed_by_evaluations_too():
    assert "matching.maskiou_gate" in inapplicable(config({}))
    assert "matching.maskiou_gate" not in inapplicable(config({}, evaluation={}))
    assert "matching.maskiou_gate" not in inapplicable(config({"pattern": ["B"]}))
